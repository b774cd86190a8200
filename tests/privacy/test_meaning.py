"""What epsilon means, against trade-offs computed without the package (row 37)."""

import functools
import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

from tests.accounts import gaussian_steps, steps_of
from tests.privacy.tradeoffs import Roc, composed, gaussian_step
from torchtitan_dp.privacy import meaning as module
from torchtitan_dp.privacy import pld
from torchtitan_dp.privacy.accounting import compose, percent
from torchtitan_dp.privacy.meaning import FALSE_ALARMS, Meaning, meaning
from torchtitan_dp.privacy.rdp import rdp_delta, rdp_epsilon

DELTA = 1e-5
# (sigma, q, steps) of each segment; delta; half-width and points of the independent grid.
RUNS = {
    "debug": ([(0.458, 0.0141, 40)], DELTA, 60, 2**21),
    "long": ([(1.0, 0.001, 10_000)], DELTA, 8, 2**22),
    "half": ([(2.0, 0.5, 20)], 1e-4, 40, 2**21),
    "two": ([(0.8, 0.05, 50), (2.0, 0.2, 30)], 1e-6, 40, 2**21),
}
ONE_STEP = [(0.5, 0.01, 1e-5), (1.0, 0.3, 1e-5), (2.0, 0.9, 1e-4), (0.7, 0.001, 1e-6)]


@functools.cache
def truth(name: str) -> Roc:
    parts, _, half_width, points = RUNS[name]
    return composed(parts, half_width, points)


def claim(name: str) -> Meaning:
    return meaning([steps_of(*part) for part in RUNS[name][0]], RUNS[name][1])


def check(claimed: Meaning, roc: Roc, delta: float, slack: float = 1e-7) -> None:
    """Never below the truth, known to a share of `slack`, in either direction, and close to it."""
    directions = (roc, roc.reversed())
    for alarms, at_most in claimed.detected:
        best = max(float(one.detected(alarms)) for one in directions)
        assert best * (1 - slack) <= at_most <= best * 1.0005

    odds = max(math.log(delta / one.false_alarms(delta)) for one in directions)
    told = math.log(claimed.posterior / (1 - claimed.posterior))
    assert odds * (1 - slack) <= told <= odds * 1.001
    assert claimed.posterior_but_for == delta


@pytest.mark.parametrize("sigma, q, delta", ONE_STEP)
def test_one_step_against_neyman_and_pearson_in_closed_form(sigma, q, delta):
    check(meaning([steps_of(sigma, q, 1)], delta), gaussian_step(sigma, q), delta)


@pytest.mark.thorough_cases("half", "long")
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_hazard_37_compositions_against_an_independent_fourier_transform(name):
    # The independent grid of interval d adds up to d^2 / 4 a step to the loss's variance.
    check(claim(name), truth(name), RUNS[name][1], slack=2e-5)


def test_the_independent_transform_is_the_closed_form_for_one_step_and_for_gaussians():
    alarms = np.geomspace(1e-6, 0.9, 50)
    exact = gaussian_step(1.0, 0.3).detected(alarms)
    assert composed([(1.0, 0.3, 1)], 30, 2**20).detected(alarms) == pytest.approx(exact, rel=1e-5)
    gaussians = composed([(4.0, 1.0, 9), (3.0, 1.0, 1)], 30, 2**20)
    exact = norm.cdf(norm.ppf(alarms) + math.sqrt(9 / 16 + 1 / 9))
    assert gaussians.detected(alarms) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("sigma, steps, delta", [(2.0, 4, 1e-5), (50.0, 10, 1e-9), (0.3, 7, 1e-3)])
def test_without_sampling_the_gaussians_own_trade_off(sigma, steps, delta):
    mu = math.sqrt(steps) / sigma
    claimed = meaning([steps_of(sigma, 1.0, steps)], delta)
    for alarms, at_most in claimed.detected:
        exact = norm.cdf(norm.ppf(alarms) + mu)
        assert exact <= at_most <= exact * (1 + 1e-6)
    odds = delta / norm.cdf(norm.ppf(delta) - mu)
    assert odds / (1 + odds) <= claimed.posterior <= odds / (1 + odds) + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_profile_contains_epsilon_and_is_never_below_the_truth(name):
    parts, delta, *_ = RUNS[name]
    segments = tuple(gaussian_steps(*part) for part in parts)
    epsilon = compose([steps_of(*part) for part in parts], delta=delta, accountant="pld")
    profile = pld.pld_profile(segments, delta)
    assert float(profile.at(np.array([epsilon]))[0]) == pytest.approx(delta, rel=2e-3)
    epsilons = np.linspace(0, 1.1 * epsilon, 8)
    told = profile.at(epsilons)
    assert (np.diff(told) <= 0).all()
    directions = (truth(name), truth(name).reversed())
    for epsilon, at_most in zip(epsilons, told, strict=True):
        exact = max(
            float(np.max(one.detections - math.exp(epsilon) * one.alarms)) for one in directions
        )
        assert exact * (1 - 1e-4) - 1e-12 <= at_most <= exact * 1.01 + 1e-9


