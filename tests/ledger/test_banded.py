"""Banded noise in the ledger: what chains, groups, lost steps and several runs spend together."""

import json
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import begun, ended, publish
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.ledger import Lineage, RunLog, Settings, schema
from torchtitan_dp.ledger.files import read_published
from torchtitan_dp.ledger.lineage import resumed
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.ledger.spending import epsilon, own_steps, spending
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.segments import (
    Mechanism,
    Segment,
    composition,
    from_fields,
    steps_in_a_row,
)

BANDS = 4
MECHANISM = Mechanism(1.0, 0.05, column=cut_off(BANDS))
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


@pytest.mark.parametrize("steps, count", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)])
def test_steps_in_a_row_are_rounds(steps, count):
    assert rounds([Segment(MECHANISM, steps)]) == count
    assert rounds(steps_in_a_row(MECHANISM, 1, steps, "run")) == count
    assert rounds(own_steps(Lineage(SETTINGS, steps=steps))) == count


def test_epsilon_is_that_of_the_rounds():
    assert epsilon(Lineage(SETTINGS, steps=14)) == pytest.approx(by_dp_accounting(4), rel=2e-3)
    sigma = accounting.noise_for(MECHANISM, 14, target_epsilon=3.0, delta=1e-5, accountant="pld")
    found = replace(SETTINGS, mechanism=MECHANISM.with_noise(sigma)).epsilon(14)
    assert 2.97 <= found <= 3.0


@pytest.mark.parametrize("first", range(1, 9))
def test_steps_on_both_sides_of_a_stop_are_rounds_of_all(first):
    """No resume costs anything: groups go on by the number of the step."""
    most = max(sum(n % BANDS == g for n in range(first, 17)) for g in range(BANDS))
    for stop in range(9, 14):
        parts = [
            *steps_in_a_row(MECHANISM, first, stop - first, "run"),
            *steps_in_a_row(MECHANISM, stop, 17 - stop, "run"),
        ]
        assert rounds(parts) == most


def test_steps_of_two_runs_add_up_whatever_their_groups():
    """In another run a unit may be of another group."""
    parts = [*steps_in_a_row(MECHANISM, 1, 2, "a"), *steps_in_a_row(MECHANISM, 3, 2, "b")]
    assert rounds(parts) == 2
    assert rounds([replace(part, run="a") for part in parts]) == 1


def test_row58_two_copies_of_a_run_count_a_group_in_both():
    """A folder copied at step 1, and trained on in both places: units of a group meet twice."""
    first = Lineage(SETTINGS, steps=1, run="one", start="s")
    copies = [
        replace(resumed(Lineage(SETTINGS, run="one", start=start), first), steps=2)
        for start in ("a", "b")
    ]
    assert rounds(union(copies[0].taken())) == 1
    assert rounds(union(step for copy in copies for step in copy.taken())) == 2


@pytest.mark.parametrize("loses, whole", [(1, 4), (4, 4), (6, 8)])
def test_each_crash_loses_whole_rounds(tmp_path, loses, whole):
    """Or steps of one group that several crashes lost would count as steps in a row."""
    for crashes in (1, 2):
        begun(Lineage(SETTINGS), tmp_path, 1, loses=loses)
        lineage = RunLog(str(tmp_path)).enter_lost(Lineage(SETTINGS, steps=2))
        assert lineage.lost == crashes * whole
        assert rounds(spending(lineage, lost=True, planned=False)) == 1 + crashes * whole // BANDS


def test_its_run_is_logged_published_verified_and_read(tmp_path):
    lineage = ended(Lineage(SETTINGS, planned_steps=9), tmp_path, 5)
    published = publish(lineage, tmp_path, 9)
    schema.check(published)
    assert published["bands"] == BANDS
    assert published["epsilon"] == pytest.approx(by_dp_accounting(2), rel=2e-3)
    assert published["epsilon_planned"] == pytest.approx(by_dp_accounting(3), rel=2e-3)
    (event,) = published["dp_event"]["events"]
    assert event["event"]["sampling_probability"] == pytest.approx(0.2)
    assert verify(str(tmp_path)).faults == []
    assert read_published(str(tmp_path)).taken() == lineage.taken()
    assert Lineage.from_json(lineage.to_json()) == lineage


def test_other_bands_or_independent_noise_are_not_the_same_run():
    loaded = Lineage(SETTINGS, steps=3)
    for mechanism in (replace(MECHANISM, bands=2, column=()), Mechanism(1.0, 0.05)):
        with pytest.raises(ValueError, match=r"privacy\.bands = .* started with 4"):
            resumed(Lineage(replace(SETTINGS, mechanism=mechanism)), loaded)


def test_a_rate_above_one_is_refused_with_the_largest_bands():
    with pytest.raises(ValueError, match=r"privacy\.bands = 8: .* use at most 4"):
        Mechanism(1.0, 0.23, column=cut_off(8))


def test_a_column_is_read_as_it_was_written_and_its_lack_is_the_cut_off_one():
    chosen = replace(MECHANISM, column=(1.0, 0.4, -0.1, 0.25))
    fields = json.loads(json.dumps(chosen.fields()))
    assert from_fields(fields) == chosen
    del fields["column"]  # as before columns were chosen
    assert from_fields(fields) == MECHANISM
    for wrong in ([1.0, 0.5], [0.5, 0.5, 0.5, 0.5]):
        with pytest.raises(ValueError, match="4 bands with the coefficients"):
            from_fields(fields | {"column": wrong})
