"""Bounds from below: against other libraries, by definition, and on mechanisms that are known."""

import math

import numpy as np
import pytest
from scipy import stats

from torchtitan_dp.privacy.lower_bounds import (
    expected_mu,
    gaussian_mu,
    one_run_epsilon,
    one_run_p_value,
    rate_upper_bound,
)


@pytest.mark.parametrize("errors, trials", [(0, 50), (3, 2000), (990, 1000), (7, 7)])
@pytest.mark.parametrize("confidence", [0.9, 0.9998])
def test_clopper_pearson_is_scipys(errors, trials, confidence):
    exact = stats.binomtest(errors, trials, alternative="less").proportion_ci(confidence, "exact")
    assert rate_upper_bound(errors, trials, confidence) == pytest.approx(exact.high, rel=1e-9)


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 3.0])
def test_mu_holds_as_often_as_it_says_and_is_not_far_off(mu):
    """Every experiment at its own, off-centre threshold: the bound must not mind."""
    rng = np.random.default_rng(1)
    experiments, trials = 2000, 1000
    thresholds = mu / 2 + rng.normal(scale=0.3, size=experiments)
    false_positives = rng.binomial(trials, stats.norm.sf(thresholds))
    false_negatives = rng.binomial(trials, stats.norm.cdf(thresholds - mu))
    terms = {"negatives": trials, "positives": trials, "confidence": 0.9}
    errors = zip(false_positives.tolist(), false_negatives.tolist(), strict=True)
    bounds = [gaussian_mu(false_positives=p, false_negatives=n, **terms) for p, n in errors]
    assert np.mean(np.array(bounds) > mu) <= 0.1 + 3 * math.sqrt(0.09 / experiments)
    assert np.mean(bounds) >= mu - 0.35
    assert expected_mu(mu, trials, 0.9) == pytest.approx(np.mean(bounds), abs=0.15)


@pytest.mark.parametrize("correct", [0, 60, 95, 100])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 4.0])
def test_p_value_by_its_definition(correct, epsilon):
    m, guesses, delta = 300, 100, 1e-4
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [stats.binom.pmf(w, guesses, accuracy) for w in range(guesses + 1)]
    worst = max((sum(pmf[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    expected = min(1.0, sum(pmf[correct:]) + 2 * m * delta * worst)
    terms = {"canaries": m, "guesses": guesses, "delta": delta}
    found = one_run_p_value(correct=correct, epsilon=epsilon, **terms)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "canaries, guesses, correct, confidence, delta, epsilon",
    [
        (1000, 200, 170, 0.95, 1e-5, 1.3975),
        (1000, 200, 200, 0.95, 1e-5, 4.1665),
        (500, 50, 45, 0.95, 1e-6, 1.3932),
        (5000, 5000, 3100, 0.99, 1e-5, 0.4207),
    ],
)
def test_the_bound_is_jax_privacys(canaries, guesses, correct, confidence, delta, epsilon):
    """What the one-run bound in `auditing.py` of google-deepmind/jax_privacy (03a095e) computes."""
    found = one_run_epsilon(
        canaries=canaries, guesses=guesses, correct=correct, delta=delta, confidence=confidence
    )
    assert found == pytest.approx(epsilon, abs=2e-4)


def randomized_response(rng, epsilon, canaries, delta=0.0):
    """Correct guesses of coins told truthfully with the odds e^epsilon, and with delta at once."""
    truthful = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return int(np.sum(truthful | (rng.random(canaries) < delta)))


def bounds_of(correct, canaries, delta):
    terms = {"canaries": canaries, "guesses": canaries, "delta": delta, "confidence": 0.95}
    bound = {c: one_run_epsilon(correct=c, **terms) for c in set(correct)}
    return np.array([bound[c] for c in correct])


def test_delta_is_paid_for():
    """Randomized response that also blurts out a coin now and then: bounds without delta fail."""
    epsilon, delta = 1.0, 0.06
    rng = np.random.default_rng(3)
    correct = [randomized_response(rng, epsilon, 1000, delta) for _ in range(300)]
    assert np.mean(bounds_of(correct, 1000, 0.0) > epsilon) > 0.2
    assert np.mean(bounds_of(correct, 1000, delta) > epsilon) <= 0.05
