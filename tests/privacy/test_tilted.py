"""Composition at any delta: against sums in extended precision and an importance sampling that
share nothing with it, and smooth from 1e-5 to 1e-15 (row 81)."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from tests.accounts import gaussian_steps, steps_of
from torchtitan_dp.privacy import pld
from torchtitan_dp.privacy.accounting import compose, counted_by
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.losses import Losses, gaussian_losses, ratios
from torchtitan_dp.privacy.pld import chernoff, composed
from torchtitan_dp.privacy.segments import Mechanism, Segment

DELTAS = [10.0**-k for k in range(5, 16)]
SMALL = [(4e-5, 0.614, 100_000), (1e-3, 0.6, 10_000), (0.0141, 0.4463, 30)]


def outputs(sigma, q, k, cells=6_000):
    """P and Q of cells of a step's output, which it decides: their divergence is a lower bound."""
    shares, weights = ([1.0], [1.0]) if k is None else (ratios(k).values, ratios(k).probabilities)
    x = np.linspace(-11 * sigma, shares[-1] + 11 * sigma, cells + 1)

    def mass(mean):  # by the tail on its own side
        below, above = ndtr((x - mean) / sigma), ndtr((mean - x) / sigma)
        return np.where(x[1:] < mean, np.diff(below), -np.diff(above))

    absent = mass(0.0)
    present = (1 - q) * absent + q * sum(w * mass(z) for z, w in zip(shares, weights, strict=True))
    kept = (absent > 1e-290) & (present > 1e-290)
    return present[kept], absent[kept]


def sampled_delta(parts, epsilon, present, trials=4_000, seed=0):
    """A lower bound on delta, by importance sampling: each step's cell from P^(1 + t) Q^-t, the
    number of steps in each cell at once. Returns the mean and its standard error."""
    rng, log_ratio, total = np.random.default_rng(seed), np.zeros(trials), np.zeros(trials)
    steps_of_losses = []
    for (sigma, q, steps), k in parts:
        one, other = outputs(sigma, q, k)[:: 1 if present else -1]
        steps_of_losses.append((one, np.log(one) - np.log(other), steps))
    tilts = np.geomspace(0.05, 200, 400)
    cumulants = [
        sum(
            n * (np.log(p @ np.exp(t * (loss - loss.max()))) + t * loss.max())
            for p, loss, n in steps_of_losses
        )
        for t in tilts
    ]
    tilt = tilts[np.argmin(np.array(cumulants) - tilts * epsilon - np.log(tilts * (1 + tilts)))]
    for p, loss, steps in steps_of_losses:
        weights = p * np.exp(tilt * (loss - loss.max()))
        log_sum = math.log(weights.sum()) + tilt * loss.max()
        total += rng.multinomial(steps, weights / weights.sum(), size=trials) @ loss
        log_ratio += steps * log_sum
    log_ratio -= tilt * total
    each = np.where(
        total > epsilon, np.exp(log_ratio) * -np.expm1(np.minimum(epsilon - total, 0)), 0
    )
    return each.mean(), each.std() / math.sqrt(trials)


@pytest.mark.slow
@pytest.mark.parametrize("q, sigma, steps", SMALL)
@pytest.mark.parametrize("delta", [1e-6, 1.1e-10, 1e-15])
def test_row81_no_epsilon_is_below_an_independent_certificate(q, sigma, steps, delta):
    found = pld.pld_epsilon((gaussian_steps(sigma, q, steps),), delta)
    mean, error = sampled_delta([((sigma, q, steps), None)], found, present=True)
    assert mean - 4 * error <= delta
    assert mean + 4 * error >= 0.9 * delta  # nor far above it
    mean, error = sampled_delta([((sigma, q, steps), None)], found, present=False)
    assert mean - 4 * error <= delta


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-6, 1e-12])
def test_row81_nor_where_unlike_segments_and_estimated_norms_compose(delta):
    parts = [((1.0, 0.01, 600), None), ((1.4, 0.02, 300), 32)]
    segments = tuple(gaussian_steps(*part, *([k] if k else [])) for part, k in parts)
    mean, error = sampled_delta(parts, pld.pld_epsilon(segments, delta), present=True)
    assert mean - 4 * error <= delta
    assert mean + 4 * error >= 0.85 * delta


