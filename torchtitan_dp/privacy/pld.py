"""Numerical accounting by privacy loss distributions (PLD), composed by tilted Fourier transforms.

Guarantee (proof: docs/proofs.md, "Privacy loss distributions"):
    - `pld_epsilon` is an upper bound on epsilon for neighbours in both directions, by construction
      and not by an error bar, at a delta of 1e-15 as at 1e-5: masses on a grid dominate each step's
      losses (`losses`), and all that float64 may take from delta is added to it. Add-or-remove and
      zero-out neighbours have the same losses, of which both directions are composed and the worse
      one is returned. Where its numbers cannot be had, the answer is infinity. `gaussian_epsilon`
      is exact but for float64's rounding, allowed for. `pld_profile` is the same bound at every
      epsilon at once.
    - `composed` bounds delta at every epsilon >= 0 for the sum of independent losses, for any
      tilt, which decides where the bound is tight. Before the transform masses are multiplied by
      e^(tilt loss) and divided by their sum, and after it divided and multiplied. What float64 may
      have taken from a value is bounded, from the transform's own magnitudes, and added to it;
      tilted back, it is relative to Renyi DP's bound on delta, where without a tilt it is relative
      to 1. The transform's window is circular: a loss below it counts as a larger one. By a
      Chernoff bound a loss above it has a probability of at most `_BEYOND` of delta, and counts as
      infinite.

The grid is fine enough for a bound within about 0.1% of the true epsilon; coarser where it would
exceed `_MAX_POINTS`, and where delta is below the rounding of steps of a tiny sample rate.
"""

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr

from torchtitan_dp.privacy.losses import UNIT, Losses, gaussian_losses, round_losses
from torchtitan_dp.privacy.rdp import loss_bound, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps

logger = logging.getLogger(__name__)

_COARSEST, _FINEST = 2.0**-6, 2.0**-40  # intervals of the grid of privacy losses
_MAX_POINTS = 2**18  # of one step's distribution
_MAX_COMPOSED_POINTS = 2**20
_MAX_LOSS = 690.0  # of one step: its exp() must stay finite
_TAIL = 1e-5  # share of delta that truncated tails of steps may take
_MOST_POINTS = 2**22  # of a transform
_BEYOND = 1e-6  # share of delta that may lie above its window
_DEVIATIONS = 12.0  # of the tilted sum, below its mean: where the window begins
_FFT_ROUNDING = 5 * UNIT  # of each of log2(points) levels, relative to the sum of all magnitudes

Parts = Sequence[tuple[Losses, int]]  # of one direction: a step's losses, and the number of steps


class _Grid(NamedTuple):
    """A grid of losses, `interval` apart; `log_tail` is ln of what a step's tails may lose."""

    interval: float
    log_tail: float


