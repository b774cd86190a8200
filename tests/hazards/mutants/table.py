"""What a mutant is, and all of them.

Each is a small edit of the package that puts in one of the faults of README.md's rows, and the
cheapest tests that must then fail. The texts to replace occur exactly once: code that moves takes
its mutants along, or test_mutants.py says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    row: int
    fault: str
    file: str  # below torchtitan_dp/
    old: str
    new: str
    tests: tuple[str, ...]  # node ids below tests/
    quick: bool = False  # its tests need no other process: part of the default suite

    @property
    def name(self) -> str:
        return f"row{self.row:02}-{self.fault.replace(' ', '_')}"

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Edit the copy of the package at `root`, and restore it in the end."""
        path = root / "torchtitan_dp" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must occur once in {path}"
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def node_ids(mutant: Mutant) -> tuple[str, ...]:
    """Its tests, as pytest is given them at the root."""
    return tuple(f"tests/{test}" for test in mutant.tests)