MECHANISMS = {
    "poisson": Segment(steps_of(0.6, 1e-3, 1).mechanism, 10_000),
    "many steps": Segment(steps_of(0.614, 4e-5, 1).mechanism, 100_000),
    "few steps": Segment(steps_of(0.4463, 0.0141, 1).mechanism, 30),
    "bands": Segment(Mechanism(0.8, 1e-3, column=cut_off(4)), 10_000),
    "estimated norms": Segment(steps_of(0.8, 0.01, 1, 32).mechanism, 500),
    "allocation": Segment(Mechanism(0.6, 1 / 64, round_steps=64), 64),
    "rounds": Segment(Mechanism(0.8, 1 / 20, round_steps=20), 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_row81_epsilon_is_smooth_in_delta_and_counted_by_pld(name):
    """It rises by a little more with each factor of ten, as a tail's quantile does, and never
    jumps: RDP in the place of PLD would by half."""
    segment = MECHANISMS[name]
    rises = np.diff([compose([segment], delta=delta, accountant="pld") for delta in DELTAS])
    assert (rises > 0).all()
    assert (np.abs(np.diff(rises)) < 0.35 * rises.max()).all()
    for delta in (DELTAS[0], DELTAS[-1]):
        assert counted_by([segment], delta=delta, accountant="pld") == "pld"


# --- What float64 takes. --------------------------------------------------------------------------


def exactly(masses: np.ndarray, steps: int) -> np.ndarray:
    """The power of a distribution by convolution in extended precision."""
    total = np.ones(1, dtype=np.longdouble)
    for _ in range(steps):
        total = np.convolve(total, masses.astype(np.longdouble))
    return total


@pytest.mark.parametrize("tilt", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("steps", [1, 7, 24])
def test_delta_is_never_below_that_of_a_sum_in_extended_precision(tilt, steps):
    """Check every epsilon under three tilts; about a tilt's own delta the bound is tight."""
    interval = 0.01
    one, _ = gaussian_losses(0.9, 0.2, None, interval=interval, log_tail=-40.0)
    one = Losses(one.first, one.masses, one.infinite, 0.0)
    profile = composed([(one, steps)], interval, tilt, 1e-12)
    total = exactly(one.masses, steps)
    at = (steps * one.first + np.arange(len(total))) * np.longdouble(interval)
    infinite = -math.expm1(steps * math.log1p(-one.infinite))
    for k in range(0, min(len(profile.deltas), 2_000), 50):
        above = at > k * interval
        true = infinite + float(total[above] @ -np.expm1(k * np.longdouble(interval) - at[above]))
        assert profile.deltas[k] >= true
        if tilt == 2.0 and true > 1e-13:
            assert profile.deltas[k] <= true * (1 + 1e-4) + 1.1e-18


def test_what_the_transform_may_take_is_counted(monkeypatch):
    """With a rounding a million times larger delta rises, and stays relative where it is tilted."""
    one, _ = gaussian_losses(0.6, 1e-3, None, interval=2.0**-11, log_tail=-50.0)
    parts = [(one, 10_000)]
    tilt, _ = chernoff(parts, 2.0**-11, 1e-10)
    at = np.array([5.8])
    plain = [float(composed(parts, 2.0**-11, t, 1e-10).at(at)[0]) for t in (0.0, tilt)]
    monkeypatch.setattr(pld, "_FFT_ROUNDING", 1e4 * pld._FFT_ROUNDING)
    coarse = [float(composed(parts, 2.0**-11, t, 1e-10).at(at)[0]) for t in (0.0, tilt)]
    assert coarse[0] > 100 * plain[0]  # relative to 1
    assert plain[1] < coarse[1] < 2 * plain[1]


def test_a_loss_that_leaves_the_window_is_counted():
    """A tenth of the mass at a huge loss: wherever the window ends, delta is a tenth at least."""
    masses = np.zeros(2_001)
    masses[[0, 2_000]] = 0.9, 0.1
    found = composed([(Losses(0, masses, 0.0, 0.0), 1)], 0.01, 0.5, 0.2)
    assert (found.deltas[:1_500] >= 0.1 * (1 - np.exp(-5))).all()


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
def test_gaussians_compose_to_the_gaussian(mu, delta):
    """Sampling all but surely takes the general way to the exact value."""
    found = pld.pld_epsilon((gaussian_steps(3 / mu, 1 - 1e-12, 9),), delta)
    exact = pld.gaussian_epsilon(mu, delta)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3) + 1e-6
