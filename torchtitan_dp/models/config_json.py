"""Reading a `config.json`, by `transformers`: a key that a family does not support is refused by
name."""

import copy
import json
from collections.abc import Iterable
from typing import Any, NoReturn

Supported = Iterable[tuple[str, tuple[Any, ...], str]]
"""Keys of a `config.json`, the values that a family computes, and what else they would mean."""


class Reader:
    """The values of one `config.json`, checked as they are read.

    Raises:
        ValueError: in each method, one line for the user that names the key.
    """

    def __init__(self, settings: dict[str, Any], path: str, key: str, supported: Supported) -> None:
        """Read `settings`, the file's content; `path` and `key`, of its folder, are for
        messages."""
        self.settings, self.path, self.key = settings, path, key
        for name, values, why in supported:
            if settings.get(name) not in values:
                self.refuse(name, settings.get(name), why)

    def size(self, name: str) -> int:
        """Read a whole number."""
        value = self.settings.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "must be a whole number, 1 or more")
        return value

    def configuration(self) -> Any:
        """Return transformers' configuration, with all defaults filled in."""
        kind = self.settings["model_type"]
        try:
            return configuration(self.settings)
        except Exception as error:  # classes check their settings by errors of many kinds
            self.refuse("model_type", kind, f"transformers cannot read it ({in_one_line(error)})")

    def refuse(self, name: str, value: object, why: str) -> NoReturn:
        """Raise ValueError for a key's value."""
        shown = "missing" if value is None else json.dumps(value)
        raise ValueError(
            f"{self.key}: {self.path} has {name} = {shown}: {why}; use a model that has it so (for "
            "the tokenizer alone, copy its files into a folder without config.json)"
        )


def configuration(settings: dict[str, Any]) -> Any:
    """Build transformers' configuration of a `config.json`."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    if getattr(made, "rope_parameters", None):
        made.standardize_rope_params()  # by keys beside it, as before each table
    return made


def in_one_line(error: Exception) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())
