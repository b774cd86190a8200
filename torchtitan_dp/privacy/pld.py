"""Numerical accounting: privacy loss distributions (PLD), by Google's dp-accounting.

Guarantee
---------
`pld_epsilon` is an upper bound on epsilon for neighbours in both directions, by construction and
not by an error bar: each step's distribution is replaced by one on a grid that dominates it
(connect the dots: Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022), what the tails of steps and
of their composition lose counts as infinite loss, and delta is lowered by what Fourier transforms
in float64 may add to it. Add-or-remove and zero-out neighbours have the same distributions, of
which both directions are composed and the worse one is told. Where these numbers cannot be had,
the answer is infinity. `gaussian_epsilon` is exact but for float64's rounding, allowed for.

The grid is fine enough for a bound within about 0.1% of the true epsilon, and coarser only where
it would exceed `_MAX_POINTS`.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from torchtitan_dp.privacy.prv import fft_noise
from torchtitan_dp.privacy.rdp import loss_bound, rdp_epsilon
from torchtitan_dp.privacy.segments import Segment

if TYPE_CHECKING:  # imported when it is used: it takes a second
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

logger = logging.getLogger(__name__)

_COARSEST, _FINEST = 2.0**-6, 2.0**-40  # intervals of the grid of privacy losses
_MAX_POINTS = 2**18  # of one step's distribution
_MAX_COMPOSED_POINTS = 2**20
_MAX_LOSS = 690.0  # of one step: its exp() must stay finite
_TAIL = 1e-5  # share of delta that truncated tails may take, once for steps, once for sums


@dataclass(frozen=True)
class _Grid:
    """Of privacy losses. interval: between them; log_tail: ln of what a step's tails may lose."""

    interval: float
    log_tail: float


@functools.lru_cache(maxsize=1024)
def pld_epsilon(segments: tuple[Segment, ...], delta: float) -> float:
    """PLD's upper bound; inf, and a log line, where its numbers cannot be had.

    Args:
        segments: as `segments.merged` gives them: at least one, noise and sample rate above 0.
        delta: of (epsilon, delta).
    """
    exact = [segment.sample_rate for segment in segments] == [1.0]
    if exact or fft_noise(segments) <= delta / 2:
        try:
            with np.errstate(all="ignore"):  # log(0) and the like at the ends of the grid
                if exact:
                    bound = gaussian_epsilon(1 / segments[0].noise_multiplier, delta)
                else:
                    bound = _compose(segments, delta)
        except (ArithmeticError, IndexError, ValueError) as why:
            logger.info("PLD accounting failed: %s", why)
        else:
            if bound >= 0:  # not NaN
                return bound
    logger.info("PLD is out of its depth at %s: RDP", segments)
    return math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism with sensitivity / noise = mu (Balle & Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """

    def excess(epsilon: float) -> float:
        outside = ndtr(mu / 2 - epsilon / mu)
        rounding = 1e-14 * (1 + epsilon) * outside
        return float(outside - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) + rounding)

    if excess(0.0) <= delta:
        return 0.0
    # Of the tail alone, P[loss > epsilon] <= delta is enough.
    ceiling = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    root, precision = float(brentq(lambda e: excess(e) - delta, 0.0, ceiling)), 1e-10
    return root * (1 + precision) + precision


def _compose(segments: tuple[Segment, ...], delta: float) -> float:
    rough = rdp_epsilon(segments, delta)
    grid, bound = _grid(segments, delta, rough), math.inf
    for _ in range(3):  # `rough` may overestimate, and then the first grid is too coarse
        bound = min(bound, _compose_on(grid, segments, delta))
        finer = _grid(segments, delta, bound)
        if finer.interval > grid.interval / 4:
            break
        grid = finer
    return bound


def _compose_on(grid: _Grid, segments: tuple[Segment, ...], delta: float) -> float:
    total = None
    for s in segments:
        part = _steps(s, grid, _TAIL * delta)
        total = part if total is None else total.compose(part, _TAIL * delta)
    assert total is not None, "no segment, no distribution"
    return float(total.get_epsilon_for_delta(delta - fft_noise(segments)))


def _grid(segments: tuple[Segment, ...], delta: float, rough: float) -> _Grid:
    """The grid for an epsilon of about `rough`.

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
    widest = max(_one_step_loss(s.noise_multiplier, s.sample_rate, log_tail) for s in segments)
    composed = 2 * loss_bound(segments, _TAIL * delta)
    interval = max(wanted, 2 * widest / _MAX_POINTS, composed / _MAX_COMPOSED_POINTS, _FINEST)
    return _Grid(2.0 ** math.floor(math.log2(interval)), log_tail)


def _one_step_loss(sigma: float, q: float, log_tail: float) -> float:
    """The largest privacy loss of one step, up or down, but for a mass of exp(log_tail)."""
    whole = (0.5 + sigma * math.sqrt(-2 * log_tail)) / sigma**2  # without sampling
    if whole > _MAX_LOSS:
        raise ArithmeticError(f"a privacy loss of {whole:.3g}")
    return max(math.log1p(q * math.expm1(whole)), -math.log1p(-q) if q < 1 else 0.0)


@functools.lru_cache(maxsize=16)
def _one_step(sigma: float, q: float, grid: _Grid) -> "PrivacyLossDistribution":
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        value_discretization_interval=grid.interval,
        log_mass_truncation_bound=grid.log_tail,
        pessimistic_estimate=True,
        use_connect_dots=True,
    )


@functools.lru_cache(maxsize=8)
def _steps(segment: Segment, grid: _Grid, tail: float) -> "PrivacyLossDistribution":
    """All steps of a segment: kept, since questions about later segments come back to it."""
    one = _one_step(segment.noise_multiplier, segment.sample_rate, grid)
    return one.self_compose(segment.steps, tail) if segment.steps > 1 else one
