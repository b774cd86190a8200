"""Which step is which: what several accounts tell of the same steps is counted once.

Each start of the trainer draws a random, public name and takes its steps one after the other. So a
start's name and a number of steps say exactly which steps they were: where two accounts tell of the
same start, the account with more steps includes the one with fewer.

Guarantee:
    `union` leaves out no step: it drops those only that are known, by their start, to be among the
    rest. A copied folder that went on in two places has two starts from there on.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_dp.ledger.settings import RunSegment
from torchtitan_dp.privacy.segments import Segment


def new_name() -> str:
    """Draw a name of 64 random bits, which tells of nothing."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class StartedSteps:
    """Say how many steps of a lineage one start of the trainer took."""

    name: str
    steps: int


@dataclass(frozen=True)
class Stretch:
    """Name the first `steps` steps of a start, with what an accountant needs to know of them."""

    start: str
    noise_multiplier: float
    sample_rate: float
    steps: int
    projections: int = 0

    @property
    def which(self) -> tuple[str, float, float, int]:
        """Return what is the same for two stretches only if the longer includes the shorter."""
        return self.start, self.noise_multiplier, self.sample_rate, self.projections


def cut_into_stretches(
    segments: Sequence[RunSegment], starts: Sequence[StartedSteps]
) -> list[Stretch]:
    """Cut a lineage wherever its start, or what its steps spend, changes.

    Args:
        segments: its steps by terms, in order.
        starts: the same steps by start, in the same order.
    """
    assert sum(s.steps for s in segments) == sum(s.steps for s in starts), (segments, starts)
    left = [(segment.settings, segment.steps) for segment in segments if segment.steps]
    found: dict[tuple[str, float, float, int], int] = {}
    for start in starts:
        wanted = start.steps
        while wanted:
            settings, steps = left.pop(0)
            taken = min(wanted, steps)
            terms = settings.noise_multiplier, settings.sample_rate, settings.projections
            which = (start.name, *terms)
            # Segments that spend the same are one stretch: of two, `union` would take the longer.
            found[which] = found.get(which, 0) + taken
            wanted -= taken
            if steps > taken:
                left.insert(0, (settings, steps - taken))
    return [Stretch(name, sigma, q, steps, k) for (name, sigma, q, k), steps in found.items()]


def union(told: Iterable[Stretch]) -> list[Segment]:
    """Return all steps that any stretch tells of, each once, by terms."""
    most: dict[tuple[str, float, float, int], int] = {}
    for stretch in told:
        most[stretch.which] = max(most.get(stretch.which, 0), stretch.steps)
    by_terms: dict[tuple[float, float, int], int] = {}
    for (_, sigma, rate, k), steps in most.items():
        by_terms[sigma, rate, k] = by_terms.get((sigma, rate, k), 0) + steps
    return [Segment(sigma, rate, steps, k) for (sigma, rate, k), steps in sorted(by_terms.items())]


def worst_terms(known: Iterable[tuple[float, float, int]]) -> tuple[float, float, int]:
    """Return the least noise, the highest rate and the worst norms: of the fewest projections.

    Fewer projections are worse at every value (`privacy.envelope`), and exact norms are best.

    >>> worst_terms([(2.0, 0.1, 0), (1.0, 0.2, 64), (3.0, 0.1, 32)])
    (1.0, 0.2, 32)
    """
    noise, rates, projections = zip(*known, strict=True)
    return min(noise), max(rates), min((k for k in projections if k), default=0)
