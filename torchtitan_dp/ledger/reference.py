"""The reference of `privacy.json`, from `schema`, as Markdown."""

import types
import typing
from typing import Any

from torchtitan_dp.config.reference import cell
from torchtitan_dp.ledger import schema


def privacy_reference() -> str:
    """Return the table of the keys of `privacy.json`."""
    rows = ["| key | type | in a release | meaning |", "| --- " * 4 + "|"]
    for key in schema.KEYS:
        is_only = key.origin is schema.Origin.RELEASE
        where = "only there" if is_only else "yes" if key.released else "no"
        kind = _json_type(key.type)
        rows.append(f"| `{key.name}` | {kind} | {where} | {cell(key.meaning)} |")
    return "\n".join(rows)


def _json_type(kind: Any) -> str:
    """The type of a key of `privacy.json`, in words."""
    if isinstance(kind, types.UnionType):
        told = dict.fromkeys(_json_type(one) for one in typing.get_args(kind))
        return " or ".join(name for name in told if (name, "number" in told) != ("integer", True))
    if typing.get_origin(kind) is list:
        return f"list of {_json_type(typing.get_args(kind)[0])}s"
    names: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return {**names, dict: "object", types.NoneType: "null"}[kind]
