"""What the best attacker detects, computed without the package and without its libraries.

By the Neyman-Pearson lemma, the best tests of "with a unit" against "without" are thresholds of the
privacy loss. The loss of one step is put on a fine grid, each part of its mass shared between two
points so that its mean stays; steps are added by a Fourier transform; detections and false alarms
are sums over the points above each threshold.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft
from scipy.stats import norm


@dataclass(frozen=True)
class Roc:
    """alarms, detections: (points,) float64, both rising from 0 to 1; concave."""

    alarms: np.ndarray
    detections: np.ndarray

    def detected(self, alarms: np.ndarray) -> np.ndarray:
        """The most detections at each rate of false alarms, with coins between two thresholds."""
        return np.interp(alarms, self.alarms, self.detections)

    def false_alarms(self, detections: float) -> float:
        return float(np.interp(detections, self.detections, self.alarms))

    def reversed(self) -> "Roc":
        """Of the same tests, when the unit's absence is what is to be detected."""
        return Roc(1 - self.detections[::-1], 1 - self.alarms[::-1])


def gaussian_step(sigma: float, q: float) -> Roc:
    """One step in closed form: thresholds of the output x, N(0, sigma^2) without the unit."""
    x = np.linspace(1 + 12 * sigma, -12 * sigma, 2_000_001)
    return Roc(norm.sf(x, 0, sigma), (1 - q) * norm.sf(x, 0, sigma) + q * norm.sf(x, 1, sigma))


def composed(parts: list[tuple[float, float, int]], half_width: float, points: int) -> Roc:
    """Steps of (sigma, q, how many), of which all losses lie within +- half_width."""
    interval = 2 * half_width / points
    present, absent = (_added(parts, interval, points, drawn) for drawn in (True, False))
    losses = interval * (np.arange(points) - points // 2)
    # Each where it is the smaller of the two follows from the other without Fourier's noise.
    up = losses > 0
    present[~up] = absent[~up] * np.exp(losses[~up])
    absent[up] = present[up] * np.exp(-losses[up])
    alarms, detections = (
        np.concatenate([[0.0], np.cumsum(mass[::-1])]) for mass in (absent, present)
    )
    assert abs(alarms[-1] - 1) < 1e-6 > abs(detections[-1] - 1), (alarms[-1], detections[-1])
    return Roc(alarms / alarms[-1], detections / detections[-1])


def _added(
    parts: list[tuple[float, float, int]], interval: float, points: int, present: bool
) -> np.ndarray:
    """The mass of all steps' losses from the least up, with the unit present or absent."""
    transform = np.ones(points // 2 + 1, dtype=complex)
    for sigma, q, steps in parts:
        transform = transform * fft.rfft(_one_step(sigma, q, interval, points, present)) ** steps
    return np.clip(fft.fftshift(fft.irfft(transform, points)), 0, None)


def _one_step(sigma: float, q: float, interval: float, points: int, present: bool) -> np.ndarray:
    """The loss's mass at 0, 1, ..., -1 times the interval."""
    x, dx = np.linspace(-13 * sigma, 1 + 13 * sigma, 1_000_001, retstep=True)
    rate = q if present else 0.0
    density = (1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, 1, sigma)
    whole = (2 * x - 1) / (2 * sigma**2)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + whole) if q < 1 else whole
    position = loss / interval
    left = np.floor(position).astype(np.int64)
    share = position - left
    mass = np.bincount(left % points, density * dx * (1 - share), points)
    return mass + np.bincount((left + 1) % points, density * dx * share, points)
