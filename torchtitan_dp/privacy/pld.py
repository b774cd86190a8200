"""Numerical accounting: privacy loss distributions (PLD), by Google's dp-accounting.

Guarantee
---------
`pld_epsilon` is an upper bound on epsilon for neighbours in both directions, by construction and
not by an error bar: each step's distribution is replaced by one on a grid that dominates it
(connect the dots: Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022), what the tails of steps and
of their composition lose counts as infinite loss, and delta is lowered by what Fourier transforms
in float64 may add to it. Add-or-remove and zero-out neighbours have the same distributions, of
which both directions are composed and the worse one is returned. A round of random allocation
counts as one step, whose distribution is the upper bound of `allocation`. Where these numbers
cannot be had, the answer is infinity. `gaussian_epsilon` is exact but for float64's rounding,
allowed for.

The grid is fine enough for a bound within about 0.1% of the true epsilon, and coarser only where
it would exceed `_MAX_POINTS`. `pld_profile` is the same bound at every epsilon at once.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import log_ndtr, ndtr

from torchtitan_dp.privacy.allocation import round_distribution
from torchtitan_dp.privacy.randomized import mixture_distribution
from torchtitan_dp.privacy.rdp import loss_bound, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps, fft_noise

if TYPE_CHECKING:  # imported when it is used: it takes a second
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

logger = logging.getLogger(__name__)

_COARSEST, _FINEST = 2.0**-6, 2.0**-40  # intervals of the grid of privacy losses
_MAX_POINTS = 2**18  # of one step's distribution
_MAX_COMPOSED_POINTS = 2**20
_MAX_LOSS = 690.0  # of one step: its exp() must stay finite
_TAIL = 1e-5  # share of delta that truncated tails may take, once for steps, once for sums


@dataclass(frozen=True)
class _Grid:
    """A grid of privacy losses, `interval` apart; `log_tail` is ln of the mass that a step's tails
    may lose."""

    interval: float
    log_tail: float


@functools.lru_cache(maxsize=1024)
def pld_epsilon(segments: tuple[GaussianSteps, ...], delta: float) -> float:
    """Compute PLD's upper bound; it is inf, with a log line, where its numbers cannot be had.

    Args:
        segments: merged: at least one, noise and sample rate above 0.
    """
    exact = is_one_gaussian(segments)
    if exact or fft_noise(segments) <= delta / 2:
        try:
            with np.errstate(all="ignore"):  # log(0) and the like at the ends of the grid
                if exact:
                    bound = gaussian_epsilon(1 / segments[0].noise_multiplier, delta)
                else:
                    bound = min(bound for bound, _ in _attempts(segments, delta))
        except (ArithmeticError, IndexError, ValueError) as why:
            logger.info("PLD accounting failed: %s", why)
        else:
            if bound >= 0:  # not NaN
                return bound
    logger.info("PLD is out of its depth at %s: RDP", segments)
    return math.inf


def is_one_gaussian(segments: tuple[GaussianSteps, ...]) -> bool:
    """Return whether merged segments are one Gaussian mechanism, with a closed-form profile."""
    return [(s.sample_rate, s.ratios) for s in segments] == [(1.0, None)]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute epsilon of the Gaussian mechanism with sensitivity / noise = mu (Balle & Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    from scipy.optimize import brentq  # half a second to import

    if mu in (0, math.inf):
        return mu

    def excess(epsilon: float) -> float:
        value, rounding = gaussian_delta(mu, np.asarray(epsilon))
        return float(value + rounding)

    if excess(0.0) <= delta:
        return 0.0
    # Of the tail alone, P[loss > epsilon] <= delta is enough.
    ceiling = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    root, precision = float(brentq(lambda e: excess(e) - delta, 0.0, ceiling)), 1e-10
    return root * (1 + precision) + precision


def gaussian_delta(mu: float, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute delta at each epsilon >= 0 of the Gaussian mechanism with sensitivity / noise = mu
    (Balle & Wang 2018), and what float64 may have added to it or taken: float64, of one shape.
    """
    outside = ndtr(mu / 2 - epsilons / mu)
    value = outside - np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return value, 1e-14 * (1 + epsilons) * outside


