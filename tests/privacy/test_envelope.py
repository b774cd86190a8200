"""The envelope of true norm over estimate dominates what any gradient's estimate does."""

import numpy as np
import pytest
from scipy import stats

from torchtitan_dp.privacy.randomized import largest_ratio, ratios

ALL_K = [8, 32, 256]


def survival(values, k):
    """P[Z >= z] of the worst gradient for each z, as `envelope` proves it."""
    bound = np.where(values <= 1, 1.0, stats.chi2.cdf(k / values**2, k))
    return np.where(values > largest_ratio(k), 0.0, bound)


@pytest.mark.parametrize("k", ALL_K)
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
    discrete = tail[np.searchsorted(found.values, z, side="left")]
    assert (discrete >= survival(z, k) - 1e-12).all()


@pytest.mark.parametrize("k", ALL_K)
def test_little_is_lost_to_rounding(k):
    found = ratios(k)
    u = (np.arange(200_000) + 0.5) / 200_000
    true = np.maximum(1.0, np.sqrt(k / stats.chi2.ppf(u, k))).mean()
    assert true <= found.values @ found.probabilities <= true * 1.005


def two_of(weight, k, x):
    """P[w X_1 + (1 - w) X_2 <= x], by integrating over X_1."""
    u = (np.arange(4_000) + 0.5) / 4_000
    first = stats.chi2.ppf(u, k) / k
    return stats.chi2.cdf(k * np.maximum(x - weight * first, 0) / (1 - weight), k).mean()


@pytest.mark.parametrize("k", [8, 32])
@pytest.mark.parametrize("x", [0.3, 0.6, 0.9, 1.0])
def test_no_pair_of_weights_and_no_equal_ones_are_worse_than_one(k, x):
    single = stats.chi2.cdf(k * x, k)
    for weight in np.linspace(0.02, 0.5, 25):
        assert two_of(weight, k, x) <= single * (1 + 1e-3), weight
    for n in (2, 3, 5, 20, 400):
        assert stats.chi2.cdf(n * k * x, n * k) <= single * (1 + 1e-9), n


def test_beyond_one_a_single_weight_is_not_the_worst():
    """Which is why the envelope is 1 there."""
    assert stats.chi2.cdf(100 * 8 * 1.2, 100 * 8) > stats.chi2.cdf(8 * 1.2, 8)


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


def test_fewer_projections_are_worse():
    z = np.linspace(0.9, 3.0, 200)
    for fewer, more in ((8, 16), (16, 32), (32, 33), (33, 256)):
        assert (survival(z, fewer) >= survival(z, more)).all()
        assert largest_ratio(fewer) > largest_ratio(more)
