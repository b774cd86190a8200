"""The types of values in JSON: whether a value is of one, and what it is called in words."""

import math
import types
import typing
from typing import Any

_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    dict: "object",
    types.NoneType: "null",
}


def fits(value: Any, kind: Any) -> bool:
    """Tell whether a value, as JSON or as Python has it, is of a type.

    >>> fits(1, int | float), fits(True, int), fits(None, str | None), fits([1], list[str])
    (True, False, True, False)
    """
    if isinstance(kind, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        (inside,) = typing.get_args(kind)
        return isinstance(value, list | tuple) and all(fits(one, inside) for one in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float and isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, kind)


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