@dataclass(frozen=True, eq=False)
class Profile:
    """An upper bound on delta at every epsilon >= 0, in the worse of both directions.

    Args:
        interval: between the epsilons at which `deltas` holds; the first of them is 0.
        deltas: (points,) float64, falling; the last also bounds delta at every larger epsilon.
    """

    interval: float
    deltas: np.ndarray

    def at(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the bound at each epsilon >= 0: float64, same shape.

        Between points it is linear in e^epsilon: delta is convex in that, as the largest
        P[S] - e^epsilon Q[S] over events S, so a chord lies above it.
        """
        position = epsilons / self.interval
        left = np.minimum(np.floor(position), len(self.deltas) - 1).astype(int)
        right = np.minimum(left + 1, len(self.deltas) - 1)
        share = np.expm1(np.minimum(epsilons - left * self.interval, self.interval))
        share = share / math.expm1(self.interval)
        return self.deltas[left] + share * (self.deltas[right] - self.deltas[left])


@functools.lru_cache(maxsize=16)
def pld_profile(segments: tuple[GaussianSteps, ...], delta: float) -> Profile | None:
    """Compute PLD's upper bound on delta(epsilon) for all epsilons; None where it cannot be had.

    Args:
        segments: merged: at least one, noise above 0.
        delta: about which the bound is to be tight: its grid and its tails are `pld_epsilon`'s.
    """
    noise = fft_noise(segments)
    aim = max(delta, 2 * noise)
    try:
        with np.errstate(all="ignore"):  # as in pld_epsilon
            *_, (_, total) = _attempts(segments, aim)
            worse = np.maximum.reduce(_aligned(total._pmf_remove, total._pmf_add))
    except (ArithmeticError, IndexError, ValueError) as why:
        logger.info("PLD accounting failed: %s", why)
        return None
    # Sums of up to 2^20 positive terms round by less than 2^-30 of themselves.
    worse = np.minimum(worse * (1 + 2.0**-30) + noise, 1.0)
    if np.isnan(worse).any():
        logger.info("PLD is out of its depth at %s", segments)
        return None
    worse = np.minimum.accumulate(worse)  # delta falls with epsilon
    worse.setflags(write=False)  # it is shared by the cache
    return Profile(total._pmf_remove._discretization, worse)


def _aligned(*pmfs: "PLDPmf") -> tuple[np.ndarray, ...]:
    """Return each one's delta at the same multiples 0, 1, 2, … of the grid's interval."""
    profiles = [_profile(pmf) for pmf in pmfs]
    points = max(len(deltas) for deltas in profiles)
    return tuple(np.pad(deltas, (0, points - len(deltas)), "edge") for deltas in profiles)


def _profile(pmf: "PLDPmf") -> np.ndarray:
    """Compute delta = E[(1 - e^(epsilon - loss))+] at each multiple of the interval d up to the
    last loss.

    By sums of positive terms, since a difference of two would lose digits where losses are small:
    with W(k) = sum of p(l) e^(-(l - k) d) over l > k, and infinite loss beyond,
    delta(k) - delta(k + 1) = (e^d - 1) W(k), and W(k) = e^-d (p(k + 1) + W(k + 1)).
    """
    from scipy.signal import lfilter  # a second to import

    dense = pmf.to_dense_pmf()
    first, d = dense._lower_loss, dense._discretization
    positive = dense._probs[max(0, 1 - first) :]  # of losses d, 2 d, …
    if first > 1:
        positive = np.concatenate([np.zeros(first - 1), positive])
    decay = math.exp(-d)
    weighted = lfilter([decay], [1.0, -decay], positive[::-1])
    rises = np.concatenate([[dense._infinity_mass], math.expm1(d) * weighted])
    return np.cumsum(rises)[::-1]


def _attempts(
    segments: tuple[GaussianSteps, ...], delta: float
) -> "Iterator[tuple[float, PrivacyLossDistribution]]":
    """Yield epsilon at `delta` and the distribution behind it, on finer and finer grids."""
    rough, least = rdp_epsilon(segments, delta), math.inf
    grid = _grid(segments, delta, rough)
    for _ in range(3):  # `rough` may overestimate, and then the first grid is too coarse
        total = _compose_on(grid, segments, delta)
        bound = float(total.get_epsilon_for_delta(delta - fft_noise(segments)))
        yield bound, total
        least = min(least, bound)
        finer = _grid(segments, delta, least)
        if finer.interval > grid.interval / 4:
            break
        grid = finer


def _compose_on(
    grid: _Grid, segments: tuple[GaussianSteps, ...], delta: float
) -> "PrivacyLossDistribution":
    total = None
    for s in segments:
        part = _steps(s, grid, _TAIL * delta)
        total = part if total is None else total.compose(part, _TAIL * delta)
    assert total is not None, "no segment, no distribution"
    return total


def _grid(segments: tuple[GaussianSteps, ...], delta: float, rough: float) -> _Grid:
    """Choose the grid for an epsilon of about `rough`.

    An interval d adds at most d^2 / 4 to the variance of one step's loss. Over all steps that may
    be 4 / 10,000 of the variance of the Gaussian mechanism that spends as much. Powers of two, so
    that neighbouring questions share a grid, and their answers are monotone.

    Raises:
        ArithmeticError: the privacy loss is too large for float64.
    """
    steps, log_delta = sum(segment.steps for segment in segments), math.log(delta)
    deviation = math.sqrt(2 * rough - 2 * log_delta) - math.sqrt(-2 * log_delta)
    wanted = min(0.04 * deviation / math.sqrt(steps), _COARSEST)
    log_tail = 10.0 * math.floor((log_delta + math.log(_TAIL / steps)) / 10)
    widest = max(_one_step_loss(s.least_noise, s.bounding_rate, log_tail) for s in segments)
    composed = 2 * loss_bound(segments, _TAIL * delta)
    interval = max(wanted, 2 * widest / _MAX_POINTS, composed / _MAX_COMPOSED_POINTS, _FINEST)
    return _Grid(2.0 ** math.floor(math.log2(interval)), log_tail)


def _one_step_loss(sigma: float, q: float, log_tail: float) -> float:
    """Bound the privacy loss of one step, up or down, but for a mass of exp(log_tail)."""
    whole = (0.5 + sigma * math.sqrt(-2 * log_tail)) / sigma**2  # without sampling
    if whole > _MAX_LOSS:
        raise ArithmeticError(f"a privacy loss of {whole:.3g}")
    return max(math.log1p(q * math.expm1(whole)), -math.log1p(-q) if q < 1 else 0.0)


@functools.lru_cache(maxsize=16)
def _one_step(one: GaussianSteps, grid: _Grid) -> "PrivacyLossDistribution":
    from dp_accounting.pld import privacy_loss_distribution

    sigma, q, ratios, t = one.noise_multiplier, one.sample_rate, one.ratios, one.round_steps
    if t > 1:
        assert ratios is None, "no accounting of estimated norms in rounds"
        return round_distribution(sigma, t, interval=grid.interval, log_tail=grid.log_tail)
    if ratios is not None:
        return mixture_distribution(
            sigma, q, ratios, interval=grid.interval, log_tail=grid.log_tail
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        value_discretization_interval=grid.interval,
        log_mass_truncation_bound=grid.log_tail,
        pessimistic_estimate=True,
        use_connect_dots=True,
    )


@functools.lru_cache(maxsize=8)
def _steps(segment: GaussianSteps, grid: _Grid, tail: float) -> "PrivacyLossDistribution":
    """Compose all steps of a segment; kept for questions about later segments."""
    one = _one_step(dataclasses.replace(segment, steps=1), grid)
    return one.self_compose(segment.steps, tail) if segment.steps > 1 else one