@dataclass(frozen=True, eq=False)
class Profile:
    """An upper bound on delta at every epsilon >= 0.

    Args:
        interval: between the epsilons at which `deltas` holds, but for `drift`.
        deltas: (points,) float64, falling, at 0, `interval`, …; the last bounds delta beyond, too.
        drift: to be added to each epsilon.
    """

    interval: float
    deltas: np.ndarray
    drift: float = 0.0

    def at(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the bound at each epsilon >= 0: float64, same shape.

        Between points it is linear in e^epsilon: delta is convex in that, as the largest
        P[S] - e^epsilon Q[S] over events S, so a chord lies above it. For the same reason delta
        falls by less than an epsilon that is below `drift`.
        """
        shifted = np.maximum(epsilons - self.drift, 0.0)
        left = np.minimum(np.floor(shifted / self.interval), len(self.deltas) - 1).astype(int)
        right = np.minimum(left + 1, len(self.deltas) - 1)
        share = np.expm1(np.minimum(shifted - left * self.interval, self.interval))
        share = share / math.expm1(self.interval)
        found = self.deltas[left] + share * (self.deltas[right] - self.deltas[left])
        return np.asarray(np.minimum(found + np.where(epsilons < self.drift, self.drift, 0), 1.0))

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon at which the bound is at most delta; inf if there is none."""
        i = int(np.argmax(self.deltas <= delta))
        if not self.deltas[i] <= delta:
            return math.inf
        if i == 0:
            return 0.0 if self.deltas[0] + self.drift <= delta else self.drift
        share = (self.deltas[i - 1] - delta) / (self.deltas[i - 1] - self.deltas[i])
        rise = math.log1p(float(share) * math.expm1(self.interval))
        return self.drift + ((i - 1) * self.interval + rise) * (1 + 8 * UNIT)


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
        if 0 <= bound < math.inf:  # not NaN
            return bound
    except (ArithmeticError, ValueError) as why:
        logger.info("PLD accounting failed: %s", why)
    logger.info("PLD is out of its depth at %s", segments)
    return math.inf


def is_one_gaussian(segments: tuple[GaussianSteps, ...]) -> bool:
    """Return whether merged segments are one Gaussian mechanism, with a closed-form profile."""
    return [(s.sample_rate, s.ratios) for s in segments] == [(1.0, None)]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute epsilon of the Gaussian mechanism of sensitivity / noise = mu (Balle & Wang 2018)."""
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
    return Profile(grid.interval, worse, max(direction[0].drift for direction in found))


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
    together = 2 * loss_bound(segments, _TAIL * delta)
    if any(s.ratios is not None for s in segments):
        widest *= 2  # a point of a mixture takes a hundred times as long
    interval = max(wanted, 2 * widest / _MAX_POINTS, together / _MAX_COMPOSED_POINTS, _FINEST)
    return _Grid(2.0 ** math.floor(math.log2(interval)), log_tail)


def _one_step_loss(sigma: float, q: float, log_tail: float) -> float:
    """Bound the privacy loss of one step, up or down, but for a mass of exp(log_tail)."""
    whole = (0.5 + sigma * math.sqrt(-2 * log_tail)) / sigma**2  # without sampling
    if whole > _MAX_LOSS:
        raise ArithmeticError(f"a privacy loss of {whole:.3g}")
    return max(math.log1p(q * math.expm1(whole)), -math.log1p(-q) if q < 1 else 0.0)


def chernoff(parts: Parts, interval: float, probability: float) -> tuple[float, float]:
    """Find the tilt of the least Chernoff bound on losses, roughly: each tilt gives a bound.

    Returns:
        The tilt, and the finite loss that all steps together exceed with at most this probability,
        since P[loss > l] <= E[e^(tilt loss)] e^(-tilt l).
    """
    logs = [_log(one.masses) for one, _ in parts]
    losses = [np.arange(one.first, one.first + len(one.masses)) * interval for one, _ in parts]

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        sums = [_log_sum(log + tilt * at) for log, at in zip(logs, losses, strict=True)]
        total = sum(steps * each for (_, steps), each in zip(parts, sums, strict=True))
        return (total - math.log(probability)) / tilt

    # It has one minimum, since E[e^(tilt loss)] is log-convex: golden sections.
    low, high, golden = math.log(1e-3), math.log(1e5), (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = bound(left), bound(right)
    while high - low > 0.05:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = bound(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = bound(right)
    found = min((at_left, left), (at_right, right))
    return math.exp(found[1]), found[0]


def _log(masses: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a mass of 0 stays one
        return np.asarray(np.log(masses))


def _log_sum(logs: np.ndarray) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def composed(parts: Parts, interval: float, tilt: float, delta: float) -> Profile:
    """Compose one direction's losses, tilted (docs/proofs.md, "Privacy loss distributions").

    Args:
        delta: a small share of which may lie above the transform's window.

    Raises:
        ArithmeticError: the window has too many points.
    """
    tilted: list[np.ndarray] = []
    log_sums = slack = mean = variance = 0.0  # of all steps
    for one, steps in parts:
        multiples = np.arange(one.first, one.first + len(one.masses))
        log_masses = _log(one.masses)
        logs = log_masses + (tilt * interval) * multiples
        log_sum = _log_sum(logs)
        tilted.append(np.exp(logs - log_sum))
        kept = np.isfinite(log_masses)
        largest = np.abs(log_masses[kept]).max() + np.abs(tilt * interval * multiples[kept]).max()
        slack += steps * 16 * UNIT * (1 + float(largest) + abs(log_sum))  # relative, by exponents
        log_sums += steps * log_sum
        here = float(tilted[-1] @ multiples)
        mean += steps * here
        variance += steps * float(tilted[-1] @ (multiples - here) ** 2)

    # The window begins at 0, or where hardly anything is below, and ends where hardly anything is
    # above.
    bottom = math.floor(min(0.0, mean - _DEVIATIONS * math.sqrt(variance)))
    _, highest = chernoff(parts, interval, _BEYOND * delta)
    points = 1 << max(math.ceil(highest / interval) + 1 - bottom, 2).bit_length()
    if points > _MOST_POINTS:
        raise ArithmeticError(f"a distribution of {points} points")

    power = np.ones(points // 2 + 1, dtype=complex)
    log_bound, share = np.zeros(len(power)), np.zeros(len(power))
    transform = _FFT_ROUNDING * math.log2(points)
    for (one, steps), values in zip(parts, tilted, strict=True):
        places = np.arange(one.first, one.first + len(values)) % points
        spectrum = np.fft.rfft(np.bincount(places, values, points))
        rounding = transform + UNIT * math.ceil(len(values) / points)
        magnitude = np.abs(spectrum) + rounding
        log_bound += steps * np.log(magnitude)
        share += steps * (rounding / magnitude + 3 * UNIT)
        power *= _to_the(spectrum, steps)
    error = 2 / points * float((np.exp(log_bound) * (share + transform)).sum())  # of each value
    multiples = np.arange(bottom, bottom + points)
    values = np.maximum(np.fft.irfft(power, points)[multiples % points], 0.0) + error

    # Tilted back, and times e^-loss. Sums of positive terms give delta, at k = 0, 1, …: with d the
    # interval, delta(k) - delta(k + 1) = (e^d - 1) e^(k d) sum of p(l) e^(-l d) over l > k.
    above = np.arange(1, bottom + points)
    logs = np.log(values[above - bottom]) - (tilt + 1) * interval * above
    tails = np.logaddexp.accumulate(logs[::-1])[::-1]
    slack += 4 * UNIT * points * (1 + float(np.abs(tails).max()))
    falls = np.exp(np.minimum(log_sums + slack + interval * (above - 1) + tails, 0.0))
    deltas = np.append(np.cumsum(falls[::-1])[::-1], 0.0) * math.expm1(interval)
    infinite = -math.expm1(sum(steps * math.log1p(-one.infinite) for one, steps in parts))
    deltas = np.minimum(deltas + infinite + _BEYOND * delta, 1.0)
    return Profile(interval, deltas, sum(steps * one.drift for one, steps in parts))


def _to_the(base: np.ndarray, exponent: int) -> np.ndarray:
    """Raise to a power by squaring: each product rounds by less than 3 units, relative to it."""
    result, square = np.ones_like(base), base
    while exponent:
        if exponent & 1:
            result = result * square
        exponent >>= 1
        square = square * square if exponent else square
    return result
