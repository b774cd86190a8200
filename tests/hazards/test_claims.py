"""Hazards of what is claimed: stops, choices, runs without privacy, audits, overlaps (rows 50-55);
../release/test_release.py shows what a release makes of them."""

import dataclasses
import os
from pathlib import Path
from unittest import mock

import pytest

from scripts.reference import field_docs
from tests import accounts, build
from tests.accounts import begun
from tests.hazards.test_trainer import SETTINGS
from tests.processes import forks
from tests.processes.runs import arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.base.process import lock_folder
from torchtitan_dp.checkpoint.folder import read_ledger, verify
from torchtitan_dp.checkpoint.plan import earlier_ledger, refuse_private_folder, settings_of
from torchtitan_dp.checkpoint.start import Start, decide_start, plan_start, with_initial
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger import Lineage, schema, write_fingerprint
from torchtitan_dp.ledger.lineage import History, audited, not_private
from torchtitan_dp.ledger.spending import assumptions, total
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.clipping import fp32_sum_excess
from torchtitan_dp.release.__main__ import release
from torchtitan_dp.release.ledgers import main as command
from torchtitan_dp.train import trainer


def publish(folder, ledger, *, fingerprint="f"):
    """What a run leaves in its folder."""
    folder.mkdir(exist_ok=True)
    write_fingerprint(str(folder), fingerprint, {})
    return accounts.publish(ledger, folder)


# Row 50: who stops early publishes what was planned, or is published.


def test_row50_a_run_that_stopped_early_tells_what_was_planned(tmp_path):
    published = publish(tmp_path, Lineage(SETTINGS, steps=2, planned_steps=200))
    assert published["epsilon"] == pytest.approx(SETTINGS.epsilon(2), rel=1e-3)
    assert published["epsilon_planned"] >= SETTINGS.epsilon(200) > 2 * published["epsilon"]
    assert (published["steps"], published["planned_steps"]) == (2, 200)
    (caveat,) = [c for c in published["caveats"] if "2 of 200" in c]
    assert "If the stop was decided beforehand, epsilon = " in caveat
    found = verify(str(tmp_path))
    assert found.faults == []
    assert found.ledger.caveats == ()  # weights that go on have not stopped


def test_row50_lost_steps_are_planned_again(tmp_path):
    begun(Lineage(SETTINGS), tmp_path, 1, loses=1)
    published = publish(tmp_path, Lineage(SETTINGS, steps=2, planned_steps=200))
    assert published["epsilon_planned"] >= SETTINGS.epsilon(201)
    assert published["epsilon_planned"] == pytest.approx(SETTINGS.epsilon(201), rel=1e-6)


def stopped(folder, **changes):
    """The ledger of weights that start from those of a run stopped at 2 of 2,000 steps."""
    settings = dataclasses.replace(SETTINGS, samples_per_rank=4096)
    accounts.export(Lineage(settings, steps=2, planned_steps=2_000), folder)
    child = Lineage(dataclasses.replace(SETTINGS, **changes), steps=1, planned_steps=1)
    return with_initial(child, build.config(), str(folder))


def test_row50_a_stop_is_not_forgotten_in_another_folder(tmp_path):
    published = publish(tmp_path / "second", stopped(tmp_path / "first"))
    assert published["epsilon_planned"] == published["epsilon"] >= SETTINGS.epsilon(2_001)
    (caveat,) = [c for c in published["caveats"] if "2 of 2000 by run" in c]
    assert "a clock (a time limit, a preemption, patience), no epsilon holds" in caveat
    found = verify(str(tmp_path / "second"))
    assert found.faults == []
    assert total([found]).epsilon_planned == pytest.approx(published["epsilon_planned"])


def test_row49_what_initial_weights_were_summed_in_is_told(tmp_path):
    published = publish(tmp_path / "second", stopped(tmp_path / "first", samples_per_rank=8))
    assert any("adds up to 4096 records" in caveat for caveat in published["caveats"])


def test_row50_no_epsilon_is_said_to_cover_a_stop_by_logs():
    planned = " ".join(field_docs(schema.PrivacyFile)["epsilon_planned"].split())
    assert "if weights decided when to stop" in planned
    assert "No ε covers a stop that followed from losses" in planned
    assert any("numbers of steps" in line for line in assumptions(Lineage(SETTINGS)))


