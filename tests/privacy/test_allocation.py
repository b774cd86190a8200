"""Random allocation (row 74): each unit in exactly one step of a round, and an epsilon that is a
bound: held against a closed form and a Monte Carlo of the dominating pair, not PLD_accounting."""

import functools
import hashlib
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.special import log_ndtr, logsumexp
from scipy.stats import chi2, norm

from torchtitan_dp.config import Privacy
from torchtitan_dp.privacy import losses as privacy_losses
from torchtitan_dp.privacy import pld
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.meaning import meaning
from torchtitan_dp.privacy.pld import pld_profile
from torchtitan_dp.privacy.sampling import allocate
from torchtitan_dp.privacy.segments import Mechanism, Segment, composition, dp_event, mechanism_of


def of(sigma: float, t: int) -> Mechanism:
    return Mechanism(sigma, 1 / t, round_steps=t)


def epsilon(sigma: float, t: int, rounds: int, delta: float) -> float:
    return compose([Segment(of(sigma, t), rounds * t)], delta=delta, accountant="pld")


def key(number: int) -> bytes:
    return hashlib.sha256(f"round {number}".encode()).digest()


# --- Draws. ---------------------------------------------------------------------------------------


def test_row74_a_units_step_is_a_function_of_the_rounds_key_and_of_itself():
    """No unit that comes, or goes, moves another one's."""
    steps = allocate(key(0), 5_000, 7)
    for fewer in (0, 1, 4_000, 4_999):
        assert np.array_equal(allocate(key(0), fewer, 7), steps[:fewer])
    assert steps.dtype == np.int64
    assert not np.array_equal(steps, allocate(key(1), 5_000, 7))


def test_large_populations_are_drawn_in_parts_that_are_not_alike(monkeypatch):
    whole = allocate(key(0), 1_000, 5)
    monkeypatch.setattr("torchtitan_dp.privacy.sampling._CHUNK", 100)
    parts = allocate(key(0), 1_000, 5)
    assert np.array_equal(parts[:100], whole[:100])
    assert not np.array_equal(parts[:100], parts[100:200])
    assert np.array_equal(allocate(key(0), 950, 5), parts[:950])


def test_steps_are_uniform_and_units_and_rounds_independent():
    t, units, rounds = 4, 50, 2_000
    steps = np.stack([allocate(key(r), units, t) for r in range(rounds)])
    assert set(np.unique(steps)) == set(range(t))
    for a, b in (
        (steps[:, :-1].ravel(), steps[:, 1:].ravel()),  # neighbours in a round
        (steps[:-1].ravel(), steps[1:].ravel()),  # a unit in two rounds
    ):
        pairs = np.bincount(a * t + b, minlength=t * t)
        expected = pairs.sum() / t**2
        assert ((pairs - expected) ** 2 / expected).sum() < chi2.isf(1e-6, t * t - 1)


# --- Epsilon. -------------------------------------------------------------------------------------


CACHED = (privacy_losses.round_losses, privacy_losses._allocated, pld.pld_epsilon)


@pytest.fixture
def coarse(monkeypatch):
    """A coarse grid of losses, on which epsilon must be a bound, too."""
    monkeypatch.setattr(privacy_losses, "_POINTS", {False: 600, True: 600})
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def least_delta(sigma: float, t: int, rounds: int, epsilon: float) -> float:
    """A lower bound on delta(epsilon), in closed form: that some step's output exceeds c, at the
    best c, of N(e_i, sigma^2) in each round, i uniform, against N(0, sigma^2)."""
    c = np.linspace(-5 * sigma, 1 + 12 * sigma, 4_000)
    below_with = rounds * (log_ndtr((c - 1) / sigma) + (t - 1) * log_ndtr(c / sigma))
    below_without = rounds * t * log_ndtr(c / sigma)
    remove = -np.expm1(below_with) + math.exp(epsilon) * np.expm1(below_without)
    add = np.exp(below_without) - math.exp(epsilon) * np.exp(below_with)
    return float(max(remove.max(), add.max()))


GRID = [*itertools.product((0.5, 0.8, 1.5), (2, 10, 100, 1_000), (1, 5), (1e-4, 1e-6))]
GRID += [*itertools.product((0.45, 2.5), (3, 39), (1, 20, 100), (1e-5,))]


@pytest.mark.slow
def test_epsilon_is_never_below_an_independent_bound_on_a_grid(coarse):
    assert len(GRID) == 60
    for sigma, t, rounds, delta in GRID:
        found = epsilon(sigma, t, rounds, delta)
        assert least_delta(sigma, t, rounds, found) <= delta, (sigma, t, rounds, delta)


