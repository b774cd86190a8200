"""Poisson sampling against random allocation, at the batch and steps asked for (`--recommend`)."""

import copy
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.terms import settings_of
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.spending import inherited
from torchtitan_dp.privacy.accounting import compose, rounded_up
from torchtitan_dp.privacy.coefficients import INDEPENDENT
from torchtitan_dp.privacy.segments import Segment

WORTH = 0.98
"""Random allocation is recommended where it spends at most this share of epsilon, a heuristic: a
crash counts whole rounds, and a run goes on from their ends alone."""


@dataclass(frozen=True)
class Samplings:
    """What random allocation spends with the noise for which Poisson sampling spends the target."""

    noise_multiplier: float
    target: float
    epsilon: float  # of random allocation, an upper bound
    round_steps: int

    @property
    def best(self) -> str:
        """The value of `privacy.sampling` that is recommended."""
        return "allocation" if self.epsilon <= WORTH * self.target else "poisson"

    def sentence(self) -> str:
        """Return the recommended sampling, and the reason."""
        advice = "take" if self.best == "allocation" else "keep"
        return (
            f"sampling: {advice} privacy.sampling = '{self.best}': with sigma = "
            f"{self.noise_multiplier:.4g}, at which 'poisson' spends epsilon = {self.target:g}, "
            f"'allocation' spends {rounded_up(self.epsilon, digits=4)}, in whole rounds of "
            f"{self.round_steps} steps"
        )

    def for_programs(self) -> dict[str, Any]:
        return {
            "sampling": self.best,
            "reason": self.sentence(),
            "noise_multiplier": self.noise_multiplier,
            "epsilon_of_allocation": self.epsilon,
            "round_steps": self.round_steps,
        }


def weigh_samplings(config: JobConfig, plan: Plan, noise_multiplier: float) -> Samplings | None:
    """Weigh both samplings; None where random allocation is not accounted for.

    Args:
        noise_multiplier: with which Poisson sampling meets the target.
    """
    settings, target = plan.settings, config.privacy.target_epsilon
    assert target is not None
    if settings.bands > 1 or settings.mechanism.largest_share > 1 or settings.accountant != "pld":
        return None
    config = copy.deepcopy(config)
    config.privacy.sampling = "allocation"
    units = settings.implied_units
    allocated = settings_of(config, units, noise_multiplier, INDEPENDENT).mechanism
    if allocated.round_steps == 1 or plan.steps == 0:
        return None
    segments = [*inherited(plan.ledger.ancestors), Segment(allocated, plan.steps)]
    spent = compose(segments, delta=settings.delta, accountant=settings.accountant)
    return Samplings(noise_multiplier, target, spent, allocated.round_steps)
