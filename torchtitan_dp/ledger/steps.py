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
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.ledger.settings import RunSegment, Settings
from torchtitan_dp.privacy.segments import Segment

Terms = tuple[float, float, int]
"""Noise multiplier, sample rate and projections of a step: its spending."""


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
    """A step, with its terms."""

    name: str
    noise_multiplier: float
    sample_rate: float
    projections: int = 0

    @property
    def terms(self) -> Terms:
        """The spending of this step."""
        return self.noise_multiplier, self.sample_rate, self.projections


def name_steps(segments: Sequence[RunSegment], names: Sequence[str]) -> list[NamedStep]:
    """Return the steps of a lineage, with their terms.

    Args:
        segments: its steps by terms, in order.
        names: of the same steps, in the same order.
    """
    terms = [terms_of(s.settings) for s in segments for _ in range(s.steps)]
    return [NamedStep(name, *which) for name, which in zip(names, terms, strict=True)]


def union(steps: Iterable[NamedStep]) -> list[Segment]:
    """Return all steps, each once, by terms."""
    counts = Counter(step.terms for step in set(steps))
    return [Segment(sigma, q, count, k) for (sigma, q, k), count in sorted(counts.items())]


def terms_of(settings: Settings) -> Terms:
    """Return what an accountant needs to know of a step on these settings."""
    return settings.noise_multiplier, settings.sample_rate, settings.projections


def worst_terms(known: Iterable[Terms]) -> Terms:
    """Return the least noise, the highest rate and the worst norms: of the fewest projections.

    Fewer projections are worse at every value (`privacy.envelope`), and exact norms are best.

    >>> worst_terms([(2.0, 0.1, 0), (1.0, 0.2, 64), (3.0, 0.1, 32)])
    (1.0, 0.2, 32)
    """
    noise, rates, projections = zip(*known, strict=True)
    return min(noise), max(rates), min((k for k in projections if k), default=0)
