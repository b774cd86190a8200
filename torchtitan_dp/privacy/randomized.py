"""Gradients clipped by estimates of their norms: the distribution of the estimates' worst errors.

DP-SGD-RC ("Efficient DP-SGD for LLMs with Randomized Clipping", 2026, arXiv 2605.24879) clips by an
estimate: what a unit adds has a norm of at most C Z, where Z, its gradient's true norm over the
estimate, is random. `gradients.randomized_norm` estimates squared norms by k random projections.

Guarantee (proofs: docs/proofs.md, "Estimated norms"):
    - `ratios` stochastically dominates Z for every gradient, and every share of it whose norm is
      exact, if no more than `largest_ratio` times the estimate is added.
    - A step is dominated, in both directions, by a Gaussian against the mixture of Gaussians with
      means Z (`losses`), if the projections behind each unit's estimate are drawn afresh at each
      step, independent of those of other units, of draws and of noise, and never shown.
"""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import chdtr, chdtri

from torchtitan_dp.privacy.settings import FEWEST, MOST

if TYPE_CHECKING:  # imported when it is used: it takes a second
    pass


_POINTS = 256  # the values that Z is rounded up to
_BEYOND = 1e-6  # P[X_1 <= x] at the largest ratio
_ROWS = 2**12  # outputs times values of Z that exist at once


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
        """The largest value."""
        return float(self.values[-1])


def refuse_projections(projections: int) -> None:
    """Raise ValueError unless norms can be estimated from this number of random projections."""
    if not FEWEST <= projections <= MOST:
        raise ValueError(
            f"privacy.projections = {projections}: choose {FEWEST} to {MOST}; 32 is usual"
        )


def largest_ratio(projections: int) -> float:
    """Return how many times its estimated norm a gradient may count for at most.

    A larger one is scaled down to that, which happens to one estimate in a million at most.

    >>> round(largest_ratio(32), 3), round(largest_ratio(256), 3)
    (2.131, 1.255)
    """
    assert FEWEST <= projections <= MOST, projections
    return math.sqrt(projections / chdtri(projections, 1 - _BEYOND))


@functools.cache  # one object for each k: they are compared by identity
def ratios(projections: int) -> Ratios:
    """Return the envelope, rounded up to values that lie closest where the most of it is.

    >>> of_32 = ratios(32)
    >>> round(float(of_32.values @ of_32.probabilities), 3)
    1.065
    """
    largest = largest_ratio(projections)
    fine = np.geomspace(1.0, largest, 20_001)
    mass = -np.diff(chdtr(projections, projections / fine**2))
    # Rounding up costs sum of mass times width, least where widths go as 1 / sqrt(density); but
    # the tail, which has next to no mass, decides at a small delta: half the values are for it.
    weight = np.cumsum(np.sqrt(mass * np.diff(fine)))
    half = _POINTS // 2
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