def test_the_profile_is_the_librarys_in_both_directions():
    segments = (gaussian_steps(1.0, 0.3, 3), gaussian_steps(2.0, 0.2, 5))
    profile = pld.pld_profile(segments, DELTA)
    parts = [
        privacy_loss_distribution.from_gaussian_mechanism(
            part.noise_multiplier,
            sampling_prob=part.sample_rate,
            value_discretization_interval=2.0**-10,
        ).self_compose(part.steps)
        for part in segments
    ]
    library = parts[0].compose(parts[1])
    at = np.array([0.0, 0.01, 0.77, 2.5, 5.0])
    expected = library.get_delta_for_epsilon(list(at))
    np.testing.assert_allclose(profile.at(at), expected, rtol=2e-3, atol=1e-9)
    assert (profile.at(at) >= expected * (1 - 2e-3)).all()


def test_rdps_delta_is_its_epsilon_turned_round():
    segments = (gaussian_steps(1.0, 0.01, 1_000),)
    for delta in (1e-3, 1e-6, 1e-12):
        epsilon = np.array([rdp_epsilon(segments, delta)])
        assert float(rdp_delta(segments, epsilon)[0]) == pytest.approx(delta, rel=1e-6)


def test_nothing_spent_no_noise_and_no_bound():
    nothing = Meaning(((0.01, 0.01), (0.001, 0.001)), 0.5, 0.0)
    assert meaning([], DELTA) == nothing
    assert meaning([steps_of(1.0, 0.1, 0), steps_of(math.inf, 0.1, 5)], DELTA) == nothing
    none = meaning([steps_of(1.0, 0.1, 9), steps_of(0.0, 0.1, 1)], DELTA)
    assert [share for _, share in none.detected] == [1.0, 1.0]
    assert none.posterior == 1.0
    json.dumps(none.to_json(), allow_nan=False)
    assert len(none.sentences("record", math.inf, DELTA)) == 1
    with pytest.raises(ValueError, match=r"privacy\.delta"):
        meaning([steps_of(1.0, 0.1, 1)], 1.0)


@pytest.mark.thorough_cases("*-1000000-*", "10000.0-*-1e-*")
@pytest.mark.parametrize(
    "sigma, q, steps, delta",
    [
        (0.3, 0.9, 100, 1e-12),
        (0.3, 1e-7, 1, 1e-3),
        (1e4, 1e-7, 1, 1e-12),
        (1e4, 0.5, 10_000, 1e-12),
        (1.0, 1e-4, 1_000_000, 1e-12),  # float64's noise in PLD is above delta
        (0.02, 0.5, 10, 1e-5),  # PLD has no number
        (1e-4, 0.5, 10, 1e-5),
    ],
)
def test_extremes_have_numbers(sigma, q, steps, delta):
    claimed = meaning([steps_of(sigma, q, steps)], delta)
    assert all(alarms <= share <= 1 for alarms, share in claimed.detected)
    assert 0.5 <= claimed.posterior <= 1
    json.dumps(claimed.to_json(), allow_nan=False)


@pytest.mark.parametrize("wrong", [None, "nan", "error"])
def test_where_pld_fails_rdp_stands_in_and_no_number_gets_smaller(monkeypatch, wrong):
    right = claim("half")
    module._meaning.cache_clear()
    pld.pld_profile.cache_clear()
    if wrong is None:
        monkeypatch.setattr(module, "pld_profile", lambda *_: None)
    elif wrong == "nan":
        broken = pld.Profile(0.1, np.array([0.1, math.nan]))
        monkeypatch.setattr(pld, "composed", lambda *_: broken)
    else:
        monkeypatch.setattr(pld, "composed", lambda *_: math.log(0.0))
    fallen = claim("half")
    assert right.posterior < fallen.posterior < 1
    assert all(a[1] < b[1] < 1 for a, b in zip(right.detected, fallen.detected, strict=True))
    module._meaning.cache_clear()
    pld.pld_profile.cache_clear()


# --- for people -----------------------------------------------------------------------------------


def test_sentences_round_up():
    bounds = Meaning(((0.01, 0.12301), (0.001, 0.5)), 0.999811, 3e-7)
    lines = bounds.sentences("patient", 7.9955, 1e-5)
    text = " ".join(lines)
    for part in ("12.4%", "50%", "99.99%", "1 in 100,000", "2970", "patient"):
        assert part in text, part
    assert "record" not in text
    assert "1 in 3,333,333" in bounds.sentences("patient", 7.9955, 1e-8)[-1]  # the larger one
    assert FALSE_ALARMS == (0.01, 0.001)
    # The usual attack first, beside what it is without the model; the worst case last.
    assert "without the model, 1%" in lines[0]
    assert lines[-1].startswith("Worst case")


@pytest.mark.parametrize(
    "epsilon, word, advises",
    [(0.5, "strong", False), (1, "strong", False), (1.001, "reasonable", True), (11, "weak", True)],
)
def test_the_verdict_follows_the_scale(epsilon, word, advises):
    *_, verdict, worst = Meaning(((0.01, 0.1), (0.001, 0.1)), 0.9, 0.0).sentences("r", epsilon, 0.1)
    assert f"Verdict: a {word} guarantee" in verdict
    assert ("choose epsilon up to 1" in worst) == advises


@pytest.mark.parametrize(
    "share", [1e-9, 0.01, 0.123401, 0.9, 0.95, 0.99, 0.9990001, 1 - 1e-12, 1.0]
)
def test_percent_never_rounds_down_nor_to_certainty(share):
    shown = float(percent(share).rstrip("%")) / 100
    assert shown >= share * (1 - 1e-15)
    assert (shown == 1.0) == (share == 1.0)
    assert shown - share <= max(0.01 * share, 1e-3) + 1e-15
    if share < 1:
        assert 1 - shown >= 0.5 * (1 - share) - 1e-15 or share < 0.9