# Row 52: weights of a run without privacy are never taken for public or private.


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """A run without privacy, exported; and its records."""
    place = tmp_path_factory.mktemp("baseline")
    data = write_records(place / "data")
    options = ("--privacy.no-enable", "--checkpoint.last_save_in_hf", "--training.steps=2")
    said = train(arguments(place / "run", data, *options), log=place / "log", world_size=1)
    assert "NOT private, not to ship: " in said
    return place / "run", data


def test_row52_weights_of_a_run_without_privacy_are_never_private(baseline, tmp_path):
    run, data = baseline
    options = "--checkpoint.initial_load_in_hf", "--privacy.initial_weights_public"

    def planned(weights):
        load = f"--checkpoint.initial_load_path={run / weights}"
        config = load_config(arguments(tmp_path / "out", data, *with_sigma(1), load, *options), 1)
        return plan_start(config, 24, decide_start(config), None)

    plan = planned("hf")
    assert plan.private is False
    assert "the initial weights are not private" in plan.ledger.caveats
    assert any("trained without privacy" in caveat for caveat in plan.ledger.caveats)
    with pytest.raises(ValueError, match="lies in the folder of a run"):  # whatever they are
        planned("checkpoint/step-2")


def test_row52_its_folder_says_so_and_is_no_place_for_a_private_run(baseline):
    run, _ = baseline
    published = privacy(run)
    claims = published["private"], published["epsilon"], published["mechanism"]
    assert claims == (False, None, "none")
    assert privacy(run / "hf") == {**published, "steps": 2, "steps_executed": 2}
    refuse_private_folder(str(run))  # it may go on there itself
    with pytest.raises(ValueError, match="it is a run without privacy; name another folder"):
        earlier_ledger(str(run))
    with pytest.raises(ValueError, match="is a run without privacy"):
        verify(str(run))
    with pytest.raises(ValueError, match="it is NOT private"):
        release(str(run), f"{run}_out")


def test_row52_a_checkpoint_of_the_baseline_holds_its_ledger(baseline):
    run, _ = baseline
    assert read_ledger(str(run / "checkpoint" / "step-2")).private is False


