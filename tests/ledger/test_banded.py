"""Banded noise in the ledger: what chains, groups, lost steps and several runs spend together."""

from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import account
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.ledger import ExecutedSteps, Ledger, RunSegment, Settings, schema
from torchtitan_dp.ledger.files import read_published
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import (
    BandedGaussian,
    PoissonGaussian,
    Segment,
    composition,
    steps_in_a_row,
    worst,
)

BANDS = 4
MECHANISM = BandedGaussian(1.0, 0.05, bands=BANDS)
SETTINGS = Settings(MECHANISM, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove")


def rounds(segments):
    """How often the most that a unit is drawn, by `composition`: of MECHANISM's noise and rate."""
    parts = composition(segments)
    assert all((p.noise_multiplier, p.sample_rate) == (1.0, 4 * 0.05) for p in parts)
    return sum(part.steps for part in parts)


def by_dp_accounting(rounds):
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, rounds))
    return accountant.get_epsilon(1e-5)


def begun(folder, ledger, steps):
    """The log of a folder in which a start begins these steps."""
    executed = ExecutedSteps(str(folder))
    ledger.start = executed.new_start()
    executed.begin_start(3)
    for step in steps:
        executed.begin(step, ledger.settings)
    return executed


@pytest.mark.parametrize("steps, count", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)])
def test_steps_in_a_row_are_rounds(steps, count):
    assert rounds([Segment(MECHANISM, steps)]) == count
    assert rounds(steps_in_a_row(MECHANISM, 1, steps, "run")) == count
    assert rounds(Ledger(SETTINGS, steps=steps).own()) == count


def test_epsilon_is_that_of_the_rounds():
    assert Ledger(SETTINGS, steps=14).epsilon() == pytest.approx(by_dp_accounting(4), rel=2e-3)
    sigma = accounting.noise_for(MECHANISM, 14, target_epsilon=3.0, delta=1e-5, accountant="pld")
    found = replace(SETTINGS, mechanism=MECHANISM.with_noise(sigma)).epsilon(14)
    assert 2.97 <= found <= 3.0


@pytest.mark.parametrize("first", range(1, 9))
@pytest.mark.parametrize("stop", range(9, 14))
def test_steps_on_both_sides_of_a_stop_are_rounds_of_all(first, stop):
    """No resume costs anything: groups go on by the number of the step."""
    parts = [
        *steps_in_a_row(MECHANISM, first, stop - first, "run"),
        *steps_in_a_row(MECHANISM, stop, 17 - stop, "run"),
    ]
    most = max(sum(n % BANDS == g for n in range(first, 17)) for g in range(BANDS))
    assert rounds(parts) == most


def test_steps_of_two_runs_add_up_whatever_their_groups():
    """In another run a unit may be of another group."""
    parts = [*steps_in_a_row(MECHANISM, 1, 2, "a"), *steps_in_a_row(MECHANISM, 3, 2, "b")]
    assert rounds(parts) == 2
    assert rounds([replace(part, run="a") for part in parts]) == 1


def test_row58_two_copies_of_a_run_count_a_group_in_both():
    """A folder copied at step 1, and trained on in both places: units of a group meet twice."""
    first = Ledger(SETTINGS, steps=1, run="one", start="s")
    copies = []
    for start in ("a", "b"):
        copy = Ledger(SETTINGS, run="one", start=start)
        copy.resume_from(first, new_segment=False)
        copy.steps = 2
        copies.append(copy)
    together = union(step for copy in copies for step in copy.taken())
    assert rounds(union(copies[0].taken())) == 1
    assert rounds(together) == 2


def test_a_step_of_an_unknown_number_counts_for_everybody():
    unknown = MECHANISM.at_unknown()
    assert rounds([Segment(unknown, 3), *steps_in_a_row(MECHANISM, 1, 4, "run")]) == 4


