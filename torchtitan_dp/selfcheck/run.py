"""Runs checks on all ranks, and agrees on what came of each."""

from collections.abc import Callable, Iterable, Sequence

from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.result import Check, Measured, Outcome, merged


def run(
    ranks: Ranks, checks: Iterable[Check], tell: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run each check, and return what all ranks together say of it.

    A check that raises has failed. If it raised on some ranks alone, the others may have been left
    in the middle of something: no further check is run.

    Args:
        tell: called with each outcome as it comes, on all ranks.

    Collective over the world.
    """
    outcomes: list[Outcome] = []
    for check in checks:
        told = _measure(check)
        failed = isinstance(told, str)
        line = f"{check.name}: {told if failed else 'another rank has ended'}"
        with ranks.ending_if_alone(line, waits=not failed):
            found = ranks.gather(told)
        for outcome in merged(check, found):
            outcomes.append(outcome)
            tell(outcome)
        errors = sum(isinstance(one, str) for one in found)
        if 0 < errors < ranks.world_size:
            break
    return outcomes


def _measure(check: Check) -> Sequence[Measured] | str:
    """Return what a check measures here, or why it cannot, in one line."""
    try:
        return tuple(check.measure())
    except (Exception, SystemExit) as error:  # a `Fault` is a SystemExit
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
