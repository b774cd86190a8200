"""What selfcheck says: to people, line by line, and to programs."""

from typing import Any

from torchtitan_dp.selfcheck.result import Outcome

_WIDTH = 80


def row(outcome: Outcome) -> str:
    """Write an outcome's line of the table."""
    verdict = "ok" if outcome.passed else "FAILED"
    if outcome.value is None or outcome.bound is None:
        return f"  {verdict:6}  {outcome.name:{_WIDTH}}  {outcome.error}"
    return f"  {verdict:6}  {outcome.name:{_WIDTH}}  {outcome.value:9.3g}  <= {outcome.bound:.3g}"


def failure(outcome: Outcome) -> str:
    """Say in one line what failed, and what to do."""
    found = outcome.error
    if outcome.value is not None:
        found = f"{outcome.value:.3g}, and at most {outcome.bound:.3g} is right"
    return f"FAILED: {outcome.name}: {found}; {outcome.remedy}"


def for_programs(device: str, facts: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    """Put together what `--json` says."""
    return {
        "device": device,
        "facts": facts,
        "passed": all(outcome.passed for outcome in outcomes),
        "checks": [outcome.for_programs() for outcome in outcomes],
    }
