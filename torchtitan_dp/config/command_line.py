"""Checks of the command line against the schema before TorchTitan parses it.

A mistake is one plain line; TorchTitan's parser (tyro) prints boxes and Python's names of types.
"""

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

_OTHER_NAMES = {"peft": "lora", "dp": "privacy"}
"""Other projects' names of sections."""
_HELP = ("help", "h")

# Of earlier versions; each with its remedy.
REMOVED_KEYS = {
    "data.token_cache": "removed, since token ids are cached in memory and never written to disk; "
    "omit it",
    "data.token_cache_gib": "removed, since token ids are cached in memory, in bounded room; "
    "omit it",
}
_REMOVED_VALUES = {
    ("data.verify_records", "drawn"): "removed; omit it: all files are read and hashed once a "
    "machine ('contents'), and again only where they have changed",
}


def check_command_line(argv: list[str], schema: Any) -> None:
    """Refuse unknown options, values of another type, and words that belong to no option.

    Args:
        argv: `--section.key value` or `--section.key=value`, a switch alone; `-` equals `_`.
        schema: the dataclass of all sections.

    Raises:
        ValueError: one line for the user.
    """
    keys = dict(_keys(schema))
    words = iter(argv)
    last = ""  # the option before
    for word in words:
        option, equals, value = word.partition("=")
        key = option.lstrip("-").replace("-", "_")
        if not word.startswith("--"):
            if key not in _HELP:
                raise ValueError(_stray(word, last, keys))
            continue
        if key in _HELP:
            return
        last = key
        name = _switched(key)
        refuse_removed(name, value)
        if keys.get(name) is bool:
            if equals:
                raise ValueError(f"--{key} = {value!r}: {_switch(name)}")
            continue
        if key not in keys:
            raise ValueError(f"--{key}: unknown option; {proposal(key, keys)}")
        given = value if equals else next(words, None)
        if given is None or (not equals and given.startswith("--")):
            raise ValueError(f"--{key}: its value is missing; give {describe(keys[key])}")
        refuse_removed(key, given)
        if not _fits(given, keys[key]):
            raise ValueError(f"{key} = {given!r}: must be {describe(keys[key])}")


def refuse_removed(key: str, value: object, source: str = "") -> None:
    """Refuse a removed key or value.

    Args:
        source: its file, for the message.

    Raises:
        ValueError: one line for the user.
    """
    place = f" in {source}" if source else ""
    if key in REMOVED_KEYS:
        raise ValueError(f"{key}{place}: {REMOVED_KEYS[key]}")
    if isinstance(value, str) and (key, value) in _REMOVED_VALUES:
        raise ValueError(f"{key} = {value!r}{place}: {_REMOVED_VALUES[key, value]}")


def proposal(key: str, keys: typing.Collection[str]) -> str:
    """Propose a remedy for a key (`section.name`) or a section that is not among `keys`."""
    section, _, name = key.partition(".")
    sections = {one.partition(".")[0] for one in keys if "." in one}
    if not name:
        return _section(section, sections)
    section = _OTHER_NAMES.get(section, section)
    named = [one for one in keys if one.rpartition(".")[2] == name]
    here = [one for one in keys if one.partition(".")[0] == section]
    among = [one for one in here if name in one.split(".", 1)[1].split("_")]
    found = (
        [one for one in named if one in here]
        or (among if len(among) == 1 else [])
        or difflib.get_close_matches(f"{section}.{name}", here, n=1, cutoff=0.75)
        or (named if len(named) == 1 else [])
        or difflib.get_close_matches(f"{section}.{name}", keys, n=1, cutoff=0.75)
    )
    if found:
        return f"did you mean --{found[0]}?"
    return f"see the keys of [{section}]" if section in sections else _section(section, sections)


def other_section(section: str, sections: typing.Collection[str]) -> str | None:
    """Return the section that an unknown name probably means."""
    if _OTHER_NAMES.get(section) in sections:
        return _OTHER_NAMES[section]
    return next(iter(difflib.get_close_matches(section, sections, n=1)), None)


def describe(annotation: Any) -> str:
    """Describe the values that an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, tuple):
        return "a list"
    if arguments:
        return " or ".join(describe(a) for a in arguments if a is not type(None))
    return names.get(annotation, str(annotation))


def _section(section: str, sections: set[str]) -> str:
    if section in sections:
        return f"it is a section, whose keys are written --{section}.key"
    found = other_section(section, sections)
    return f"did you mean the section [{found}]?" if found else "remove it"


def _keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys with their annotations."""
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            yield from _keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _switched(key: str) -> str:
    """Return the key that `section.no_key` switches off, else the key."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}{name.removeprefix('no_')}"


def _switch(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"it is a switch without a value; write --{key} or --{section}.no-{name}"


def _stray(word: str, option: str, keys: dict[str, Any]) -> str:
    """Return the error for a word that is neither an option nor the value of one."""
    if keys.get(_switched(option)) is bool:
        return f"--{option} {word}: {_switch(_switched(option))}"
    if typing.get_origin(keys.get(option)) is list:
        return f"--{option} … {word}: a list is one word with commas; write --{option} a,b"
    return f"{word!r}: neither an option (--section.key) nor the value of one; remove it"


def _fits(text: str, annotation: Any) -> bool:
    """Return whether a value of the command line fits an annotated type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return text in map(str, arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(text, argument) for argument in arguments)
    if annotation is type(None):
        return text == "None"
    if annotation in (int, float):
        with contextlib.suppress(ValueError):
            annotation(text)
            return True
        return False
    return True
