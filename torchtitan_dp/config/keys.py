"""The values that a user gives in a TOML and on the command line, by the schema's keys and types.

A mistake is one plain line; TorchTitan's own parser prints boxes and Python's names of types.
"""

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torchtitan_dp.process import has_type

_OTHER_NAMES = {"peft": "lora", "dp": "privacy"}
"""Other projects' names of sections."""

_OTHER_KEYS = {
    "clip_norm": "privacy.max_grad_norm",
    "clipping_norm": "privacy.max_grad_norm",
    "l2_norm_clip": "privacy.max_grad_norm",
    "learning_rate": "optimizer.lr",
    "max_steps": "training.steps",
    "warmup_ratio": "lr_scheduler.warmup_steps",
}
"""Keys by other projects' names of them, in any section."""


Keys = dict[str, Any]
"""Values of a configuration's keys, by `section.key`."""


def keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys, as `section.key`, with their annotations."""
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            yield from keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


class Mistakes(ValueError):
    """The user's mistakes, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; and ".join(lines))
        self.lines = lines


def known_values(
    values: dict[str, Any], schema: Any, path: str, mistakes: list[str], prefix: str = ""
) -> dict[str, Any]:
    """Return the values of a TOML whose keys are known, which else would silently keep their
    defaults, and whose types are their keys'; enter one line for each other. `path` is for them."""
    fields, found = {field.name: field.type for field in dataclasses.fields(schema)}, {}
    for name, value in values.items():
        key, mistake = prefix + name, ""
        if name not in fields:
            hint = _proposal(key, [prefix + known for known in fields])
            mistake = f"{key}: unknown key in {path}; {hint}"
        elif dataclasses.is_dataclass(fields[name]):
            if isinstance(value, dict):
                value = known_values(value, fields[name], path, mistakes, f"{key}.")
            else:
                mistake = f"{key} = {value!r} in {path}: must be a [{key}] section"
        elif not has_type(value, fields[name]):
            mistake = f"{key} = {value!r} in {path}: must be {_describe(fields[name])}"
        if mistake:
            mistakes.append(mistake)
        else:
            found[name] = value
    return found


def read_command_line(argv: list[str], schema: Any, mistakes: list[str]) -> dict[str, Any]:
    """Return the values of the command line by key; of a key that is given twice, the last.

    Of `--section.key value` or `--section.key=value`, a switch alone; `-` equals `_`. Enter one
    line for each unknown option, value of another type, and word of no option.
    """
    known, values = dict(keys(schema)), {}
    words, last = deque(argv), ""
    while words:
        word = words.popleft()
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            if not last or _switched(last) in known:  # else the value of an unknown option
                mistakes.append(_stray(word, last, known))
            continue
        last, name = key, _switched(key)
        if known.get(name) is bool:
            if equals:
                mistakes.append(f"--{key} = {text!r}: {_switch(name)}")
            values[name] = name == key
            continue
        if key not in known:
            mistakes.append(f"--{key}: unknown option; {_proposal(key, known, '--')}")
            continue
        if not equals and (not words or words[0].startswith("--")):
            mistakes.append(f"--{key}: its value is missing; give {_describe(known[key])}")
            continue
        given = text if equals else words.popleft()
        try:
            values[key] = _parsed(given, known[key])
        except ValueError:
            mistakes.append(f"{key} = {given!r}: must be {_describe(known[key])}")
    return values


def _parsed(text: str, annotation: Any) -> Any:
    """Return the value of an annotated type that a text spells, or raise ValueError."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return arguments[[str(argument) for argument in arguments].index(text)]
    if origin is list:
        return text.split(",")
    if types.NoneType in arguments and text == "None":
        return None
    for argument in arguments:  # X | Y
        if argument is not types.NoneType:
            with contextlib.suppress(ValueError):
                return _parsed(text, argument)
    if arguments:
        raise ValueError
    return annotation(text)


def _describe(annotation: Any) -> str:
    """Describe the values that an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, tuple):
        return "a list"
    if arguments:
        return " or ".join(_describe(a) for a in arguments if a is not types.NoneType)
    return names.get(annotation, str(annotation))


def _proposal(key: str, known: Collection[str], dashes: str = "") -> str:
    """Propose a remedy for a key (`section.name`) or a section that is not among `known`."""
    section, _, name = key.partition(".")
    sections = {one.partition(".")[0] for one in known}
    if not name:
        return _section(section, sections)
    if _OTHER_KEYS.get(name) in known:
        return f"did you mean {dashes}{_OTHER_KEYS[name]}?"
    section = _OTHER_NAMES.get(section, section)
    named = [one for one in known if one.rpartition(".")[2] == name]
    here = [one for one in known if one.partition(".")[0] == section]
    among = [one for one in here if name in one.split(".", 1)[1].split("_")]
    found = (
        [one for one in named if one in here]
        or (among if len(among) == 1 else [])
        or difflib.get_close_matches(f"{section}.{name}", here, n=1, cutoff=0.75)
        or (named if len(named) == 1 else [])
        or difflib.get_close_matches(f"{section}.{name}", known, n=1, cutoff=0.75)
    )
    if found:
        return f"did you mean {dashes}{found[0]}?"
    return f"see the keys of [{section}]" if section in sections else _section(section, sections)


def _section(section: str, sections: set[str]) -> str:
    """Propose a section for the name of none, or for one that stands alone on a command line."""
    if section in sections:
        return f"it is a section, whose keys are written --{section}.key"
    close = [_OTHER_NAMES[section]] if section in _OTHER_NAMES else []
    close += difflib.get_close_matches(section, sections, n=1)
    if close:
        return f"did you mean the section [{close[0]}]?"
    return f"the sections are {', '.join(sorted(sections))}"


def _switched(key: str) -> str:
    """Return the key that `section.no_key` switches off, else the key."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}{name.removeprefix('no_')}"


def _switch(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"it is a switch without a value; write --{key} or --{section}.no-{name}"


def _stray(word: str, option: str, known: dict[str, Any]) -> str:
    """Return the error for a word that is neither an option nor the value of one."""
    if known.get(_switched(option)) is bool:
        return f"--{option} {word}: {_switch(_switched(option))}"
    if typing.get_origin(known.get(option)) is list:
        return f"{word!r} after --{option}: a list is one word with commas; write --{option} a,b"
    return f"{word!r}: neither an option (--section.key) nor the value of one; remove it"


def command_line(keys: Keys) -> list[str]:
    """Write a setting as the command line's overrides."""
    flags = {True: "", False: "no-"}
    return [
        f"--{key.replace('.', '.' + flags[value], 1)}"
        if isinstance(value, bool)
        else f"--{key}={value}"
        for key, value in keys.items()
    ]


def replaced(toml: str, keys: Keys) -> str:
    """Replace the values of keys in a TOML's text."""
    for key, value in keys.items():
        section, name = key.split(".")
        text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        line, header = f"{name} = {text}", rf"^\[{section}\][^\n]*\n"
        if not (found := re.search(header, toml, re.MULTILINE)):
            toml = f"{toml.rstrip()}\n\n[{section}]\n{line}\n"
            continue
        following = re.search(r"^\[", toml[found.end() :], re.MULTILINE)
        end = found.end() + following.start() if following else len(toml)
        body, times = re.subn(
            rf"^{name}\s*=[^\n]*", line, toml[found.end() : end], count=1, flags=re.MULTILINE
        )
        toml = toml[: found.end()] + ("" if times else f"{line}\n") + body + toml[end:]
    return toml