def after_the_wait(data, folder):
    """The refusal of a run without privacy whose lock waited for the end of a private one."""

    def lock(*_):
        publish(folder, Lineage(SETTINGS, steps=4))
        return lock_folder(str(folder))

    os.environ |= {name: "0" for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with mock.patch.object(trainer, "lock_folder", lock), pytest.raises(SystemExit) as refused:
        trainer.main(arguments(folder, data, "--privacy.no-enable"))
    return str(refused.value), privacy(folder)["steps"]


def test_row52_a_run_without_privacy_that_waited_for_a_private_one_is_refused(tmp_path):
    """Else its ledger would take the place of the other's."""
    data, folder = write_records(tmp_path / "data"), tmp_path / "run"
    said, steps = forks.call(after_the_wait, data, folder)
    assert f"job.dump_folder = '{folder}' has a private run; name another" in said
    assert steps == 4


# Row 53: an audit's result is made from noised gradients of the records: it spends.


def test_row53_an_audit_adds_to_what_runs_spend(tmp_path):
    publish(tmp_path / "run", Lineage(SETTINGS, steps=40))
    published = publish(tmp_path / "audit", audited(Lineage(SETTINGS, steps=40), 100))
    assert (published["private"], published["epsilon"]) == (False, None)
    assert published["epsilon_executed"] == pytest.approx(SETTINGS.epsilon(40))
    assert published["audit"] == {"canaries": 100, "otherwise_private": True}
    runs = [verify(str(tmp_path / name)) for name in ("run", "audit")]
    spent = compose([SETTINGS.segment(80)], delta=SETTINGS.delta, accountant=SETTINGS.accountant)
    assert total(runs).epsilon == pytest.approx(spent)
    assert not any(run.faults for run in runs)
    with pytest.raises(ValueError, match="it is an audited run; name"):  # no place for one
        earlier_ledger(str(tmp_path / "audit"))


def test_row53_an_audit_that_would_not_be_private_has_no_epsilon(tmp_path):
    published = publish(tmp_path, audited(not_private(Lineage(SETTINGS, steps=40), "a seed"), 100))
    assert (published["epsilon_executed"], published["epsilon_planned"]) == (None, None)
    assert total([verify(str(tmp_path))]).epsilon is None


def test_row53_weights_that_were_audited_are_private_for_nobody(tmp_path):
    accounts.export(audited(Lineage(SETTINGS, steps=40), 100), tmp_path)
    ledger = with_initial(History(), build.config(), str(tmp_path))
    assert (ledger.private, ledger.composes) == (False, False)


# Row 54: a unit that is in two data sets pays for both.


def test_row54_runs_on_overlapping_records_can_be_added_up(tmp_path, capsys):
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        publish(Path(folder), Lineage(SETTINGS, steps=40), fingerprint=folder)
    runs = [verify(folder) for folder in folders]
    with pytest.raises(ValueError, match=r"are on other files, in another .*: --overlapping"):
        total(runs)
    spent = compose([SETTINGS.segment(80)], delta=SETTINGS.delta, accountant=SETTINGS.accountant)
    assert total(runs, overlapping=True).epsilon == pytest.approx(spent)
    with pytest.raises(SystemExit) as stop:
        command(folders)
    assert stop.value.code == 2
    assert command([*folders, "--overlapping"]) == 1  # nobody has seen a checkpoint of them
    out = capsys.readouterr().out
    assert "the cost to a unit with records in all of them" in out
    assert "verified: NO\nnote: " in out


# Row 55: delta against the number of units; terms that were toggled.


def plan(delta, *overrides, units=20):
    return plan_start(build.config(f"--privacy.delta={delta}", *overrides), units, Start(), None)


def test_row55_a_delta_above_a_tenth_of_one_over_units_is_a_warning():
    assert plan(0.005).warnings == plan(0.1 / 20).warnings == ()
    (warning,) = plan(0.049).warnings
    assert warning.startswith("privacy.delta = 0.049: above a tenth of 1 / number of training rec")
    assert "a probability of 1 in 20" in warning
    public = "--privacy.sample_rate=0.4"  # of a batch of 4: one in about 10 units
    (warning,) = plan(0.011, public).warnings
    assert warning.startswith("privacy.delta = 0.011: above a tenth of privacy.sample_rate")
    (warning,) = plan(0.009, public).warnings  # by the number of units, which is private here
    assert warning.startswith("not private: privacy.delta = 0.009: above a tenth of 1 / number")


def test_row55_a_delta_that_publishes_units_is_refused_where_their_number_is_public():
    with pytest.raises(ValueError, match=r"^privacy\.delta = 0\.05: must be below 1 / number"):
        plan(0.05)
    public = "--privacy.sample_rate=0.4"  # of a batch of 4: one in about 10 units
    _, warning = plan(0.09, public).warnings
    assert warning.startswith("not private: privacy.delta = 0.09: must be below")
    with pytest.raises(ValueError, match=r"^privacy\.delta = 0\.1: must be below privacy\."):
        plan(0.1, public)


def test_row55_the_ledger_tells_of_the_configuration():
    options = ("--privacy.secure_noise", "--privacy.clip_function=automatic")
    settings = settings_of(build.config(*options), 20, 1.0)
    assert settings.secure_noise
    assert (settings.clipping, settings.clip_function, settings.units) == ("flat", "automatic", 20)
    assert settings_of(build.config("--privacy.sample_rate=0.1"), 20, 1.0).units is None


# Row 49: what fp32 adds to C is told, and grows with the samples that a rank adds up.


def test_row49_the_rounded_sum_is_a_caveat_that_grows(tmp_path):
    said = []
    for place, summands in enumerate((8, 4096)):
        settings = dataclasses.replace(SETTINGS, samples_per_rank=summands)
        published = publish(tmp_path / str(place), Lineage(settings, steps=2))
        (caveat,) = [c for c in published["caveats"] if "the clipped sum is rounded" in c]
        assert f"up to {summands} records" in caveat
        said.append(float(caveat.split("move it by ")[1].split(" C instead")[0]))
    for bound, summands in zip(said, (8, 4096), strict=True):
        assert bound - 1 == pytest.approx(fp32_sum_excess(summands), rel=0.1)
        assert bound - 1 >= fp32_sum_excess(summands)


# Row 65: the divisor.


@pytest.mark.parametrize("method", ["microbatch", "randomized"])
def test_row65_the_divisor_and_all_terms_are_those_of_the_configuration(method):
    """Whatever the number of units is, where neighbours differ in it (`add_remove`)."""
    rate = "--privacy.sample_rate=0.1", f"--privacy.gradient_method={method}"
    found = [settings_of(build.config(*rate), units, 1.0) for units in (20, 21, 1000)]
    assert found[0] == found[1] == found[2]
    assert found[0].expected_batch_size == build.config(*rate).training.global_batch_size
