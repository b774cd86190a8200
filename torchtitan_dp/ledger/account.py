"""What a run that goes on has spent, known ahead, and published in `privacy.json`.

Guarantee:
    `epsilon` is of the weights' own lineage, `epsilon_executed` of every step ever begun in the
    folder, both never below `Ledger.compose` of those steps: they are computed once for a few
    points ahead, and a query gives the next point up, so that no step waits for an accountant.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
from typing import Any

from torchtitan_dp.ledger.files import PRIVACY_FILE, ExecutedSteps, write_atomically
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.starts import union
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.curve import EpsilonCurve
from torchtitan_dp.privacy.segments import Segment as Mechanism
from torchtitan_dp.privacy.segments import merged

_LIBRARIES = ("torchtitan-dp", "torch", "torchtitan", "opacus", "dp-accounting", "numpy", "scipy")


class Account:
    """Of one start: the ledger is loaded, and its steps go on up to `total_steps`."""

    def __init__(self, ledger: Ledger, executed: ExecutedSteps, total_steps: int) -> None:
        self._ledger, self._executed = ledger, executed
        self._first_step, self._lines = ledger.steps, executed.count
        self._remaining = max(total_steps - ledger.steps, 0)
        before, own = ledger.stretches_before(), ledger.stretches()
        begun = [*own, *executed.stretches(ledger.settings)]  # a checkpoint may lack its log
        self._first_count = sum(segment.steps for segment in union(begun))
        self._lineage, self._begun = union([*before, *own]), union([*before, *begun])

    @property
    def steps_executed(self) -> int:
        """Steps ever begun in the folder, and those of a lineage that came without their log."""
        return self._first_count + self._executed.count - self._lines

    def epsilon(self) -> float:
        """Spent by the lineage; infinite if it is not private."""
        if self._ledger.adaptive:  # what was chosen may depend on abandoned steps as well
            return self.epsilon_executed()
        taken = self._ledger.steps - self._first_step
        return self._at(self._lineage_curve, self._lineage, taken)

    def epsilon_executed(self) -> float:
        """Spent by all steps ever begun in the folder."""
        begun = self._executed.count - self._lines
        return self._at(self._begun_curve, self._begun, begun)

    def publish(self, folder: str) -> dict[str, Any]:
        """Write `privacy.json` atomically; returns what it says.

        The file speaks for every checkpoint in the folder: none is further than these weights,
        which were loaded from the newest.
        """
        ledger, settings = self._ledger, self._ledger.settings
        epsilon = self.epsilon()
        epsilon_executed = max(self.epsilon_executed(), epsilon)
        content = {
            "private": ledger.private,
            "epsilon": epsilon if ledger.private else None,
            "delta": settings.delta,
            "accountant": settings.accountant,
            "noise_multiplier": settings.noise_multiplier,
            "max_grad_norm": settings.max_grad_norm,
            "sample_rate": settings.sample_rate,
            "sample_rate_source": settings.sample_rate_source,
            "steps": ledger.steps,
            "steps_executed": self.steps_executed,
            "epsilon_executed": epsilon_executed if ledger.private else None,
            "expected_batch_size": settings.expected_batch_size,
            "privacy_unit": settings.privacy_unit,
            "neighbouring_relation": settings.neighbouring_relation,
            "caveats": ledger.caveats,
            "segments": [dataclasses.asdict(segment) for segment in ledger.segments()],
            "starts": [dataclasses.asdict(s) for s in ledger.starts() if s.steps > 0],
            "ancestors": [dataclasses.asdict(ancestor) for ancestor in ledger.ancestors],
            "budget": None if ledger.budget is None else dataclasses.asdict(ledger.budget),
            "adaptive": ledger.adaptive,
            "planned_steps": ledger.planned_steps,
            "run": ledger.run,
            "config_hash": ledger.config_hash,
            "versions": versions(),
        }
        write_atomically(
            os.path.join(folder, PRIVACY_FILE), json.dumps(content, indent=2).encode() + b"\n"
        )
        return content

    def _at(self, curve: EpsilonCurve | None, spent: list[Mechanism], more: int) -> float:
        if not self._ledger.private:
            return math.inf
        if curve is not None and more >= 0:
            return curve.at(more)
        return self._ledger.compose([*spent, self._ledger.settings.mechanism(max(more, 0))])

    @functools.cached_property
    def _lineage_curve(self) -> EpsilonCurve | None:
        return self._curve(self._lineage)

    @functools.cached_property
    def _begun_curve(self) -> EpsilonCurve | None:
        if merged(self._begun) == merged(self._lineage):
            return self._lineage_curve
        return self._curve(self._begun)

    def _curve(self, before: list[Mechanism]) -> EpsilonCurve | None:
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
        )


@functools.cache
def versions() -> dict[str, str]:
    """Of the libraries that the guarantee rests on."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on a path, not installed
            found[name] = "unknown"
    return found


def summary(spent: dict[str, Any]) -> list[str]:
    """For people: what `privacy.json` says."""
    epsilon = f"epsilon = {rounded_up(spent['epsilon'])}" if spent["private"] else "NOT private"
    lines = [
        f"done: {spent['steps']} steps",
        f"privacy: {epsilon}, delta = {spent['delta']:g} "
        f"(sigma = {spent['noise_multiplier']:.4f}, q = {spent['sample_rate']:.5f}, "
        f"C = {spent['max_grad_norm']:g}, {spent['accountant']}; unit: one "
        f"{spent['privacy_unit']}; neighbours: {spent['neighbouring_relation']})",
    ]
    if spent["private"] and spent["steps_executed"] > spent["steps"]:
        lines.append(
            f"privacy of all that ran here: epsilon = {rounded_up(spent['epsilon_executed'])} "
            f"after {spent['steps_executed']} steps, lost and abandoned ones included"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in spent["caveats"])]
