"""Estimated norms: their worst errors, and their accounting, against simulations and the paper."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.accounts import gaussian_steps, steps_of
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.losses import gaussian_losses, largest_ratio, ratios
from torchtitan_dp.privacy.pld import composed, pld_epsilon
from torchtitan_dp.privacy.segments import composition, merged

DELTA = 1e-5


def epsilon(sigma, q, steps, k=32):
    return accounting.compose([steps_of(sigma, q, steps, k)], delta=DELTA, accountant="pld")


# The envelope of true norm over estimate dominates what any gradient's estimate does.


def survival(values, k):
    """P[Z >= z] of the worst gradient for each z, as `randomized` proves it."""
    bound = np.where(values <= 1, 1.0, stats.chi2.cdf(k / values**2, k))
    return np.where(values > largest_ratio(k), 0.0, bound)


@pytest.mark.parametrize("k", [8, 32, 256])
def test_the_values_dominate_the_envelope(k):
    """Each rounded up: of no value is more above than of the values."""
    found = ratios(k)
    assert found.probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert (found.probabilities > 0).all()
    assert (np.diff(found.values) > 0).all()
    assert found.values[0] == 1
    assert found.values[-1] == pytest.approx(largest_ratio(k))
    z = np.linspace(1e-3, found.values[-1], 5_000)
    tail = np.concatenate([np.cumsum(found.probabilities[::-1])[::-1], [0.0]])
    assert (tail[np.searchsorted(found.values, z, side="left")] >= survival(z, k) - 1e-12).all()


@pytest.mark.parametrize("exact", [0.0, 0.3])
def test_by_simulation_random_spectra_are_dominated(exact):
    k, trials = 8, 200_000
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 6):
        weights = rng.dirichlet(np.full(n, 0.5)) * (1 - exact)
        q = exact + (rng.chisquare(k, (trials, n)) / k) @ weights
        z = np.linspace(1.0, 2.5, 40)
        seen = (1 / np.sqrt(q)[:, None] >= z).mean(0)
        bound = survival(z, k)
        bound[0] = 1.0
        assert (seen <= bound + 4 * np.sqrt(bound / trials)).all()


# An independent simulation, of Z that is not rounded.


def simulated_delta(sigma, q, steps, k, epsilon, present, trials, seed=0):
    """E[(1 - e^(epsilon - loss))+] and its standard error, of outputs drawn with chi-squares; the
    density with the unit is integrated over Z's quantiles."""
    rng = np.random.default_rng(seed)
    u = (np.arange(4_000) + 0.5) / 4_000
    z = np.minimum(np.maximum(1.0, np.sqrt(k / stats.chi2.ppf(u, k))), largest_ratio(k))
    x = np.linspace(-12 * sigma, 12 * sigma + z.max(), 1_500)
    ratio = np.array([np.exp((z * at - z**2 / 2) / sigma**2).mean() for at in x])
    loss = np.log1p(-q + q * ratio) if q < 1 else np.log(ratio)
    total = np.zeros(trials)
    for _ in range(steps):
        output = rng.normal(0, sigma, trials)
        if present:
            drawn = np.sqrt(k / rng.chisquare(k, trials)).clip(1.0, largest_ratio(k))
            output += drawn * (rng.random(trials) < q)
        total += np.interp(output, x, loss)
    if not present:
        total = -total
    gain = np.maximum(-np.expm1(epsilon - total), 0.0)
    return gain.mean(), gain.std() / math.sqrt(trials)


@pytest.mark.thorough_cases("*-8-*", "*-False")
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    "sigma, q, steps, k", [(1.0, 0.05, 40, 32), (2.0, 1.0, 4, 32), (0.8, 0.02, 25, 8)]
)
def test_a_simulation_agrees(sigma, q, steps, k, present):
    """The bound at an epsilon where delta is about 1e-2: no less than what is seen, and near it."""
    from torchtitan_dp.privacy.pld import pld_profile

    at = np.array([pld_epsilon(merged([gaussian_steps(sigma, q, steps, k)]), 1e-2)])
    profile = pld_profile(merged([gaussian_steps(sigma, q, steps, k)]), 1e-2)
    bound = float(profile.at(at)[0])
    seen, error = simulated_delta(sigma, q, steps, k, at[0], present, trials=200_000)
    assert seen <= bound + 4 * error
    if present:  # the worse direction
        assert seen >= bound * 0.97 - 4 * error


def test_one_step_is_the_hockey_stick_of_both_directions():
    """By numerical integration over the output."""
    sigma, q, k = 1.3, 0.2, 32
    found = gaussian_losses(sigma, q, ratios(k), interval=2.0**-8, log_tail=-40)
    z, p = ratios(k).values, ratios(k).probabilities
    x = np.linspace(-15, 18, 100_001)
    absent = stats.norm.pdf(x, scale=sigma)
    present = (1 - q) * absent + q * sum(
        w * stats.norm.pdf(x, loc=at, scale=sigma) for at, w in zip(z, p, strict=True)
    )
    for epsilon_ in (0.0, 0.1, 0.5, 1.0):
        e = math.exp(epsilon_)
        remove = np.trapezoid(np.maximum(present - e * absent, 0), x)
        add = np.trapezoid(np.maximum(absent - e * present, 0), x)
        bound = max(composed([(one, 1)], 2.0**-8, 0.0, 1e-3).at(epsilon_) for one in found)
        assert max(remove, add) <= bound + 1e-10  # of the integration
        assert bound == pytest.approx(max(remove, add), rel=1e-3, abs=1e-9)


# What it costs, and in which order.


@pytest.mark.slow
def test_between_exact_norms_and_the_largest_ratio_always():
    for sigma, q, steps in ((1.0, 0.05, 40), (0.6, 0.01, 200), (3.0, 1.0, 5)):
        exact, mixture = epsilon(sigma, q, steps, 0), epsilon(sigma, q, steps, 32)
        assert 1.02 * exact < mixture < epsilon(sigma / largest_ratio(32), q, steps, 0)
        assert exact < epsilon(sigma, q, steps, 256) < mixture < epsilon(sigma, q, steps, 8)


def test_merged_keeps_them_apart_and_closed_forms_are_of_exact_norms():
    found = composition(
        [steps_of(1.0, 1.0, 3, 32), steps_of(1.0, 1.0, 4), steps_of(1.0, 1.0, 2, 32)]
    )
    assert found == (gaussian_steps(0.5, 1.0, 1), gaussian_steps(1.0, 1.0, 5, 32))
    assert pld_epsilon((gaussian_steps(2.0, 1.0, 4, 32),), DELTA) > 1.05 * epsilon(2.0, 1.0, 4, 0)


@pytest.mark.parametrize("k", [1, 7, 5_000])
def test_numbers_of_projections_that_are_refused(k):
    with pytest.raises(ValueError, match=f"privacy.projections = {k}: choose 8 to 4096"):
        steps_of(1.0, 0.1, 1, k)
