"""Random allocation: each unit takes part in exactly one step of each round of t steps.

A unit's step is uniform among the t, independent of other units' and of other rounds'
(`sampling.allocate`). Chua et al. 2024 call it "balls-and-bins" sampling; Feldman & Shenfeld 2025
"random allocation", and 2026 account for it, by the package PLD_accounting that this file asks.

Guarantee (proof: docs/proofs.md, "Random allocation"):
    - `round_losses` bounds from above the privacy loss of one round, whole or cut short, of
      adaptive steps with contributions of norm at most C and noise sigma C, in both directions.
    - Rounds compose as any mechanisms do, also with Poisson-subsampled ones. Without amplification
      a round is one Gaussian mechanism of noise multiplier sigma: that is what `rdp` counts.
    - It is within 0.1% of epsilon for one round. Losses of each round are rounded by about 1% of
      1 / sigma, so that of dozens of rounds it is loose.
"""

import functools
import math
from typing import Any

from torchtitan_dp.privacy.losses import Losses

_POINTS = {False: 2_000, True: 2_500}  # of one step's losses: time grows with their square
_DEVIATIONS = 16  # of one step's loss, about the width of its grid


@functools.lru_cache(maxsize=16)
def round_losses(
    sigma: float, steps: int, has_several: bool, *, interval: float, log_tail: float
) -> tuple[Losses, Losses]:
    """Bound the privacy loss of one round, for "remove" and for "add".

    Args:
        steps: t, at least 2.
        has_several: whether several rounds, whose roundings add up, are to be composed.
        interval: of the grid of losses.
        log_tail: ln of the mass that its tails may lose.
    """
    from PLD_accounting import BoundType, rediscretize_dist_by_bound

    found = [
        rediscretize_dist_by_bound(
            dist=dist,
            tail_truncation=math.exp(log_tail) / 2,
            loss_discretization=interval,
            bound_type=BoundType.DOMINATES,
        )
        for dist in _both_directions(sigma, steps, has_several, log_tail)
    ]
    remove, add = (Losses(d.grid.index_0, d.prob_arr, d.p_max, 0.0) for d in found)
    return remove, add


@functools.lru_cache(maxsize=16)
def _both_directions(
    sigma: float, steps: int, has_several: bool, log_tail: float
) -> tuple[Any, Any]:
    """Bound the losses of "remove" and of "add", on the package's own grid."""
    from PLD_accounting import (
        AllocationSchemeConfig,
        Direction,
        PrivacyParams,
        gaussian_allocation_directional_pld,
    )

    roundings = 2 + 1.5 * math.log2(steps)  # about: the package divides its interval among them
    config = AllocationSchemeConfig(
        loss_discretization=roundings * _DEVIATIONS / (sigma * _POINTS[has_several]),
        tail_truncation=math.exp(log_tail) / 2,
    )
    params = PrivacyParams(sigma=sigma, num_steps=steps)
    remove, add = (
        gaussian_allocation_directional_pld(params=params, config=config, direction=direction)
        for direction in (Direction.REMOVE, Direction.ADD)
    )
    return remove, add
