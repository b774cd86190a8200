"""What a run spends while it trains: known ahead for a few points, published in `privacy.json`.

Guarantee:
    `epsilon` is of the weights' own lineage, `epsilon_executed` of every step ever begun in the
    folder, `epsilon_planned` of those and of all that are still planned. None is ever below
    `Ledger.compose` of its steps. The first two are computed once for a few points ahead, and a
    query gives the next point up, so that no step waits for an accountant. `epsilon_planned` also
    holds if weights decided when to stop; no epsilon covers a stop that followed from losses, norms
    or other logs.
"""

import dataclasses
import functools
import math
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.caveats import assumptions, caveats
from torchtitan_dp.ledger.files import ExecutedSteps, write_published
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.program import source, versions
from torchtitan_dp.ledger.starts import union
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.curve import EpsilonCurve
from torchtitan_dp.privacy.events import dp_event
from torchtitan_dp.privacy.meaning import Meaning, meaning, meaning_of
from torchtitan_dp.privacy.segments import Segment, merged


class Account:
    """Tell what is spent after one start, whose steps go on from the ledger to `total_steps`."""

    def __init__(self, ledger: Ledger, executed: ExecutedSteps, total_steps: int) -> None:
        self._ledger, self._executed = ledger, executed
        self._first_step, self._lines = ledger.steps, executed.count
        self._remaining = max(total_steps - ledger.steps, 0)
        before, own = ledger.taken_before(), ledger.taken()
        begun = [*own, *executed.begun(ledger.settings)]  # a checkpoint may lack its log
        self._first_count = sum(segment.steps for segment in union(begun))
        self._lineage, self._begun = union([*before, *own]), union([*before, *begun])

    @property
    def steps_executed(self) -> int:
        """Count the steps ever begun here, and those of a lineage that came without their log."""
        return self._first_count + self._begun_now

    def epsilon(self) -> float:
        """Return what the lineage spent; infinite if it is not private."""
        if self._ledger.adaptive:  # what was chosen may depend on abandoned steps as well
            return self.epsilon_executed()
        taken = self._ledger.steps - self._first_step
        return self._at(self._lineage_curve, self._lineage, taken)

    def epsilon_executed(self) -> float:
        """Return what all steps ever begun in the folder spent."""
        return self._at(self._begun_curve, self._begun, self._begun_now)

    def planned(self) -> list[Segment]:
        """Return all steps ever begun and those still planned."""
        begun = self._ledger.settings.spending(self._begun_now)
        return list(merged([*self._begun, begun, *self._ledger.still_planned()]))

    def publish(self, folder: str) -> dict[str, Any]:
        """Write `privacy.json` atomically and return what it says.

        The file speaks for every checkpoint in the folder: none is further than these weights,
        which were loaded from the newest.
        """
        ledger = self._ledger
        epsilon = self.epsilon()
        executed = max(self.epsilon_executed(), epsilon)
        steps = self.planned()
        planned = max(self._composed(steps), executed)
        content = schema.assemble(
            ledger,
            {
                "epsilon": epsilon if ledger.private else None,
                "epsilon_executed": executed if ledger.composes else None,
                "epsilon_planned": planned if ledger.composes else None,
                "steps_executed": self.steps_executed,
                "caveats": caveats(ledger, epsilon, planned),
                **told_of(ledger, steps, planned),
            },
        )
        write_published(folder, content)
        return content

    @property
    def _begun_now(self) -> int:
        """Count the steps begun since this start."""
        return self._executed.count - self._lines

    def _composed(self, steps: list[Segment]) -> float:
        """Return what these steps spend; infinite if they are not private."""
        return self._ledger.compose(steps) if self._ledger.composes else math.inf

    def _at(self, curve: EpsilonCurve | None, spent: list[Segment], more: int) -> float:
        """Return what is spent after `more` steps, from the curve where there is one."""
        if self._ledger.composes and curve is not None and more >= 0:
            return curve.at(more)
        return self._composed([*spent, self._ledger.settings.spending(max(more, 0))])

    @functools.cached_property
    def _lineage_curve(self) -> EpsilonCurve | None:
        """Return what the lineage will have spent."""
        return self._curve(self._lineage)

    @functools.cached_property
    def _begun_curve(self) -> EpsilonCurve | None:
        """Return what all steps ever begun will have spent."""
        if merged(self._begun) == merged(self._lineage):
            return self._lineage_curve
        return self._curve(self._begun)

    def _curve(self, before: list[Segment]) -> EpsilonCurve | None:
        """Return what these steps and the coming ones spend, known ahead for a few points."""
        if self._ledger.adaptive:  # a sum, which is quick
            return None
        settings = self._ledger.settings
        return EpsilonCurve(
            before,
            noise_multiplier=settings.noise_multiplier,
            sample_rate=settings.sample_rate,
            delta=settings.delta,
            accountant=settings.accountant,
            total_steps=self._remaining,
            projections=settings.projections,
        )


def told_of(ledger: Ledger, segments: list[Segment], epsilon: float) -> dict[str, Any]:
    """Return what `privacy.json` says of a ledger and of the steps that an epsilon is of.

    Args:
        segments: those steps.
        epsilon: infinite if they are not private.
    """
    what = explain(ledger, segments, epsilon)
    return {
        "meaning": what.to_json() if what is not None else None,
        # Of adaptive segments the filter's budget is the epsilon, which no event tells of.
        "dp_event": dp_event(segments) if ledger.composes and not ledger.adaptive else None,
        "assumptions": assumptions(ledger),
        "segments": [dataclasses.asdict(segment) for segment in ledger.segments()],
        "starts": [dataclasses.asdict(s) for s in ledger.starts() if s.steps > 0],
        "versions": versions(),
        "source": source(),
    }


def explain(ledger: Ledger, segments: list[Segment], epsilon: float) -> Meaning | None:
    """Return what an epsilon means for one person; None where there is no privacy."""
    if not ledger.composes or not math.isfinite(epsilon):
        return None
    if ledger.adaptive:  # only the budget holds, of whatever steps
        return meaning_of(epsilon, ledger.settings.delta)
    return meaning(segments, ledger.settings.delta)


def summary(spent: dict[str, Any]) -> list[str]:
    """Say for people what `privacy.json` holds."""
    epsilon = f"epsilon = {rounded_up(spent['epsilon'])}" if spent["private"] else "NOT private"
    k, capped = spent["projections"], spent["capped_projections"]
    norms = f"norms from {k or capped} projections, " if k or capped else ""
    norms += "capped, " if capped else ""
    lines = [
        f"done: {spent['steps']} steps",
        f"privacy: {epsilon}, delta = {spent['delta']:g} "
        f"(sigma = {spent['noise_multiplier']:.4f}, q = {spent['sample_rate']:.5f}, "
        f"C = {spent['max_grad_norm']:g}, {norms}{spent['accountant']}; unit: one "
        f"{spent['privacy_unit']}; neighbours: {spent['neighbouring_relation']})",
    ]
    if spent["private"] and spent["steps_executed"] > spent["steps"]:
        lines.append(
            f"privacy of all that ran here: epsilon = {rounded_up(spent['epsilon_executed'])} "
            f"after {spent['steps_executed']} steps, lost and abandoned ones included"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in spent["caveats"])]
