"""What a check is, what it measures on one rank, and what came of it on all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Holds one number that a check measured on this rank; it is right up to `bound`."""

    what: str
    value: float
    bound: float


@dataclass(frozen=True)
class Check:
    """Names a statement about this machine, how it is measured, and what to do if it is wrong."""

    name: str
    remedy: str
    measure: Callable[[], Sequence[Measured]]
    """Collective over the world; each rank returns the same `what`s in the same order."""


@dataclass(frozen=True)
class Outcome:
    """Holds what all ranks together say of one measurement: the worst value of any."""

    name: str
    value: float | None  # None where a rank could not measure
    bound: float | None
    remedy: str
    error: str = ""  # why it could not

    @property
    def passed(self) -> bool:
        """Tell whether the value is a number within its bound."""
        if self.value is None or self.bound is None:
            return False
        return self.value <= self.bound  # NaN is not

    def for_programs(self) -> dict[str, object]:
        """Put together what `--json` says of it; JSON has no NaN."""
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        return {"name": self.name, "passed": self.passed, "value": value, "bound": self.bound}


def worst(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any is: Python's `max` would depend on their order."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def merged(check: Check, ranks: Sequence[Sequence[Measured] | str]) -> list[Outcome]:
    """Merge what each rank measured, or why it could not, into outcomes that hold for all.

    Args:
        ranks: by rank; a string is the error that the rank ended the check with.
    """
    errors = [f"rank {rank}: {told}" for rank, told in enumerate(ranks) if isinstance(told, str)]
    if errors:
        return [Outcome(check.name, None, None, check.remedy, errors[0])]
    lists = [told for told in ranks if not isinstance(told, str)]
    assert len({tuple(m.what for m in told) for told in lists}) == 1, "ranks measured other things"
    outcomes = []
    for measured in zip(*lists, strict=True):
        value, bound = worst([m.value for m in measured]), min(m.bound for m in measured)
        outcomes.append(Outcome(f"{check.name}: {measured[0].what}", value, bound, check.remedy))
    return outcomes
