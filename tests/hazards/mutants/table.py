"""What a mutant is, and all of them, by room: the files `*.diff` beside this one.

Each is a small edit of the package that puts in one of the faults of README.md's rows, and the
cheapest test that must then fail. The text to replace occurs exactly once: code that moves takes
its mutants along, or test_mutants.py fails. A mutant is a block of lines, between empty ones:

    row 8: half the noise
    torchtitan_dp/privacy/noise.py
    tests/privacy/test_noise.py::test_std_scales_the_variance
    -add_(values[drawn], alpha=std)
    +add_(values[drawn], alpha=std / 2)

The lines after `-` are the text, which may begin and end within a line, and those after `+` what
replaces it. The first mutant of each file needs no other process: it is in the default suite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    row: int
    fault: str
    file: str
    test: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"row{self.row:02}-{self.fault.replace(' ', '_')}"

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Edit the copy of the repository at `root`, and restore it in the end."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must occur once in {path}"
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def _mutant(block: str) -> Mutant:
    first, file, test, *edit = block.splitlines()
    row, _, fault = first.removeprefix("row ").partition(": ")
    old, new = ("\n".join(line[1:] for line in edit if line[0] == sign) for sign in "-+")
    return Mutant(int(row), fault, file, test, old, new)


def read() -> dict[str, list[Mutant]]:
    """Return the mutants of each room."""
    rooms = {}
    for path in sorted(HERE.glob("*.diff")):
        lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
        blocks = "\n".join(lines).strip("\n").split("\n\n")
        rooms[path.stem] = [_mutant(block.strip("\n")) for block in blocks]
    return rooms