@functools.cache
def losses(sigma: float, t: int, rounds: int, *, add: bool, many: int = 200_000) -> np.ndarray:
    """Draws of the dominating pair's privacy loss over so many rounds."""
    rng, total = np.random.default_rng(7), np.zeros(many)
    for _ in range(rounds):
        x = rng.normal(scale=sigma, size=(many, t))
        if not add:
            x[:, 0] += 1  # whichever step it is
        loss = logsumexp((x - 0.5) / sigma**2, axis=1) - math.log(t)
        total += -loss if add else loss
    return total


@pytest.mark.parametrize("sigma, t, rounds", [(0.8, 2, 1), (1.0, 10, 1), (1.0, 10, 4), (2.0, 5, 3)])
def test_delta_is_that_of_a_monte_carlo_of_the_dominating_pair(sigma, t, rounds):
    """Within its error it is never below, and in the worse direction hardly above."""
    profile = pld_profile(composition([Segment(of(sigma, t), rounds * t)]), 1e-3)
    for at in (0.25, 0.5, 1.0):
        found, worst = float(profile.at(np.array([at]))[0]), 0.0
        for add in (False, True):
            each = -np.expm1(np.minimum(at - losses(sigma, t, rounds, add=add), 0))
            mean, error = each.mean(), 4 * each.std() / math.sqrt(len(each)) + 1e-5
            assert found >= mean - error, (at, add)
            worst = max(worst, mean + error)
        assert found <= (1.1 + 0.03 * rounds) * worst + 1e-4, at


def test_a_round_of_two_steps_by_quadrature():
    """The exact delta of both directions, by the midpoint rule over the plane."""
    sigma, at = 0.7, 1.5
    x = np.linspace(-8 * sigma, 1 + 8 * sigma, 2_001)
    zero, one = norm.pdf(x, scale=sigma), norm.pdf(x, loc=1, scale=sigma)
    without = np.outer(zero, zero)
    present = (np.outer(one, zero) + np.outer(zero, one)) / 2
    area = (x[1] - x[0]) ** 2
    exact = max(
        np.maximum(p - math.exp(at) * q, 0).sum() * area
        for p, q in ((present, without), (without, present))
    )
    profile = pld_profile(composition([Segment(of(sigma, 2), 2)]), 1e-4)
    assert 1 - 1e-4 <= float(profile.at(np.array([at]))[0]) / exact < 1.015


# --- Whole rounds, beside other steps. ------------------------------------------------------------


def test_rounds_compose_with_poisson_sampled_steps():
    """More than each alone, at most the sum; not merged with them at equal noise and rate."""
    rounds, steps = Segment(of(1.0, 10), 10), Segment(Mechanism(1.0, 0.1), 10)
    terms = dict(delta=1e-5, accountant="pld")
    alone, poisson = compose([rounds], **terms), compose([steps], **terms)
    assert max(alone, poisson) < compose([rounds, steps], **terms) < alone + poisson
    assert len(composition([rounds, steps])) == 2


def test_an_event_of_rounds_is_none_of_poisson_sampling():
    (rounds,) = dp_event(composition([Segment(of(1.0, 10), 25)]))["events"]
    assert rounds["count"] == 3
    assert rounds["event"]["class_name"] == "UnsupportedDpEvent"
    assert not PLDAccountant().supports(dp_accounting.UnsupportedDpEvent())


def test_what_epsilon_means_bounds_the_best_attack_on_a_round():
    """It detects by the likelihood ratio, at 1% of false alarms."""
    sigma, t = 1.0, 10
    found = meaning([Segment(of(sigma, t), t)], 1e-5)
    threshold = np.quantile(-losses(sigma, t, 1, add=True), 0.99)
    detected = (losses(sigma, t, 1, add=False) > threshold).mean()
    assert detected - 0.005 <= dict(found.detected)[0.01] < 1.4 * detected


# --- Terms. ---------------------------------------------------------------------------------------


def test_rounds_are_the_rates_inverse_rounded():
    made = functools.partial(
        mechanism_of, Privacy(sampling="allocation"), noise_multiplier=1.0, estimates_norms=False
    )
    assert made(sample_rate=256 / 10_000).round_steps == 39
    assert made(sample_rate=0.4).sample_rate == 0.5
    every = made(sample_rate=0.9)  # a round of one step
    assert (every.round_steps, every.sample_rate) == (1, 1.0)
    with pytest.raises(ValueError, match="rounds of 4"):
        Mechanism(1.0, 0.3, round_steps=4)
