"""What a benchmark has measured so far, so that one that was cut off goes on where it was.

One JSON line a measurement, written as it comes, beside the result's file; removed with the result
written. A line counts only for the same settings, arm, machine and versions.
"""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import torch

from .arms import Arm, Setting


class Journal:
    """Remembers measurements by what they are of; without a file, for this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._found: dict[str, list[Any]] = {}
        if path is not None and path.exists():
            whole, _, cut_off = path.read_text(encoding="utf-8").rpartition("\n")
            if cut_off:  # it was being written when the run ended: what comes next is no part of it
                path.write_text(whole and whole + "\n", encoding="utf-8")
            for line in whole.splitlines():
                key, value = json.loads(line)
                self._found.setdefault(key, []).append(value)
        self.resumed = sum(map(len, self._found.values()))

    def of(self, key: str) -> list[Any]:
        """What is known of a key, in the order in which it was measured."""
        return self._found.get(key, [])

    def add(self, key: str, value: Any) -> None:
        """Write a measurement down; from any process that has the journal."""
        self._found.setdefault(key, []).append(value)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")

    def remove(self) -> None:
        """Forget all: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def key_of(kind: str, setting: Setting, *arms: Arm, **terms: object) -> str:
    """A measurement's key: all that its result may depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    what = kind, dataclasses.asdict(setting), [dataclasses.asdict(arm) for arm in arms], terms
    return json.dumps([*what, platform.node(), device, torch.__version__], sort_keys=True)
