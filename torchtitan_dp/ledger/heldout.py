"""The noised held-out losses of a folder, and what they spend of one held-out unit.

Guarantee:
    `HeldOutLosses.evaluations` is at least the number of evaluations ever begun in the folder, and
    of those still planned: kept ones by their results, lost ones by blocks, so that it does not
    depend on how many a crash lost. Held-out units are disjoint from trained ones by a rule on
    their names alone, so that a unit pays for evaluations or for steps, never for both.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_dp.privacy.published_loss import LossNoise


class NoisedLoss(NamedTuple):
    """The result of one evaluation."""

    step: int
    loss: float  # nats
    standard_deviation: float  # of its noise


@dataclass(frozen=True)
class HeldOutLosses:
    """The terms of a folder's evaluations, and the results of those of a lineage of weights."""

    noise: LossNoise
    clip: float  # L, in nats
    delta: float
    target_epsilon: float  # from which the noise followed
    freq: int  # of evaluations, in steps
    lost: int = 0  # by blocks: evaluations begun in the folder beside those of the lineage
    losses: tuple[NoisedLoss, ...] = ()

    def evaluations(self, first: int, last: int) -> int:
        """Count evaluations: kept ones, lost ones, and those planned for steps first to last."""
        first = max(first, 1 + max((loss.step for loss in self.losses), default=0))
        return self.lost + len(self.losses) + scheduled(self.freq, first, last)

    def most_lost(self, steps: int) -> int:
        """Return the most evaluations that a crash loses with so many steps."""
        return steps if self.freq == 1 else 1 + steps // self.freq

    def kept(self, *losses: NoisedLoss) -> "HeldOutLosses":
        """Return the same terms with these results."""
        return dataclasses.replace(self, losses=tuple(losses))

    def fields(self) -> dict[str, Any]:
        """Return it as `privacy.json` and checkpoints record it."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        losses = [list(loss) for loss in self.losses]
        return {**own, "noise": self.noise.kind, "scale": self.noise.scale, "losses": losses}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "HeldOutLosses":
        """Build it from what `fields` gives.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        own = dict(fields)
        noise = LossNoise(own.pop("noise"), own.pop("scale"))
        losses = tuple(NoisedLoss(*loss) for loss in own.pop("losses"))
        return cls(noise, losses=losses, **own)


def scheduled(freq: int, first: int, last: int) -> int:
    """Count the evaluations of steps first to last: of step 1, and of each multiple of `freq`.

    >>> scheduled(10, 1, 40), scheduled(10, 2, 40), scheduled(10, 11, 19), scheduled(1, 1, 3)
    (5, 4, 0, 3)
    """
    if last < first:
        return 0
    return last // freq - (first - 1) // freq + (first <= 1 <= last and freq > 1)
