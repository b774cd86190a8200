"""Writes the references in the documents, which the code gives: run it after a change there.

    python scripts/reference.py [--write FILE]

Prints Markdown: a list for each section of the configuration that this project adds or changes,
and one of the keys of `privacy.json`. `--write` puts each between its two marks in a file instead
(docs/configuration.md, docs/privacy_json.md).
"""

import argparse
import ast
import dataclasses
import inspect
import sys
import types
import typing
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import schema

_BEGIN, _END = "<!-- {} reference: begin -->", "<!-- {} reference: end -->"
_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    dict: "object",
    types.NoneType: "null",
}


def config_reference() -> str:
    """Return one table a section, in the order of `JobConfig`."""
    sections = [_section(f.name, f.type) for f in dataclasses.fields(JobConfig)]
    return "\n\n".join(sections)


def _section(name: str, cls: Any) -> str:
    docs = field_docs(cls)
    rows = [
        f"- `{f.name}` ({_type(f.type)}, `{_value(_default(f))}`): {one_line(docs[f.name])}"
        for f in dataclasses.fields(cls)
    ]
    return "\n".join([f"**`[{name}]`** {one_line(inspect.getdoc(cls) or '')}", "", *rows])


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def field_docs(cls: Any) -> dict[str, str]:
    """Return the docstring below each field, by its name; Python does not keep it."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert is_doc, f"{cls.__name__}.{statement.target.id} has no docstring"
            docs[statement.target.id] = inspect.cleandoc(below.value.value)  # type: ignore
    return docs


def _type(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{_value(a)}`" for a in arguments)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_type(a) for a in arguments if a is not types.NoneType)
    return str(annotation.__name__)


def _value(value: Any) -> str:
    """Return the TOML spelling of a value; None is an unset key."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def one_line(text: str) -> str:
    """Return `text` without its line breaks."""
    return " ".join(text.split())


def privacy_reference() -> str:
    """Return the list of the keys of `privacy.json`."""
    meanings = field_docs(schema.PrivacyFile)
    rows = []
    for key in schema.KEYS:
        where = "" if key.in_runs else "; of a release alone"
        where = where if key.in_releases else "; in no release"
        rows.append(f"- `{key.name}` ({in_words(key.type)}{where}): {one_line(meanings[key.name])}")
    return "\n".join(rows)


def in_words(kind: Any) -> str:
    """Name a type in words.

    >>> in_words(int | float | None), in_words(list[str])
    ('number or null', 'list of strings')
    """
    if isinstance(kind, types.UnionType):
        told = dict.fromkeys(in_words(one) for one in typing.get_args(kind))
        return " or ".join(name for name in told if (name, "number" in told) != ("integer", True))
    if typing.get_origin(kind) is list:
        return f"list of {in_words(typing.get_args(kind)[0])}s"
    return _WORDS[kind]


REFERENCES = {"config": config_reference, "privacy.json": privacy_reference}


def insert(text: str) -> str:
    """Return `text` with what lies between marks replaced by the reference that they name.

    Raises:
        ValueError: there are no marks, or a pair of them is not there once, in order.
    """
    wanted = [name for name in REFERENCES if any(m.format(name) in text for m in (_BEGIN, _END))]
    if not wanted:
        raise ValueError(f"needs one line '{_BEGIN.format('config')}' and, below it, its end")
    for name in wanted:
        begin, end = _BEGIN.format(name), _END.format(name)
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end) or begin in rest or end in before + after:
            raise ValueError(f"needs one line '{begin}' and, below it, one line '{end}'")
        text = f"{before}{begin}\n\n{REFERENCES[name]()}\n\n{end}{after}"
    return text


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/reference.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", metavar="FILE", help="update this Markdown file")
    options = parser.parse_args(argv)
    if options.write is None:
        print("\n\n".join(reference() for reference in REFERENCES.values()))
        return
    with open(options.write, encoding="utf-8") as file:
        old = file.read()
    try:
        new = insert(old)
    except ValueError as error:
        parser.error(f"{options.write}: {error}")
    if new != old:
        with open(options.write, "w", encoding="utf-8") as file:
            file.write(new)


if __name__ == "__main__":
    main(sys.argv[1:])
