"""The privacy loss of one step as a distribution on a grid that dominates it, in both directions.

For a rotation that depends on earlier outputs alone, one output x of a step is distributed as

    Q = N(0, sigma^2) without the unit,  P = (1 - q) Q + q sum_i w_i N(z_i, sigma^2) with it,

where z_i >= 1 is the share of C that a drawn unit adds (1 for exact norms). The loss is ln dP / dQ.

Guarantee (proof: docs/proofs.md, "One step, on a grid"):
    - `gaussian_losses` dominates "remove" (P against Q) and "add" (Q against P), by "connect the
      dots" (Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022).
    - Each mass is as exact, relatively, at e^-600 as at 1, as tilted transforms need. A tail of
      less than exp(`log_tail`) counts as an infinite loss, or as the smallest finite one.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from torchtitan_dp.privacy.randomized import Ratios

UNIT = 2.0**-53  # of rounding in float64
_TAIL_ROUNDING = 8 * UNIT  # of a Gaussian tail, relative, over 1 + t^2
_SUBNORMAL = 1e-300  # below it tails have an absolute rounding
_FARTHEST = 1e4  # deviations, beyond which float64 has no mass
_TABLE = 2**14  # outputs, from which Newton's method starts
_NEWTON_STEPS = 2
_ROWS = 2**12  # outputs times shares that exist at once


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
