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

Float64: losses are inverted to about 1e-12, which moves delta by its square; what lies beyond
`log_tail` counts as infinite loss.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import chdtr, chdtri, ndtr

from torchtitan_dp.privacy.settings import FEWEST, MOST

if TYPE_CHECKING:  # imported when it is used: it takes a second
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


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


def mixture_distribution(
    sigma: float, q: float, ratios: Ratios, *, interval: float, log_tail: float
) -> "PrivacyLossDistribution":
    """Compute the privacy loss distribution of one step, pessimistically, by connecting the dots.

    Args:
        ratios: of what a drawn unit adds, over C.
        interval: of the grid of losses.
        log_tail: ln of the mass that may count as infinite loss.
    """
    from dp_accounting.pld import privacy_loss_distribution

    mixture = Mixture(sigma, q, ratios.values, ratios.probabilities)
    reach = sigma * math.sqrt(-2 * log_tail)
    present = _distribution(
        mixture.delta_present, mixture.loss(-reach), mixture.loss(mixture.largest + reach), interval
    )
    absent = _distribution(
        mixture.delta_absent, -mixture.loss(reach), -mixture.loss(-reach), interval
    )
    return privacy_loss_distribution.PrivacyLossDistribution(present, absent)


class Mixture:
    """A unit's step in one dimension: absent, N(0, sigma^2); present, a mixture of Gaussians.

    >>> exact = Mixture(1.0, 1.0, np.array([1.0]), np.array([1.0]))
    >>> round(float(exact.delta_present(np.array([1.0]))[0]), 4)
    0.1269
    """

    def __init__(
        self, sigma: float, q: float, values: np.ndarray, probabilities: np.ndarray
    ) -> None:
        """
        Args:
            values, probabilities: (n,) float64, of how much a present unit adds.
        """
        self._sigma, self._q = sigma, q
        self._values_N, self._probabilities_N = values, probabilities
        self.largest = float(values[-1])
        # At output x the ratio of densities is (1 - q) + sum of exp(slope x + offset).
        self._slope_N = values / sigma**2
        self._offset_N = np.log(q * probabilities) - values**2 / (2 * sigma**2)

    def loss(self, output: float) -> float:
        """Return ln of the density with the unit over that without, which rises with the output."""
        return float(self._loss_and_slope(np.array([output]))[0][0])

    def delta_present(self, epsilons: np.ndarray) -> np.ndarray:
        """Compute sup over events of P[event | present] - e^epsilon P[event | absent].

        Args:
            epsilons: rising float64, of any sign.
        """
        found = -np.expm1(epsilons)  # where every output has a larger loss
        inside = epsilons > self._least
        outputs = self._outputs(epsilons[inside])
        above = self._mixed(-outputs, -self._values_N)  # the probability of a larger output
        found[inside] = above - np.exp(epsilons[inside]) * ndtr(-outputs / self._sigma)
        return _falling(found)

    def delta_absent(self, epsilons: np.ndarray) -> np.ndarray:
        """Compute sup over events of P[event | absent] - e^epsilon P[event | present]."""
        found = np.zeros_like(epsilons)  # where every output has a smaller loss
        inside = -epsilons > self._least
        outputs = self._outputs(-epsilons[inside][::-1])[::-1]
        below = self._mixed(outputs, self._values_N)
        found[inside] = ndtr(outputs / self._sigma) - np.exp(epsilons[inside]) * below
        return _falling(found)

    @property
    def _least(self) -> float:
        """The value that every loss exceeds."""
        return math.log1p(-self._q) if self._q < 1 else -math.inf

    def _outputs(self, losses: np.ndarray) -> np.ndarray:
        """Return the outputs of these losses, which rise, by Newton's method from a table."""
        if len(losses) == 0:
            return np.zeros(0)
        low, high = -self._sigma, self._sigma
        while self.loss(low) > losses[0] and low > -1e6 * self._sigma:
            low *= 2
        while self.loss(high) < losses[-1]:
            high *= 2
        table = np.linspace(low, high, 4097)
        known, _ = self._loss_and_slope(table)
        outputs = np.interp(losses, known, table)
        width = table[1] - table[0]
        for _ in range(4):
            now, slope = self._loss_and_slope(outputs)
            step = (losses - now) / np.maximum(slope, 1e-300)
            outputs = np.clip(outputs + np.clip(step, -width, width), low, high)
        return outputs

    def _loss_and_slope(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss at each output, and its derivative."""
        loss, slope = np.empty_like(outputs), np.empty_like(outputs)
        for rows in _blocks(len(outputs)):
            exponent_XN = np.multiply.outer(outputs[rows], self._slope_N) + self._offset_N
            top_X = np.maximum(exponent_XN.max(axis=1), 0.0)
            weight_XN = np.exp(exponent_XN - top_X[:, None])
            total_X = weight_XN.sum(axis=1) + (1 - self._q) * np.exp(-top_X)
            loss[rows] = top_X + np.log(total_X)
            slope[rows] = weight_XN @ self._slope_N / total_X
        return loss, slope

    def _mixed(self, outputs: np.ndarray, means_N: np.ndarray) -> np.ndarray:
        """Return the probability of a smaller output in a mixture with these means."""
        found = np.empty_like(outputs)
        for rows in _blocks(len(outputs)):
            each_XN = ndtr(np.subtract.outer(outputs[rows], means_N) / self._sigma)
            found[rows] = each_XN @ self._probabilities_N
        return self._q * found + (1 - self._q) * ndtr(outputs / self._sigma)


def _distribution(
    deltas: Callable[[np.ndarray], np.ndarray], low: float, high: float, interval: float
) -> "PLDPmf":
    """Connect the dots between these losses; any range gives a bound, the wider the tighter."""
    from dp_accounting.pld import pld_pmf

    first, last = math.floor(low / interval), math.ceil(high / interval)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, first, last, deltas(np.arange(first, last + 1) * interval)
    )


def _falling(deltas: np.ndarray) -> np.ndarray:
    """Undo rounding, upwards: delta is a probability that falls with epsilon."""
    return np.maximum.accumulate(np.clip(deltas, 0.0, 1.0)[::-1])[::-1]


def _blocks(length: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, length, _ROWS)]
