"""Rounds of random allocation in the ledger: over starts, crashes, copies and ancestors.

Row 74 of the hazards.
"""

from dataclasses import replace

import pytest

from tests.accounts import begun, ended, publish
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.ledger import Lineage, RunLog, Settings
from torchtitan_dp.ledger.lineage import Ancestor, resumed
from torchtitan_dp.ledger.runs import Run, total
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.ledger.spending import epsilon, initial_steps, own_steps, spending
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.segments import (
    Mechanism,
    Segment,
    composition,
    steps_in_a_row,
)

T = 4
MECHANISM = Mechanism(2.0, 1 / T, round_steps=T)
SETTINGS = Settings(
    MECHANISM, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove", sampling="allocation"
)


def rounds(segments):
    parts = composition(segments)
    assert all((part.noise_multiplier, part.round_steps) == (2.0, T) for part in parts)
    return sum(part.steps for part in parts)


@pytest.mark.parametrize("steps, count", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)])
def test_a_stop_inside_a_round_counts_the_round(steps, count):
    assert rounds(own_steps(Lineage(SETTINGS, steps=steps))) == count


@pytest.mark.parametrize("first", range(1, 10))
def test_planned_steps_count_no_round_twice(first):
    for last in range(first, 14):
        parts = [
            *steps_in_a_row(MECHANISM, 1, first - 1, ""),
            *steps_in_a_row(MECHANISM, first, last - first + 1, ""),
        ]
        assert rounds(parts) == -(-last // T)


def test_row74_rounds_that_crashes_cut_are_counted_whole(tmp_path):
    lineage = Lineage(SETTINGS, planned_steps=16)
    lineage = begun(lineage, tmp_path, 1, loses=3)  # killed: of the 4 steps of a round
    lineage = begun(replace(lineage, steps=0, step_names=""), tmp_path, 3, loses=3)
    lost = RunLog(str(tmp_path)).enter_lost(replace(lineage, steps=0, step_names=""))
    assert lost.lost == 2 * T
    assert rounds(spending(lost, lost=True, planned=False)) == 2
    assert rounds(spending(lost, lost=True, planned=True)) == 2 + 4


def test_a_lineage_of_several_starts_and_its_published_file(tmp_path):
    lineage = ended(Lineage(SETTINGS, planned_steps=10), tmp_path, 8)
    lineage = ended(lineage, tmp_path, 2)
    assert rounds(own_steps(lineage)) == 3
    spent = publish(lineage, tmp_path, 10)
    expected = compose([Segment(MECHANISM, 12)], delta=1e-5, accountant="pld")
    assert spent["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert (spent["sampling"], spent["round_steps"], spent["steps"]) == ("allocation", T, 10)
    assert spent["dp_event"]["events"][0]["count"] == 3
    assert verify(str(tmp_path)).faults == []


def test_row74_a_start_inside_a_round_is_refused_unless_nothing_is_left():
    now = Lineage(SETTINGS, planned_steps=16)
    for steps in range(17):
        loaded = Lineage(SETTINGS, steps=steps, planned_steps=16)
        if steps % T:
            with pytest.raises(ValueError, match=f"after step {steps}, are inside a round of 4"):
                resumed(now, loaded)
        else:
            assert resumed(now, loaded).steps == steps
    done = Lineage(SETTINGS, steps=10, planned_steps=10)
    assert resumed(replace(now, planned_steps=10), done).steps == 10


@pytest.mark.parametrize("back", [False, True])
def test_row74_a_change_of_sampling_is_refused_on_a_resume(back):
    """Also at the same noise and rate, where no other key differs."""
    poisson = replace(SETTINGS, mechanism=Mechanism(2.0, 1 / T), sampling="poisson")
    now, before = (poisson, SETTINGS) if back else (SETTINGS, poisson)
    with pytest.raises(ValueError, match=r"privacy\.sampling = "):
        resumed(Lineage(now, planned_steps=8), Lineage(before, steps=4, planned_steps=8))


def test_row74_rounds_of_copies_and_of_several_runs_never_share_one():
    """Two starts from one checkpoint took the same steps by number, not the same rounds."""
    common = Lineage(SETTINGS, steps=4)
    names = " ".join(common.names())
    one = replace(common, steps=6, step_names=names, start="one")
    two = replace(common, steps=7, step_names=names, start="two")
    longer = replace(two, steps=8)  # the same start, seen later
    assert rounds(union([*one.taken(), *two.taken()])) == 3
    assert rounds(union([*one.taken(), *two.taken(), *longer.taken()])) == 3
    other = Lineage(SETTINGS, steps=2)
    assert rounds(union([*one.taken(), *other.taken()])) == 2 + 1


def test_several_runs_add_up_and_their_steps_are_those_begun():
    runs = [Run("a", Lineage(SETTINGS, steps=2), "f"), Run("b", Lineage(SETTINGS, steps=5), "f")]
    found = total(runs)
    assert found.steps_executed == 7
    expected = compose([Segment(MECHANISM, 3 * T)], delta=1e-5, accountant="pld")
    assert found.epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("allocated_first", [False, True])
def test_rounds_compose_with_an_ancestor_that_was_poisson_sampled(allocated_first):
    poisson = replace(SETTINGS, mechanism=Mechanism(2.0, 1 / T), sampling="poisson")
    first, then = (SETTINGS, poisson) if allocated_first else (poisson, SETTINGS)
    names = " ".join(Lineage(first, steps=5).names())
    ancestor = Ancestor("before", first, names, planned_steps=5)
    assert Ancestor.from_fields(ancestor.fields()) == ancestor
    lineage = Lineage(then, steps=6, ancestors=(ancestor,))
    parts = [(MECHANISM, 8), (poisson.mechanism, 6 if allocated_first else 5)]
    expected = compose([Segment(*part) for part in parts], delta=1e-5, accountant="pld")
    assert epsilon(lineage) == pytest.approx(expected, rel=1e-9)
    assert sum(segment.steps for segment in initial_steps(lineage)) == (8 if allocated_first else 5)
