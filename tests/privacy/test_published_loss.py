"""The mean of clipped held-out losses, its noise, and the epsilon of what is published."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.published_loss import epsilon, noise_for, noised_mean, releases
from torchtitan_dp.privacy.segments import Mechanism, Segment

HOSTILE = (0.0, 3.999, 4.0, 4.001, 1e9, math.inf, -math.inf, math.nan, -1.0, 1e-300)
KEYS = [i.to_bytes(32, "little") for i in range(2000)]


def test_row66_a_unit_moves_the_mean_by_the_clip_over_n_at_most_whatever_its_loss_is():
    """With one key the noise is the same: differences are those of the means, but for rounding."""
    terms, others = {"noise_multiplier": 2**-6, "clip": 4.0, "key": KEYS[0]}, np.linspace(0, 9, 49)
    found = [noised_mean(np.append(others, x), **terms) for x in HOSTILE]
    assert max(found) - min(found) == pytest.approx(4.0 / 50, abs=2**-6 * 4.0 / 50 * 2**-17)
    assert noised_mean(np.append(others, 0.0), **terms) == min(found)
    at = dict(zip(HOSTILE, found, strict=True))
    assert len({x for loss, x in at.items() if not loss < 4.0}) == 1  # NaN counts as L


def test_row66_2000_losses_have_the_stated_spread_and_each_key_its_own():
    losses, terms = np.linspace(0, 3, 100), {"noise_multiplier": 2.5, "clip": 4.0}
    found = np.array([noised_mean(losses, **terms, key=key) for key in KEYS])
    z = (found - losses.mean()) / (2.5 * 4.0 / 100)
    assert abs(z.mean()) < 4 / math.sqrt(len(z))
    assert z.std() == pytest.approx(1, abs=4 / math.sqrt(2 * len(z)))
    assert stats.kstest(z, ndtr).pvalue > 1e-3
    assert len(set(found[:50])) == 50
    assert noised_mean(losses, **terms, key=KEYS[0]) == found[0]


@pytest.mark.parametrize("target", [0.01, 0.1, 1.0, 8.0, 50.0])
def test_noise_meets_its_target_once(target):
    sigma = noise_for(target_epsilon=target, delta=1e-5)
    assert 0.998 * target <= epsilon(releases(sigma, 1), delta=1e-5) <= target
    assert epsilon(releases(sigma, 2), delta=1e-5) > target


def test_losses_compose_with_other_steps():
    before = [Segment(Mechanism(1.0, 0.01), 500)]
    alone = epsilon(releases(10.0, 5), delta=1e-5)
    both = epsilon(releases(10.0, 5), delta=1e-5, before=before)
    spent = accounting.compose(before, delta=1e-5, accountant="pld")
    assert spent < both <= spent + alone * 1.001
    one = Segment(Mechanism(10.0 / math.sqrt(5), 1.0), 1)
    assert alone == pytest.approx(accounting.compose([one], delta=1e-5, accountant="pld"))
