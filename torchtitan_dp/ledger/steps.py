"""Which step is which: a step that several accounts list counts once.

Each start of the trainer draws a random, secret name and numbers its steps. A step's own name is a
hash of the two, so that names in `privacy.json` identify steps and hide which of them one start
took: how many steps fitted into a job follows from how long they took, and so from records.

Guarantee:
    `union` leaves out no step: it drops only steps whose name and terms are already there. A copied
    folder that was trained on in two places has two starts from there on, and so other names. Names
    of one start cannot be linked without its own name (SHA-256 of 128 random bits and a number);
    that is in the log of steps and in checkpoints, which are private.
"""

import hashlib
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_dp.ledger.settings import RunSegment
from torchtitan_dp.privacy.mechanism import Mechanism, Segment


def new_name() -> str:
    """Draw a name of 128 random bits."""
    return secrets.token_hex(16)


def step_name(start: str, number: int) -> str:
    """Return the public name of a start's step.

    Args:
        start: the secret name of the start.
        number: of the step among those of its start, from 1.
    """
    return hashlib.sha256(f"{start} {number}".encode()).hexdigest()[:16]


def step_names(start: str, steps: int) -> list[str]:
    """Return the names of the first `steps` steps of a start."""
    return [step_name(start, number) for number in range(1, steps + 1)]


def names_of_starts(starts: Iterable[dict[str, Any]]) -> str:
    """Return the names of a lineage that version 0.1.0 listed by start: `[{name, steps}]`."""
    return " ".join(name for s in starts for name in step_names(s["name"], s["steps"]))


@dataclass(frozen=True)
class NamedStep:
    """A step, with its mechanism as a log records it."""

    name: str
    mechanism: Mechanism
    run: str = field(default="", compare=False)  # whose groups of units these are


def name_steps(segments: Sequence[RunSegment], names: Sequence[str], run: str) -> list[NamedStep]:
    """Return the steps of a lineage, with their mechanisms.

    Args:
        segments: its steps by terms, in order.
        names: of the same steps, in the same order.
        run: that took them.
    """
    number = itertools.count(1)
    mechanisms = [s.settings.mechanism.at(next(number)) for s in segments for _ in range(s.steps)]
    return [NamedStep(name, which, run) for name, which in zip(names, mechanisms, strict=True)]


def union(steps: Iterable[NamedStep]) -> list[Segment]:
    """Return all steps, each once, by mechanism, and groups by run too."""
    counts = Counter(
        (step.mechanism, "" if step.mechanism.group is None else step.run) for step in set(steps)
    )
    found = (Segment(mechanism, count, run) for (mechanism, run), count in counts.items())
    return sorted(found, key=lambda segment: segment.order)
