"""What ranks measured is merged so that a fault on any of them is a fault."""

import json
import math

import pytest

from torchtitan_dp.selfcheck.__main__ import Check, Outcome, for_programs, merged

CHECK = Check("noise", "do not train", lambda: {})


def measured(*values, bound=1.0):
    return {what: (value, bound) for what, value in zip("ab", values, strict=False)}


@pytest.mark.parametrize("bad", [2.0, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_rank_is_enough(bad, place):
    ranks = [measured(1.0, 0.1) for _ in range(3)]  # the bound itself passes
    assert all(outcome.passed for outcome in merged(CHECK, ranks))
    ranks[place] = measured(bad, 0.1)
    a, b = merged(CHECK, ranks)
    assert (a.name, a.passed, b.passed) == ("noise: a", False, True)
    assert a.value == bad or math.isnan(bad)
    told = f"FAILED: noise: a: {bad:g} (the limit is 1); do not train"
    assert a.failure() == told


def test_ranks_that_measure_other_things_are_a_bug():
    with pytest.raises(AssertionError):
        merged(CHECK, [measured(0.5, 0.1), measured(0.5)])


def test_an_error_on_one_rank_is_the_outcome():
    (outcome,) = merged(CHECK, [measured(0.5, 0.1), "RuntimeError: no kernel"])
    assert not outcome.passed
    assert outcome.failure() == "FAILED: noise: rank 1: RuntimeError: no kernel; do not train"
    assert "FAILED" in outcome.row()
    assert "no kernel" in outcome.row()


def test_json_is_json():
    outcomes = [Outcome("a", math.nan, 1.0, ""), Outcome("b", 0.5, 1.0, "")]
    said = for_programs("CPU", {"torch": "2"}, outcomes)
    assert json.loads(json.dumps(said, allow_nan=False)) == {
        "device": "CPU",
        "facts": {"torch": "2"},
        "passed": False,
        "checks": [
            {"name": "a", "passed": False, "value": None, "bound": 1.0},
            {"name": "b", "passed": True, "value": 0.5, "bound": 1.0},
        ],
    }
