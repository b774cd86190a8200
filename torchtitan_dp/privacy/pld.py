"""Numerical accounting by privacy loss distributions (PLD).

Guarantee
---------
`pld_epsilon` is an upper bound on epsilon for neighbours in both directions, by construction and
not by an error bar, at a delta of 1e-15 as at 1e-5: each step's losses are replaced by masses on a
grid that dominate them (`losses`; for a round of random allocation `allocation`), and composed with
all that float64 may take from delta added to it (`tilted`). Add-or-remove and zero-out neighbours
have the same losses, of which both directions are composed and the worse one is returned. Where
its numbers cannot be had, the answer is infinity. `gaussian_epsilon` is exact but for float64's
rounding, allowed for.

The grid is fine enough for a bound within about 0.1% of the true epsilon; coarser where it would
exceed `_MAX_POINTS`, and where delta is below the rounding of steps of a tiny sample rate.
`pld_profile` is the same bound at every epsilon at once.
"""

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from torchtitan_dp.privacy.allocation import round_losses
from torchtitan_dp.privacy.losses import gaussian_losses
from torchtitan_dp.privacy.rdp import loss_bound, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps
from torchtitan_dp.privacy.tilted import Parts, Profile, chernoff, composed

logger = logging.getLogger(__name__)

_COARSEST, _FINEST = 2.0**-6, 2.0**-40  # intervals of the grid of privacy losses
_MAX_POINTS = 2**18  # of one step's distribution
_MAX_COMPOSED_POINTS = 2**20
_MAX_LOSS = 690.0  # of one step: its exp() must stay finite
_TAIL = 1e-5  # share of delta that truncated tails of steps may take


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
    if is_one_gaussian(segments):
        return gaussian_epsilon(1 / segments[0].noise_multiplier, delta)
    try:
        bound = min(bound for bound, _ in _attempts(segments, delta))
    except (ArithmeticError, ValueError) as why:
        logger.info("PLD accounting failed: %s", why)
    else:
        if 0 <= bound < math.inf:  # not NaN
            return bound
    logger.info("PLD is out of its depth at %s", segments)
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


@functools.lru_cache(maxsize=16)
def pld_profile(segments: tuple[GaussianSteps, ...], delta: float) -> Profile | None:
    """Compute PLD's upper bound on delta(epsilon) for all epsilons; None where it cannot be had.

    Args:
        segments: merged: at least one, noise above 0.
        delta: about which the bound is to be tight: its grid and its tails are `pld_epsilon`'s.
    """
    try:
        *_, (_, grid) = _attempts(segments, delta)
        both = _both_directions(segments, grid)
        tilt, _ = chernoff(both[0], grid.interval, delta)
        # Each is a bound, tight about a delta of its own; of no tilt that is 1.
        tilts = [share * tilt for share in (0.0, 0.3, 0.6, 1.0)]
        found = [[composed(parts, grid.interval, t, delta) for t in tilts] for parts in both]
    except (ArithmeticError, ValueError) as why:
        logger.info("PLD accounting failed: %s", why)
        return None
    points = max(len(profile.deltas) for direction in found for profile in direction)
    of_each = [
        [np.pad(profile.deltas, (0, points - len(profile.deltas)), "edge") for profile in direction]
        for direction in found
    ]
    worse = np.maximum(*(np.minimum.reduce(direction) for direction in of_each))
    if np.isnan(worse).any():
        logger.info("PLD is out of its depth at %s", segments)
        return None
    worse = np.minimum.accumulate(worse)  # delta falls with epsilon
    worse.setflags(write=False)  # it is shared by the cache
    drift = max(direction[0].drift for direction in found)
    return Profile(grid.interval, worse, drift)


def _attempts(segments: tuple[GaussianSteps, ...], delta: float) -> Iterator[tuple[float, _Grid]]:
    """Yield epsilon at `delta` and its grid, on finer and finer grids."""
    rough, least = rdp_epsilon(segments, delta), math.inf
    grid = _grid(segments, delta, rough)
    for _ in range(3):  # `rough` may overestimate, and then the first grid is too coarse
        both = _both_directions(segments, grid)
        tilt, _ = chernoff(both[0], grid.interval, delta)
        found = [composed(parts, grid.interval, tilt, delta).epsilon(delta) for parts in both]
        yield max(found), grid
        least = min(least, max(found))
        finer = _grid(segments, delta, least)
        if finer.interval > grid.interval / 4:
            break
        grid = finer


def _both_directions(segments: tuple[GaussianSteps, ...], grid: _Grid) -> tuple[Parts, Parts]:
    of_each = []
    for s in segments:
        if s.round_steps > 1:
            assert s.ratios is None, "no accounting of estimated norms in rounds"
            terms = s.noise_multiplier, s.round_steps, s.steps > 1
            one = round_losses(*terms, interval=grid.interval, log_tail=grid.log_tail)
        else:
            rates = s.noise_multiplier, s.sample_rate, s.ratios
            one = gaussian_losses(*rates, interval=grid.interval, log_tail=grid.log_tail)
        of_each.append((one, s.steps))
    remove, add = ([(one[way], steps) for one, steps in of_each] for way in (0, 1))
    return remove, add


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
    if any(s.ratios is not None for s in segments):
        widest *= 2  # a point of a mixture takes a hundred times as long
    interval = max(wanted, 2 * widest / _MAX_POINTS, composed / _MAX_COMPOSED_POINTS, _FINEST)
    return _Grid(2.0 ** math.floor(math.log2(interval)), log_tail)


def _one_step_loss(sigma: float, q: float, log_tail: float) -> float:
    """Bound the privacy loss of one step, up or down, but for a mass of exp(log_tail)."""
    whole = (0.5 + sigma * math.sqrt(-2 * log_tail)) / sigma**2  # without sampling
    if whole > _MAX_LOSS:
        raise ArithmeticError(f"a privacy loss of {whole:.3g}")
    return max(math.log1p(q * math.expm1(whole)), -math.log1p(-q) if q < 1 else 0.0)
