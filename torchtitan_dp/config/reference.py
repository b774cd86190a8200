"""The reference of the configuration, as Markdown: the docstrings of its fields."""

import ast
import dataclasses
import inspect
import types
import typing
from typing import Any

from torchtitan_dp.config.schema import JobConfig


def config_reference() -> str:
    """Return one table a section, in the order of `JobConfig`."""
    sections = [_section(f.name, f.type) for f in dataclasses.fields(JobConfig)]
    return "\n\n".join(sections)


def _section(name: str, cls: Any) -> str:
    docs = field_docs(cls)
    rows = [
        f"| `{f.name}` | {_type(f.type)} | `{_value(_default(f))}` | {cell(docs[f.name])} |"
        for f in dataclasses.fields(cls)
    ]
    title = f"**`[{name}]`** {' '.join((inspect.getdoc(cls) or '').split())}"
    return "\n".join([title, "", "| key | type | default | meaning |", "| --- " * 4 + "|", *rows])


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
        return ", ".join(f"`{_value(a)}`" for a in arguments)
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


def cell(text: str) -> str:
    """Return `text` as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
