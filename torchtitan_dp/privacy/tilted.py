"""Composition of privacy losses by tilted Fourier transforms, and the bound on delta behind it.

Guarantee
---------
`composed` bounds delta at every epsilon >= 0 for the sum of independent losses, whatever the tilt
(proof: docs/proofs.md, "Privacy loss distributions"). The tilt decides where the bound is tight:

- Before the transform masses are multiplied by e^(tilt loss) and divided by their sum, and after
  it divided and multiplied. What float64 may have taken from a value is bounded, from the
  transform's own magnitudes, and added to it; tilted back, it is relative to Renyi DP's bound on
  delta, where without a tilt it is relative to 1.
- The transform's window is circular: a loss below it counts as a larger one. By a Chernoff bound a
  loss above it has a probability of at most `_BEYOND` of delta, and counts as infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_dp.privacy.losses import UNIT, Losses

_MOST_POINTS = 2**22  # of a transform
_BEYOND = 1e-6  # share of delta that may lie above its window
_DEVIATIONS = 12.0  # of the tilted sum, below its mean: where the window begins
_FFT_ROUNDING = 5 * UNIT  # of each of log2(points) levels, relative to the sum of all magnitudes

Parts = Sequence[tuple[Losses, int]]  # of one direction: a step's losses, and the number of steps


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
