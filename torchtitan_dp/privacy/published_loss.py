"""The held-out loss that may be published: a mean of clipped losses, with noise of its own.

    f(x) = 1/n * sum over n held-out units of min(max(loss, 0), L)

Guarantee
---------
One unit's content moves f by at most L / n: n is public and no function of losses, each unit adds
from 0 to L whatever its loss is (NaN adds L, a unit without a target 0), and the sum is of whole
numbers of L / 2^30, without rounding. So an evaluation with noise of scale s L / n is, for one
held-out unit under `zero_out`,

- with Laplace noise 1/s-DP, and k evaluations are k/s-DP (basic composition);
- with Gaussian noise the Gaussian mechanism of noise multiplier s, and k evaluations are exactly
  one of s / sqrt(k) (Dong, Roth & Su 2022, corollary 3.3);

also where weights and later evaluations were chosen by earlier results. `noise_of` takes the kind
with the smaller standard deviation: Laplace for a few evaluations, Gaussian for many.

`segment` bounds either beside other steps, as Gaussian mechanisms without sampling. For Laplace: a
1/s-DP mechanism's trade-off function lies above that of the Gaussian with
mu = 2 Phi^-1(e^(1/s) / (1 + e^(1/s))): both are convex, symmetric and 1 at 0, and they meet in the
kink of the former on the diagonal, up to which it is a straight line, a chord of the latter.

Noise is drawn in fp64, four draws a normal, and the result is rounded to a fixed public grid: see
`secure_noise` for what that resists and assumes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import expit, ndtri

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.secure_noise import DRAWS, add_draws, grid
from torchtitan_dp.privacy.segments import Mechanism, Segment

Kind = Literal["laplace", "gaussian"]

_TICKS = 2**30  # of a clipped loss: L is so many
_NORMALS = 4  # a draw of either kind takes at most so many


@dataclass(frozen=True)
class LossNoise:
    """The noise of each evaluation.

    Args:
        scale: b of Laplace noise, or the standard deviation of Gaussian noise, both over L / n.
    """

    kind: Kind
    scale: float

    def __post_init__(self) -> None:
        assert self.kind in ("laplace", "gaussian"), self.kind
        assert 0 < self.scale < math.inf, self.scale

    def standard_deviation(self, *, clip: float, units: int) -> float:
        """Return the noise's standard deviation in nats, for a mean over `units` units."""
        return (math.sqrt(2) if self.kind == "laplace" else 1) * self.scale * clip / units

    def segment(self, evaluations: int) -> Segment:
        """Return Gaussian mechanisms that dominate so many evaluations."""
        sigma = self.scale
        if self.kind == "laplace":
            sigma = -0.5 / float(ndtri(expit(-1 / self.scale))) * (1 - 1e-9)
        return Segment(Mechanism(sigma, 1.0), evaluations)

    def epsilon(self, evaluations: int, *, delta: float, before: Sequence[Segment] = ()) -> float:
        """Compute what so many evaluations spend, for one held-out unit; by PLD, which is exact for
        Gaussian mechanisms without sampling.

        Args:
            before: other steps on the same data.
        """
        steps = [*before, self.segment(evaluations)]
        together = accounting.compose(steps, delta=delta, accountant="pld")
        if self.kind == "gaussian":
            return together
        alone = accounting.compose(before, delta=delta, accountant="pld")
        return min(together, alone + evaluations / self.scale)

    def noised_mean(self, losses_N: np.ndarray, *, clip: float, key: bytes) -> float:
        """Return the mean of clipped losses with noise, in nats.

        Args:
            losses_N: fp64, of all held-out units that are evaluated; 0 for one without a target.
            key: 32 bytes, of this evaluation alone.
        """
        clipped_N = np.nan_to_num(losses_N, nan=clip, posinf=clip, neginf=0.0).clip(0.0, clip)
        ticks = int(np.floor(clipped_N / clip * _TICKS).astype(np.int64).sum())
        width = self.scale * _TICKS
        step = grid(width)
        noised = round((ticks + width * self._unit(key)) / step) * step
        return noised / _TICKS * clip / len(losses_N)

    def _unit(self, key: bytes) -> float:
        """Draw the noise over its scale."""
        normals = torch.zeros(_NORMALS, dtype=torch.float64)

        def add(part: torch.Tensor, sums: torch.Tensor) -> None:
            part.add_(sums / math.sqrt(DRAWS))

        add_draws(normals, add, key=key, name="heldout_loss", start=0)
        a, b, c, d = normals.tolist()
        if self.kind == "gaussian":
            return float(a)
        # Half the sum of two squares is exponential, and a difference of two of these is Laplace.
        return float((a * a + b * b) - (c * c + d * d)) / 2


def noise_of(*, target_epsilon: float, delta: float, evaluations: int) -> LossNoise:
    """Find the noise with which so many evaluations spend at most the target.

    >>> few = noise_of(target_epsilon=1.0, delta=1e-5, evaluations=1)
    >>> few.kind, round(few.standard_deviation(clip=4.0, units=500), 4)
    ('laplace', 0.0113)
    >>> noise_of(target_epsilon=1.0, delta=1e-5, evaluations=20).kind
    'gaussian'
    """
    laplace = LossNoise("laplace", evaluations / target_epsilon * (1 + 1e-12))
    try:
        sigma = accounting.noise_for(
            Mechanism(1.0, 1.0),
            evaluations,
            target_epsilon=target_epsilon,
            delta=delta,
            accountant="pld",
        )
    except ValueError:  # a target that hardly any Gaussian noise, or none, meets
        return laplace
    both = laplace, LossNoise("gaussian", sigma)
    return min(both, key=lambda noise: noise.standard_deviation(clip=1.0, units=1))
