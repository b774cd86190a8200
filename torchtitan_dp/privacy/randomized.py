"""Gradients clipped by estimates of their norms: the worst errors, and the privacy loss of a step.

DP-SGD-RC ("Efficient DP-SGD for LLMs with Randomized Clipping", 2026, arXiv 2605.24879) clips by an
estimate: what a unit adds has a norm of at most C Z, where Z, its gradient's true norm over the
estimate, is random.

`gradients.randomized_norm` estimates squared norms by k random projections. Let w be the
eigenvalues of the gradients' G G^T, of all layers together, over their sum: the estimate, over the
true square, is distributed as

    Q = sum_i w_i X_i,   w >= 0, sum_i w_i = 1,   X_i independent, each chi-square(k) / k,

for Hutchinson's estimator. An exact norm adds its share as a constant, and so does the head of
Hutch++ for anyone who knows it. w is the record's, and unknown.

Guarantee of the envelope
-------------------------
Z = 1 / sqrt(Q), the true norm over its estimate, is stochastically dominated by `ratios` for every
w and every share that is exact, if no more than `largest_ratio` times the estimate is added. For
z <= 1 the envelope says P[Z >= z] <= 1, and for z > 1, with x = 1 / z^2 < 1,

    P[Z >= z] = P[Q <= x] <= P[X_1 <= x].

Proof. Let f be the density of Q with E independent of it and exponential: S = Q + (2 / k) (w_1 E_1
+ w_2 E_2), where w_1 is the largest weight and w_2 another. By Laplace transforms, weight that
moves from w_2 to w_1 changes P[Q <= x] at the rate (w_1 - w_2) (2 / k) f'(x), as in Szekely &
Bakirov 2003, "Extremal probabilities for Gaussian quadratic forms". S is a sum of gammas
theta_i Gamma(alpha_i), so it has one mode m (Yamazato 1978), f'(m) = 0. For such sums
s f(s) = sum_i alpha_i theta_i h_i(s), where h_i is the density of S + theta_i E and
h_i' = (f - h_i) / theta_i. At m that gives E[S] - m = sum_i theta_i p_i with p_i =
alpha_i (1 - h_i(m) / f(m)), which are not negative, since h_i averages f, and add up to 1. So
m >= E[S] - max theta = 1 + (2 / k) (w_1 + w_2) - (2 / k) w_1 >= 1, and f' >= 0 below: moving all
weight to one X_i only raises P[Q <= x], for x <= 1. A constant is the limit of many small weights.

Each part is attained, the first by an exact norm, the second by a gradient of rank one, but no
gradient attains both, so the envelope is loose by at most the difference between the two.

The values are `_POINTS` discrete ones, each rounded up to the next.

Guarantee of the distribution
-----------------------------
`mixture_distribution` dominates one step, in both directions, for neighbours as in `accounting`, if
the projections behind each unit's estimate are drawn afresh at each step, independent of those of
all other units, of the draws and of the noise, and are never shown. For take one unit, and hold
fixed the results before this step and the draws, projections and contributions of all others:
their sum is v, a constant. The step then puts out v + N(0, (sigma C)^2) without the unit, and with
it the same with probability 1 - q, and else v + c + N(0, (sigma C)^2), where c is random: its norm
is at most C Z, and C times `largest_ratio`, and it is independent of all that is held fixed. Nobody
sees Z: it is in the output as a part of the mixture alone. So

- by shift, the pair is a Gaussian against a mixture of Gaussians with means of 0 and c / C, in both
  orders, which is dominated by the pair in one dimension whose means are the norms |c| / C
  (Choquette-Choo, Ganesh, Steinke & Thakurta 2024, "Privacy Amplification for Matrix Mechanisms",
  corollary 4.7: directions may be random, too, as they are where a layer is scaled down alone);
- stochastically larger norms give a pair that dominates this one (there as well), so the envelope
  of Z may stand for |c| / C;
- what was held fixed is the same with the unit and without it, since the others' projections are
  numbered by their own places in the records: the pair also dominates the average over it (joint
  convexity of the hockey-stick divergence). Where a unit that leaves moves the places of those
  after it (`add_remove`), let it be the last: draws and projections do not depend on the order;
- the next step's randomness is fresh, so steps compose, also adaptively.

That c is independent of the others needs projections of each unit's own; if units shared them, Z
would have to be accounted for as shown, as in the paper, which costs more. For exact norms Z = 1.

`losses` has the mixture's losses.
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
