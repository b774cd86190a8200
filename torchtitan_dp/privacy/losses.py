"""The privacy loss of one step, or of one round of random allocation, on a grid that dominates it.

For a rotation that depends on earlier outputs alone, one output x of a step is distributed as

    Q = N(0, sigma^2) without the unit,  P = (1 - q) Q + q sum_i w_i N(z_i, sigma^2) with it,

where z_i >= 1 is the share of C that a drawn unit adds. The loss is ln dP / dQ. The share is 1 for
exact norms. DP-SGD-RC ("Efficient DP-SGD for LLMs with Randomized Clipping", 2026, arXiv
2605.24879) clips by an estimate of the norm: there it is Z, the true norm over the estimate, which
is random (`gradients.norms`).

With random allocation each unit takes part in one step of each round of t steps, uniform among
them and independent of other units' and of other rounds' (`sampling.allocate`): Chua et al. 2024
("balls-and-bins"); Feldman & Shenfeld 2025, and 2026, whose package PLD_accounting is asked here.

Guarantee (proofs: docs/proofs.md, "One step, on a grid", "Estimated norms", "Random allocation"):
    - `gaussian_losses` dominates "remove" (P against Q) and "add" (Q against P), by "connect the
      dots" (Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022). Each mass is as exact, relatively,
      at e^-600 as at 1, as tilted transforms need. A tail of less than exp(`log_tail`) counts as an
      infinite loss, or as the smallest finite one.
    - `ratios` stochastically dominates Z for every gradient, and every share of it whose norm is
      exact, if no more than `largest_ratio` times the estimate is added, and if the projections
      behind each unit's estimate are drawn afresh at each step, independent of those of other
      units, of draws and of noise, and never shown.
    - `round_losses` bounds the loss of one round, whole or cut short, of adaptive steps with
      contributions of norm at most C and noise sigma C, in both directions. Without amplification a
      round is one Gaussian mechanism of noise multiplier sigma: that is what `rdp` counts. It is
      within 0.1% of epsilon for one round; losses of each round are rounded by about 1% of
      1 / sigma, so that of dozens of rounds it is loose.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import chdtr, chdtri, ndtr

from torchtitan_dp.privacy.settings import FEWEST, MOST

UNIT = 2.0**-53  # of rounding in float64
_TAIL_ROUNDING = 8 * UNIT  # of a Gaussian tail, relative, over 1 + t^2
_SUBNORMAL = 1e-300  # below it tails have an absolute rounding
_FARTHEST = 1e4  # deviations, beyond which float64 has no mass
_TABLE = 2**14  # outputs, from which Newton's method starts
_NEWTON_STEPS = 2
_ROWS = 2**12  # outputs times shares that exist at once
_RATIOS = 256  # the values that Z is rounded up to
_BEYOND = 1e-6  # P[X_1 <= x] at the largest ratio
_POINTS = {False: 2_000, True: 2_500}  # of a step's losses in a round: time grows with their square
_DEVIATIONS = 16  # of one step's loss, about the width of its grid


@dataclass(frozen=True, eq=False)
class Losses:
    """Masses of losses that are multiples of an interval, and of an infinite loss.

    Args:
        first: the multiple that the first mass belongs to.
        masses: (multiples,) float64, none negative.
        infinite: the mass of an infinite loss.
        drift: to be added to each finite loss.
    """

    first: int
    masses: np.ndarray
    infinite: float
    drift: float = 0.0


@dataclass(frozen=True, eq=False)
class Ratios:
    """A discrete distribution of true norm over estimate.

    Args:
        values: (n,) float64, rising, from 1 to the largest.
        probabilities: (n,) float64, above 0, adding up to 1.
    """

    values: np.ndarray
    probabilities: np.ndarray

    @property
    def largest(self) -> float:
        return float(self.values[-1])


def largest_ratio(projections: int) -> float:
    """Return how many times its estimated norm a gradient may count for at most. A larger one is
    scaled down to that, which happens to one estimate in a million at most."""
    assert FEWEST <= projections <= MOST, projections
    return math.sqrt(projections / chdtri(projections, 1 - _BEYOND))


@functools.cache  # one object for each k: they are compared by identity
def ratios(projections: int) -> Ratios:
    """Return the envelope, rounded up to values that lie closest where the most of it is."""
    largest = largest_ratio(projections)
    fine = np.geomspace(1.0, largest, 20_001)
    mass = -np.diff(chdtr(projections, projections / fine**2))
    # Rounding up costs sum of mass times width, least where widths go as 1 / sqrt(density); but
    # the tail, which has next to no mass, decides at a small delta: half the values are for it.
    weight = np.cumsum(np.sqrt(mass * np.diff(fine)))
    half = _RATIOS // 2
    places = np.searchsorted(weight, weight[-1] * np.arange(1, half) / half)
    values = np.unique([*np.geomspace(1.0, largest, half + 1), *fine[places + 1], 1.0, largest])
    above = chdtr(projections, projections / values**2)  # P[Z >= z], of the single X_1
    above[-1] = 0.0  # nothing is above the largest, which has all that would be
    probabilities = np.concatenate([[1 - above[0]], above[:-1] - above[1:]])
    kept = probabilities > 0
    found = Ratios(values[kept], probabilities[kept])
    found.values.setflags(write=False)
    found.probabilities.setflags(write=False)
    return found


@functools.lru_cache(maxsize=16)
def gaussian_losses(
    sigma: float, q: float, ratios: Ratios | None, *, interval: float, log_tail: float
) -> tuple[Losses, Losses]:
    """Compute a step's losses for "remove" and for "add".

    Args:
        sigma, q: above 0; q at most 1.
        ratios: the distribution of what a drawn unit adds, over C; None: exactly 1.
        log_tail: ln of the mass that each tail may lose.
    """
    shares_N = np.ones(1) if ratios is None else ratios.values
    weights_N = q * (np.ones(1) if ratios is None else ratios.probabilities)

    def loss(x_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss of each output, and its derivative."""
        found = [_loss(x_X[i : i + _ROWS]) for i in range(0, len(x_X), _ROWS)]
        return np.concatenate([f for f, _ in found]), np.concatenate([s for _, s in found])

    slopes_N = shares_N / sigma**2
    offsets_N = np.log(weights_N) - shares_N**2 / (2 * sigma**2)

    def _loss(x_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exponents_XN = np.multiply.outer(x_X, slopes_N) + offsets_N
        top_X = np.maximum(exponents_XN.max(axis=1), 0.0)
        terms_XN = np.exp(exponents_XN - top_X[:, None])
        total_X = terms_XN.sum(axis=1) + (1 - q) * np.exp(-top_X)
        return top_X + np.log(total_X), terms_XN @ slopes_N / total_X

    low, high = -sigma * math.sqrt(-2 * log_tail), shares_N[-1] + sigma * math.sqrt(-2 * log_tail)
    outer = loss(np.array([low, high]))[0] / interval
    ends = np.arange(math.floor(outer[0]), math.ceil(outer[1]) + 1) * interval
    reached = ends > (math.log1p(-q) if q < 1 else -math.inf)  # no output's loss is below
    sought = ends[reached]
    while loss(np.array([low]))[0][0] > sought[0] and low > -_FARTHEST * sigma:
        low *= 1.5
    while loss(np.array([high]))[0][0] < sought[-1]:
        high *= 1.5
    table = np.linspace(low, high, _TABLE)
    x = np.interp(sought, loss(table)[0], table)
    for _ in range(_NEWTON_STEPS):
        now, slope = loss(x)
        step = (sought - now) / np.maximum(slope, 1e-300)
        x = np.clip(x + np.clip(step, table[0] - table[1], table[1] - table[0]), low, high)
    x_E = np.full(len(ends), -_FARTHEST * sigma)
    x_E[reached] = x = np.maximum.accumulate(x)
    exponents = (np.abs(x).max() + shares_N[-1]) * slopes_N[-1]
    drift = np.abs(loss(x)[0] - sought).max() + 32 * UNIT * (1 + exponents)

    absent = _cells(x_E / sigma, 1.0)
    present = _cells(x_E / sigma, 1 - q)
    for share, weight in zip(shares_N, weights_N, strict=True):
        present += _cells((x_E - share) / sigma, weight)
    rounding = 4 * UNIT * (len(shares_N) + 2)
    present[1] += rounding * present[0]
    absent[1] += rounding * absent[0]
    remove = _on_grid(present, absent, ends, float(drift))
    return remove, _on_grid(absent[:, ::-1], present[:, ::-1], -ends[::-1], float(drift))


def _cells(t_E: np.ndarray, weight: float) -> np.ndarray:
    """Return the normal distribution's mass below, between and above these rising points, times a
    weight, and a bound on the rounding of each: (2, points + 1)."""
    tail = ndtr(-np.abs(t_E))
    rounding = np.pad(_TAIL_ROUNDING * (1 + t_E**2) * (tail + _SUBNORMAL), 1)
    right, tail = np.pad(t_E > 0, 1, constant_values=(False, True)), np.pad(tail, 1)
    straddles = right[1:] != right[:-1]
    masses = np.where(straddles, 1 - tail[1:] - tail[:-1], np.abs(np.diff(tail)))
    return weight * np.stack([masses, rounding[1:] + rounding[:-1]])


def _on_grid(own: np.ndarray, other: np.ndarray, ends: np.ndarray, drift: float) -> Losses:
    """Move each cell's mass to its ends: losses of `own`, masses as `_cells` returns them."""
    interval = float(ends[1] - ends[0])
    mass = own[0] + own[1]
    least = np.maximum(other[0] - other[1], 0.0) * (1 - drift)
    inside = mass[1:-1]
    upper = (inside - np.exp(ends[:-1]) * least[1:-1]) / -math.expm1(-interval)
    upper = np.clip(upper, 0.0, inside)
    masses = np.append(inside - upper, 0.0)
    masses[1:] += upper
    masses[0] += mass[0]
    return Losses(round(float(ends[0]) / interval), masses, float(mass[-1]), drift)


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
        for dist in _allocated(sigma, steps, has_several, log_tail)
    ]
    remove, add = (Losses(d.grid.index_0, d.prob_arr, d.p_max, 0.0) for d in found)
    return remove, add


@functools.lru_cache(maxsize=16)
def _allocated(sigma: float, steps: int, has_several: bool, log_tail: float) -> tuple[Any, Any]:
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