def test_lost_steps_are_whole_rounds(tmp_path):
    """A start that loses steps 3 to 6, and one that loses 5: four groups, two of them twice."""
    ledger = Ledger(SETTINGS, steps=2)
    begun(tmp_path, ledger, range(1, 7))
    second = Ledger(SETTINGS, steps=2)
    executed = begun(tmp_path, second, range(3, 6))
    third = Ledger(SETTINGS)
    third.resume_from(Ledger(SETTINGS, steps=2, start=ledger.start), new_segment=False)
    third.start = executed.new_start()
    executed.enter_lost(third)
    assert third.lost_exactly == 7
    assert third.lost.steps % BANDS == 0
    assert rounds([third.published_lost()]) >= 2
    assert rounds(third.executed()) >= 3
    most = max(
        sum(step.mechanism.group == g for step in executed.begun(SETTINGS)) for g in range(4)
    )
    assert rounds(third.executed()) >= most


def test_steps_of_unknown_starts_count_one_by_one(tmp_path):
    """Steps that were adopted from checkpoints without their log, and lost since."""
    elsewhere = Ledger(SETTINGS, steps=3)
    executed = ExecutedSteps(str(tmp_path))
    executed.adopt(elsewhere.taken())
    here = Ledger(SETTINGS)
    executed.enter_lost(here)
    assert rounds([here.published_lost()]) == 3


def test_torn_lines_count_one_by_one(tmp_path):
    ledger = Ledger(SETTINGS, steps=2)
    begun(tmp_path, ledger, [1, 2])
    with open(tmp_path / "steps_executed.log", "ab") as file:
        file.write(b"3 1.0 0.05 abc torn\n4 1.0 0.05 torn\n")
    steps = ExecutedSteps(str(tmp_path)).begun(SETTINGS)
    assert rounds(union(steps)) >= 3


def test_its_run_is_logged_published_verified_and_read(tmp_path):
    ledger = Ledger(SETTINGS, steps=5, planned_steps=9)
    executed = begun(tmp_path, ledger, range(1, 6))
    executed.end_start()
    assert set(ledger.taken()) == set(executed.begun(SETTINGS))
    published = account(ledger, executed, 9).publish(str(tmp_path))
    schema.check(published)
    assert published["bands"] == BANDS
    assert published["epsilon"] == pytest.approx(by_dp_accounting(2), rel=2e-3)
    assert published["epsilon_planned"] == pytest.approx(by_dp_accounting(3), rel=2e-3)
    (event,) = published["dp_event"]["events"]
    assert event["event"]["sampling_probability"] == pytest.approx(0.2)
    assert verify(str(tmp_path)).faults == []
    assert read_published(str(tmp_path)).segments() == ledger.segments()
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_terms_that_come_back_are_not_in_a_row(tmp_path):
    """Steps 1 and 5 are of one group, with other terms between them: two rounds, not one."""
    quieter = replace(SETTINGS, mechanism=MECHANISM.with_noise(30.0))
    finished = [RunSegment(SETTINGS, 1), RunSegment(quieter, 3)]
    ledger = Ledger(SETTINGS, steps=5, planned_steps=5, finished=finished)
    executed = ExecutedSteps(str(tmp_path))
    executed.adopt(ledger.taken())
    found = account(ledger, executed, 5).epsilon()
    assert found >= ledger.epsilon() * (1 - 1e-9)
    assert found > by_dp_accounting(2) * 0.998


def test_other_bands_or_independent_noise_are_no_segment_of_the_same_run():
    before = Ledger(SETTINGS, steps=3)
    for mechanism in (replace(MECHANISM, bands=2), PoissonGaussian(1.0, 0.05)):
        now = Ledger(replace(SETTINGS, mechanism=mechanism))
        with pytest.raises(ValueError, match=r"privacy\.bands = .* started with 4"):
            now.resume_from(before, new_segment=True)


def test_the_worst_of_its_steps_is_of_any_step():
    one, other = MECHANISM.at(2), MECHANISM.with_noise(0.5).at(3)
    assert worst([one, other]) == MECHANISM.with_noise(0.5).as_logged()
    with pytest.raises(AssertionError, match="none dominates"):
        worst([MECHANISM, PoissonGaussian(1.0, 0.05)])


def test_a_rate_above_one_is_refused_with_the_largest_bands():
    with pytest.raises(ValueError, match=r"privacy\.bands = 8: .* use at most 4"):
        BandedGaussian(1.0, 0.23, bands=8)
