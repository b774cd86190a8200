"""Bands in the plan: what `auto` chooses, and what is refused."""

import re

import pytest

from tests import build
from torchtitan_dp.checkpoint.plan import (
    best_of,
    choose_noise,
    noise_by_bands,
    settings_of,
    shares_of_steps,
)
from torchtitan_dp.privacy.coefficients import cut_off, found_for, noise_in_weights

EIGHT = ("--privacy.target_epsilon=8", "--privacy.noise_multiplier=None", "--privacy.delta=1e-5")


def config(batch: int, steps: int, *more: str):
    return build.config(
        *EIGHT, f"--training.global_batch_size={batch}", f"--training.steps={steps}", *more
    )


def test_noise_by_bands_is_that_of_the_published_computation():
    """2,634 units, 32 x 16: the table that the method was chosen by, in the sum of all updates by
    cut-off coefficients. Those that are found leave less in the weights."""
    planned = config(32, 16)
    rows, shares_of = noise_by_bands(planned, 2_634, []), shares_of_steps(planned)
    assert list(rows) == [1, 2, 4, 8, 16]
    sigmas = [sigma for sigma, *_ in rows.values()]
    assert sigmas == pytest.approx([0.42, 0.44, 0.47, 0.49, 0.48], abs=0.0075)
    sums = {b: sigma * noise_in_weights(cut_off(b), [1] * 16) for b, (sigma, *_) in rows.items()}
    shares = [in_sum / sums[1] for in_sum in sums.values()]
    assert shares == pytest.approx([1, 0.81, 0.69, 0.63, 0.57], abs=0.0075)
    for bands, (sigma, in_weights) in rows.items():
        column = found_for(shares_of, bands)
        assert in_weights == pytest.approx(sigma * noise_in_weights(column, shares_of))
        assert in_weights <= sigma * noise_in_weights(cut_off(bands), shares_of)
    assert best_of(rows) == 16
    rows = noise_by_bands(config(300, 6), 1_000, [])
    assert max(rows) == 3  # 4 would draw with a probability above 1


def test_a_resume_keeps_the_bands_and_the_noise():
    auto = config(32, 16, "--privacy.noise=banded")
    sigma, column = choose_noise(auto, 2_634, [], None)
    assert len(column) == 16
    assert column == found_for(shares_of_steps(auto), 16)
    before = settings_of(auto, 2_634, sigma, cut_off(8))
    longer = config(32, 64, "--privacy.noise=banded", "--optimizer.lr=1e-2")
    for resumed in (auto, longer):  # another schedule finds another column, and reads this one
        assert choose_noise(resumed, 2_634, [], before) == (sigma, cut_off(8))


@pytest.mark.parametrize(
    "options, line",
    [
        (("--privacy.bands=0",), "privacy.bands = 0: must be 1 or more"),
        (
            ("--privacy.gradient_method=randomized", "--privacy.underestimates=accounted"),
            "privacy.noise = 'banded': with privacy.underestimates = 'accounted'",
        ),
    ],
)
def test_what_is_refused(options, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        build.config(*EIGHT, "--privacy.noise=banded", *options)


def test_the_plan_has_bands(plan_tiny):
    batch = ("--training.global_batch_size=4", "--privacy.delta=1e-3")
    shown, content = plan_tiny(1, "--privacy.noise=banded", *batch)
    assert "correlated noise, 4 bands: a step draws from one of 4 groups of" in shown
    assert int(re.search(r"a crash counts (\d+) more steps", shown)[1]) % 4 == 0  # whole periods
    assert "; a rank keeps the noise of 3 earlier steps, 0.0" in shown
    assert len(content["column"]) == 4
