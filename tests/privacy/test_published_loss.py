"""The mean of clipped held-out losses, its noise, and what evaluations spend."""

import doctest
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from tests.accounts import noise_multiplier
from torchtitan_dp.privacy import accounting, published_loss
from torchtitan_dp.privacy.published_loss import LossNoise, noise_of
from torchtitan_dp.privacy.segments import Mechanism, Segment

HOSTILE = (0.0, 3.999, 4.0, 4.001, 1e9, math.inf, -math.inf, math.nan, -1.0, 1e-300)
KEYS = [i.to_bytes(32, "little") for i in range(2000)]


def test_examples_in_docstrings():
    assert doctest.testmod(published_loss).failed == 0


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_row66_a_unit_moves_the_mean_by_the_clip_over_n_at_most_whatever_its_loss_is(kind):
    """With one key the noise is the same, so that a difference is that of the means, but for the
    rounding of both to the grid."""
    noise, clip, others = LossNoise(kind, 2**-6), 4.0, np.linspace(0, 9, 49)
    found = [noise.noised_mean(np.append(others, x), clip=clip, key=KEYS[0]) for x in HOSTILE]
    grid = noise.scale * clip / 50 * 2**-17
    assert max(found) - min(found) == pytest.approx(clip / 50, abs=grid)
    assert noise.noised_mean(np.append(others, 0.0), clip=clip, key=KEYS[0]) == min(found)
    at = dict(zip(HOSTILE, found, strict=True))
    assert len({x for loss, x in at.items() if not loss < 4.0}) == 1  # NaN counts as L


@pytest.mark.parametrize("kind, cdf", [("laplace", stats.laplace.cdf), ("gaussian", ndtr)])
def test_row66_2000_evaluations_have_the_stated_spread(kind, cdf):
    noise, losses = LossNoise(kind, 2.5), np.linspace(0, 3, 100)
    scale = noise.scale * 4.0 / 100
    z = np.array([noise.noised_mean(losses, clip=4.0, key=key) for key in KEYS]) - losses.mean()
    deviation = noise.standard_deviation(clip=4.0, units=100)
    kurtosis = {"laplace": 6, "gaussian": 3}[kind]
    assert abs(z.mean()) < 4 * deviation / math.sqrt(len(z))
    error = deviation * math.sqrt((kurtosis - 1) / 4 / len(z))
    assert z.std() == pytest.approx(deviation, abs=4 * error)
    assert stats.kstest(z / scale, cdf).pvalue > 1e-3


def test_row66_noise_of_two_keys_differs_and_of_one_key_is_the_same():
    noise, losses = LossNoise("gaussian", 1.0), np.ones(10)
    found = [noise.noised_mean(losses, clip=4.0, key=key) for key in (*KEYS[:50], KEYS[0])]
    assert len(set(found[:50])) == 50
    assert found[50] == found[0]


@pytest.mark.parametrize("target", [0.01, 0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("evaluations", [1, 2, 6, 9, 40, 1000])
def test_noise_meets_its_target_and_is_the_smaller_of_the_two(target, evaluations):
    noise = noise_of(target_epsilon=target, delta=1e-5, evaluations=evaluations)
    spent = noise.epsilon(evaluations, delta=1e-5)
    assert 0.98 * target <= spent <= target
    assert noise.epsilon(evaluations + 1, delta=1e-5) > spent
    deviation = noise.standard_deviation(clip=1, units=1)
    assert deviation <= math.sqrt(2) * evaluations / target * (1 + 1e-9)
    z = noise_multiplier(
        target_epsilon=target, delta=1e-5, sample_rate=1.0, steps=evaluations, accountant="pld"
    )
    assert deviation <= z * (1 + 1e-9)


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 7.0, 100.0])
def test_the_gaussian_that_stands_for_laplace_dominates_it(scale):
    """Its trade-off function lies below that of the Laplace mechanism, everywhere."""
    mechanism = LossNoise("laplace", scale).segment(1).mechanism
    alpha = np.linspace(0, 1, 10_001)[1:-1]
    gaussian = ndtr(-ndtri(alpha) - 1 / mechanism.noise_multiplier)
    at = stats.laplace.isf(alpha, scale=scale)  # reject above it
    laplace = stats.laplace.cdf(at - 1, scale=scale)
    assert (gaussian <= laplace + 1e-9).all()
    kink = 1 / (1 + math.exp(1 / scale))  # of the worst 1/scale-DP mechanism
    assert ndtr(-ndtri(kink) - 1 / mechanism.noise_multiplier) == pytest.approx(kink, rel=1e-6)


def test_evaluations_compose_with_other_steps():
    before = [Segment(Mechanism(1.0, 0.01), 500)]
    spent = accounting.compose(before, delta=1e-5, accountant="pld")
    laplace, gaussian = LossNoise("laplace", 10.0), LossNoise("gaussian", 10.0)
    for noise in (laplace, gaussian):
        both = noise.epsilon(5, delta=1e-5, before=before)
        assert spent < both <= spent + noise.epsilon(5, delta=1e-5) * 1.001
    exact = accounting.compose([Segment(Mechanism(10.0, 1.0), 5)], delta=1e-5, accountant="pld")
    assert gaussian.epsilon(5, delta=1e-5) == exact
