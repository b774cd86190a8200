"""The held-out loss that a run publishes at its end: a mean of clipped losses, with Gaussian noise.

    f(x) = 1/n * sum over n held-out units of min(max(loss, 0), L)

Guarantee:
    - One unit's content moves f by at most L / n: n is public and no function of losses, each unit
      adds from 0 to L for any loss (NaN adds L, a unit without a target 0), and the sum is
      of whole numbers of L / 2^30, without rounding. So a release with noise of standard deviation
      s L / n is, for one held-out unit under `zero_out`, the Gaussian mechanism of noise
      multiplier s.
    - k releases are exactly one of s / sqrt(k), also where weights and later releases were chosen
      by earlier results (Dong, Roth & Su 2022, corollary 3.3).
    - Noise is secure (`noise`): fp64, four draws a normal, rounded to a fixed public grid.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.noise import DRAWS, add_draws, grid
from torchtitan_dp.privacy.segments import Mechanism, Segment

HIDES = 0.1
"""The noise, in nats, above which a published loss separates few recipes: a heuristic."""
_TICKS = 2**30  # of a clipped loss: L is so many


def releases(noise_multiplier: float, count: int) -> Segment:
    """Return so many published losses for an accountant."""
    return Segment(Mechanism(noise_multiplier, 1.0), count)


def epsilon(published: Segment, *, delta: float, before: Sequence[Segment] = ()) -> float:
    """Compute the epsilon of published losses for one held-out unit, with steps `before` on it."""
    return accounting.compose([*before, published], delta=delta, accountant="pld")


def noise_for(
    count: int = 1, *, target_epsilon: float, delta: float, before: Sequence[Segment] = ()
) -> float:
    """Find the noise multiplier with which so many published losses spend at most the target."""
    terms: dict[str, Any] = {"target_epsilon": target_epsilon, "delta": delta, "before": before}
    return accounting.noise_for(Mechanism(1.0, 1.0), count, accountant="pld", **terms)


def noised_mean(losses_N: np.ndarray, *, noise_multiplier: float, clip: float, key: bytes) -> float:
    """Return the mean of clipped losses with noise, in nats.

    Args:
        losses_N: fp64, of all held-out units that are evaluated; 0 for one without a target.
        noise_multiplier: the noise's standard deviation over `clip` / number of units.
        key: 32 bytes, of this release alone.
    """
    clipped_N = np.nan_to_num(losses_N, nan=clip, posinf=clip, neginf=0.0).clip(0.0, clip)
    ticks = int(np.floor(clipped_N / clip * _TICKS).astype(np.int64).sum())
    width = noise_multiplier * _TICKS
    normal = torch.zeros(1, dtype=torch.float64)

    def add(part: Tensor, sums: Tensor) -> None:
        part.add_(sums / math.sqrt(DRAWS))

    add_draws(normal, add, key=key, name="heldout_loss", start=0)
    step = grid(width)
    return round((ticks + width * normal.item()) / step) * step / _TICKS * clip / len(losses_N)
