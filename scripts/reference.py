"""Writes the references in the documents, which the code gives: run it after a change there.

    python scripts/reference.py [--write FILE]

Prints Markdown: a table for each section of the configuration that this project adds or changes,
and one of the keys of `privacy.json`. `--write` puts each between its two marks in a file instead
(docs/configuration.md, docs/privacy_json.md).
"""

import argparse
import sys
import types
import typing
from typing import Any

from torchtitan_dp.config.reference import cell, config_reference, field_docs
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


def privacy_reference() -> str:
    """Return the table of the keys of `privacy.json`."""
    rows = ["| key | type | in a release | meaning |", "| --- " * 4 + "|"]
    meanings = field_docs(schema.PrivacyFile)
    for key in schema.KEYS:
        is_only = key.origin is schema.Origin.RELEASE
        where = "only there" if is_only else "yes" if key.released else "no"
        kind = in_words(key.type)
        rows.append(
            f"| `{key.name}` | {kind} | {where} | {cell(key.meaning or meanings[key.name])} |"
        )
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
