"""The reference of the configuration, generated from the docstrings in `config.py`.

    python -m torchtitan_dp.reference [--write README.md]

Prints Markdown: a table for each section that this project adds or changes. `--write` puts it
between the two `config reference` marks of a file instead.
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

BEGIN = "<!-- config reference: begin -->"
END = "<!-- config reference: end -->"


def markdown() -> str:
    """One table a section, in the order of `JobConfig`."""
    sections = [_section(f.name, f.type) for f in dataclasses.fields(JobConfig)]
    return "\n\n".join(sections)


def insert(text: str) -> str:
    """`text` with what lies between the marks replaced by the reference.

    Raises:
        ValueError: unless each mark occurs once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"needs one line '{BEGIN}' and, below it, one line '{END}'")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def _section(name: str, cls: Any) -> str:
    docs = _field_docs(cls)
    rows = [
        f"| `{f.name}` | {_type(f.type)} | `{_value(f.default)}` | {_cell(docs[f.name])} |"
        for f in dataclasses.fields(cls)
    ]
    title = f"**`[{name}]`** {' '.join((inspect.getdoc(cls) or '').split())}"
    return "\n".join([title, "", "| key | type | default | meaning |", "| --- " * 4 + "|", *rows])


def _field_docs(cls: Any) -> dict[str, str]:
    """Field name -> the docstring below it, which Python itself does not keep."""
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
        return ", ".join(f"`{_value(a)}`" for a in arguments)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_type(a) for a in arguments if a is not types.NoneType)
    return str(annotation.__name__)


def _value(value: Any) -> str:
    """As a TOML spells it; None is a key that is left out."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.reference", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", metavar="FILE", help="update this Markdown file")
    options = parser.parse_args(argv)
    if options.write is None:
        print(markdown())
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
