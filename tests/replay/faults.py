"""Faults to plant in both runs of a replay: of the reviews' history, and others."""

from collections.abc import Callable
from typing import Any

FAULTS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    """Patch this process by a name of `FAULTS`."""
    FAULTS[name]()
