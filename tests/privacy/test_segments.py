"""Segments: their composition, and their epsilon computed ahead."""

import math

import pytest

from tests.accounts import epsilon, mechanism, noise_multiplier, steps_of
from torchtitan_dp.privacy import accounting as module
from torchtitan_dp.privacy.accounting import EpsilonCurve, compose

DELTA = 1e-5
FIRST, SECOND = steps_of(1.0, 0.01, 600), steps_of(1.4, 0.02, 300)
every = pytest.mark.parametrize("accountant", ["rdp", "pld"])


# --- planned --------------------------------------------------------------------------------------


@every
def test_halves_are_the_whole_and_composition_is_less_than_the_sum_and_grows(accountant):
    query, half = {"delta": DELTA, "accountant": accountant}, steps_of(1.0, 0.01, 300)
    one, two = (compose([segment], **query) for segment in (FIRST, SECOND))
    assert one == epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=600, **query)
    assert one == compose([half, half], **query)
    both = compose([FIRST, SECOND], **query)
    assert max(one, two) < both < one + two  # far from the ends: subadditive up to delta
    assert compose([SECOND, FIRST], **query) == both
    assert compose([FIRST, steps_of(1.4, 0.02, 330)], **query) > both


@every
def test_edges(accountant):
    query = {"delta": DELTA, "accountant": accountant}
    nothing = [steps_of(1.0, 0.0, 5), steps_of(0.0, 0.5, 0), steps_of(math.inf, 1.0, 3)]
    nothing += [steps_of(1.0, 0.5, 0)]
    assert compose([], **query) == compose(nothing, **query) == 0.0
    assert compose([FIRST, *nothing], **query) == compose([FIRST], **query)
    assert compose([FIRST, steps_of(0.0, 1.0, 1)], **query) == math.inf
    assert compose([FIRST, steps_of(0.0, 0.1, 1)], **query) == math.inf
    assert 0.0 <= compose([steps_of(1.0, 1e-7, 1_000)], **query) < 1.0


@every
def test_the_noise_to_come_makes_the_total_meet_the_target(accountant):
    query, target = {"delta": DELTA, "accountant": accountant}, 2.0
    sigma = noise_multiplier(
        target_epsilon=target, sample_rate=0.02, steps=500, before=[FIRST], **query
    )
    assert 0.99 * target <= compose([FIRST, steps_of(sigma, 0.02, 500)], **query) <= target


def test_noise_cannot_undo_what_was_spent_before():
    query = {"target_epsilon": 1.0, "delta": DELTA, "accountant": "rdp", "before": [FIRST]}
    with pytest.raises(ValueError, match=r"target_epsilon = 1\.0: 1\.\d+ was spent before"):
        noise_multiplier(sample_rate=0.02, steps=500, **query)


# --- ahead ----------------------------------------------------------------------------------------


@every
def test_the_curve_is_an_upper_bound_and_exact_at_its_points(accountant, monkeypatch):
    monkeypatch.setitem(module._POINTS, accountant, 4)
    query = {"delta": DELTA, "accountant": accountant}
    curve = EpsilonCurve((SECOND,), mechanism(1.0, 0.01), **query, total_steps=95)
    assert curve._steps == [0, 24, 48, 72, 95]
    assert curve._epsilons == sorted(curve._epsilons)

    def exact(steps: int) -> float:
        return compose([SECOND, steps_of(1.0, 0.01, steps)], **query)

    for steps, at_point in zip(curve._steps, curve._epsilons, strict=True):
        assert curve.at(steps) == at_point == pytest.approx(exact(steps), rel=1e-4)
    assert curve.at(95) == exact(95)
    for steps in (1, 25, 94):
        assert curve.at(steps) >= exact(steps)
    assert curve.at(60) == curve.at(72) > curve.at(48)


def test_a_query_computes_nothing_up_to_the_last_step_and_beyond_it_once(monkeypatch):
    computed = []

    def spy(segments, **settings):
        computed.append(segments[-1].steps)
        return compose(segments, **settings)

    monkeypatch.setattr(module, "compose", spy)
    curve = EpsilonCurve((), mechanism(1.0, 0.01), delta=DELTA, accountant="rdp", total_steps=7)
    assert sorted(computed) == [0, 1, 2, 3, 4, 5, 6, 7]  # no more points than steps
    del computed[:]
    assert curve.at(0) == 0.0
    last = [curve.at(steps) for steps in range(1, 8)][-1]
    assert computed == []
    assert curve.at(9) == curve.at(9) > last
    assert curve.at(8) == curve.at(9)  # still an upper bound
    assert computed == [9]


def test_unlike_segments_compose_as_one_where_they_nearly_are():
    """The composition of two distributions against the power of one."""
    query = {"delta": DELTA, "accountant": "pld"}
    whole = compose([steps_of(1.0, 0.01, 1_000)], **query)
    almost = [steps_of(1.0, 0.01, 500), steps_of(1.0 + 1e-9, 0.01, 499), steps_of(1.0, 0.01, 1)]
    assert compose(almost, **query) == pytest.approx(whole, rel=1e-3)
