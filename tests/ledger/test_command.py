"""Initial weights and `python -m torchtitan_dp.ledger`, on real runs (hazard row 45)."""

import dataclasses
import json
import os
import shutil

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.accounts import begun, edit, export, publish, steps_of
from tests.processes.runs import arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.checkpoint.plan import earlier_ledger
from torchtitan_dp.checkpoint.start import decide_start, plan_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.release.__main__ import main as release
from torchtitan_dp.release.ledgers import main

SIGMA, DELTA = 1.0, 1e-3
PUBLIC_OPTION = "--privacy.initial_weights_public"


def spends(*steps_by_sigma):
    segments = [steps_of(sigma, 3 / 24, steps) for sigma, steps in steps_by_sigma]
    return accounting.compose(segments, delta=DELTA, accountant="rdp")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("ledger") / "data")


@pytest.fixture(scope="module")
def first(data):
    """A run of four steps, and its folder."""
    out = data.parent / "first"
    exports = "--checkpoint.last_save_in_hf"
    train(arguments(out, data, *with_sigma(SIGMA), exports), log=data.parent / "first.log")
    return out


@pytest.fixture
def copy(first, tmp_path):
    shutil.copytree(first, tmp_path / "out")
    return tmp_path / "out"


def run(*arguments_):
    """Exit code and JSON of the command."""
    path = str(arguments_[0]) + ".json"
    return main([*map(str, arguments_), "--json", path]), json.loads(open(path).read())


def test_a_run_that_holds_together(first, capsys):
    code, told = run(first)
    assert code == 0
    assert told["runs"][0]["verified"] is True
    assert told["runs"][0]["epsilon"] == pytest.approx(spends((SIGMA, 4)))
    assert told["total"]["epsilon"] == told["runs"][0]["epsilon_executed"]
    assert privacy(first)["epsilon"] == pytest.approx(spends((SIGMA, 4)))
    assert "the run: epsilon to state = " in capsys.readouterr().out


def test_a_run_without_a_checkpoint_is_not_verified(copy, capsys):
    shutil.rmtree(copy / "checkpoint")
    code, result = run(copy)
    assert (code, result["runs"][0]["verified"], result["runs"][0]["faults"]) == (1, False, [])
    assert "verified: NO\nnote: " in capsys.readouterr().out


def more_steps_than_the_starts_lead_to(folder):
    (folder / "starts.log").unlink()
    with (folder / "steps_executed.log").open("a") as log:
        log.write("5\n")


def another_start(folder):
    """The same terms and numbers, taken by another start."""
    log = folder / "starts.log"
    log.write_text(log.read_text().replace(log.read_text().split()[1], "another"))


def logged(text):
    return lambda folder: (folder / "steps_executed.log").write_text(text)


@pytest.mark.parametrize(
    "change, fault",
    [
        (
            more_steps_than_the_starts_lead_to,
            "steps_executed.log has 5 steps, but starts.log leads to 4",
        ),
        (lambda f: edit(f, epsilon=0.5), "epsilon = 0.5, but its steps spend"),
        (lambda f: edit(f, epsilon_executed=0.5), "epsilon_executed = 0.5"),
        (lambda f: edit(f, noise_multiplier=9.0), "checkpoint step-4: its terms are not those of"),
        (lambda f: edit(f, run="another"), "is of another run"),
        (
            logged("1\n"),
            "steps_executed.log or starts.log lacks steps or crashes that privacy.json counts",
        ),
        (another_start, "checkpoint step-4: was saved by a start that starts.log lacks"),
        (lambda f: (f / "checkpoint/step-4").rename(f / "checkpoint/step-5"), "counts 4 steps"),
    ],
)
def test_files_that_contradict_each_other(copy, change, fault):
    change(copy)
    code, told = run(copy)
    assert code == 1
    assert any(fault in line for line in told["runs"][0]["faults"]), told["runs"][0]["faults"]


def test_steps_lost_after_the_last_writing_are_counted(copy):
    begun(earlier_ledger(str(copy)), copy, 1, loses=2)
    code, told = run(copy)
    assert code == 0
    assert told["runs"][0]["epsilon_executed"] == pytest.approx(spends((SIGMA, 6)))
    assert "were begun after" in told["runs"][0]["notes"][0]


def test_hazard_45_weights_of_a_run_on_the_same_records_spend_on(first, data, tmp_path, capsys):
    out = tmp_path / "second"
    release([str(first), str(tmp_path / "released")])  # with the tokenizer of bytes
    load = f"--model.hf_assets_path={tmp_path}/released", "--checkpoint.initial_load_in_hf"
    command = arguments(out, data, *with_sigma(2.0), *load, "--training.steps=2")
    plan.main([*command, "--world_size=2"])
    assert (
        f"the initial weights spent epsilon = {rounded_up(spends((SIGMA, 4)))} by themselves"
        in capsys.readouterr().out
    )
    train(command, log=tmp_path / "log")
    spent = privacy(out)
    assert spent["steps"] == 2
    assert spent["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    assert any("whose steps are included" in caveat for caveat in spent["caveats"])
    # Sigma was chosen when the first run had shown its results.
    assert any("decided this run's noise, rate or steps" in caveat for caveat in spent["caveats"])
    assert run(out)[1]["total"]["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    capsys.readouterr()
    assert run(out, first)[1]["total"]["epsilon"] == pytest.approx(spends((SIGMA, 8), (2.0, 2)))
    assert "steps counted twice" in capsys.readouterr().out


def plan_of(command, folder):
    config = load_config(command, 2)
    return plan_start(config, 24, decide_start(config), earlier_ledger(str(folder)))


# What initial weights bring along.


def starting_from(path, *overrides):
    load = f"--checkpoint.initial_load_path={path}", "--checkpoint.initial_load_in_hf"
    new = path.with_name("new")
    return plan_of(arguments(new, path, *with_sigma(1.0), *load, *overrides), new).ledger


@pytest.mark.parametrize(
    "change, said",
    [
        ({"privacy_unit": "patient"}, r"no epsilon covers both; set data\.unit_field"),
        (
            {"neighbouring_relation": "zero_out"},
            r"^privacy\.sample_rate = .* followed from the number of records",
        ),
    ],
)
def test_weights_whose_guarantee_is_of_another_kind_are_refused(tmp_path, copy, change, said):
    kept = with_settings(earlier_ledger(str(copy)), neighbouring_relation="add_remove")
    export(kept, tmp_path / "as it is")
    starting_from(tmp_path / "as it is", "--privacy.sample_rate=0.125")
    export(with_settings(kept, **change), tmp_path / "changed")
    with pytest.raises(ValueError, match=said):
        starting_from(tmp_path / "changed", "--privacy.sample_rate=0.125")


def with_settings(lineage, **changes):
    return dataclasses.replace(lineage, settings=dataclasses.replace(lineage.settings, **changes))


def test_weights_within_a_run_without_a_ledger_of_their_own_are_refused(first, tmp_path):
    """They may be of any step of that run, also where they are said to be public."""
    run = tmp_path / "run"
    shutil.copytree(first, run)
    (run / "hf" / "privacy.json").unlink()
    (run / "checkpoint" / "step-9").mkdir()
    (tmp_path / "link").symlink_to(run / "hf")
    (deep := run / "a/b/c").mkdir(parents=True)
    for place in (run, run / "hf", run / "checkpoint" / "step-9", tmp_path / "link", deep):
        with pytest.raises(ValueError, match="lies in the folder of a run, and its weights"):
            starting_from(place, PUBLIC_OPTION)


def test_hazard_45_initial_weights_count_where_a_run_lost_its_own(first, data, tmp_path):
    """Steps were begun in the folder, but none was saved: the next start loads them afresh."""
    out = tmp_path / "out"
    out.mkdir()
    lineage = Lineage(earlier_ledger(str(first)).settings, planned_steps=4)
    publish(begun(lineage, out, 1, loses=2), out)
    load = f"--checkpoint.initial_load_path={first}/hf", "--checkpoint.initial_load_in_hf"
    plan = plan_of(arguments(out, data, *with_sigma(SIGMA), *load), out)
    assert plan.epsilon == pytest.approx(spends((SIGMA, 8)))
    (tmp_path / "plain").mkdir()
    load = f"--checkpoint.initial_load_path={tmp_path}/plain", "--checkpoint.initial_load_in_hf"
    with pytest.raises(ValueError, match=r"^privacy\.initial_weights_public = false: "):
        plan_of(arguments(out, data, *with_sigma(SIGMA), *load), out)


def without(*names):
    """A folder without these files, or folders."""

    def spoil(folder):
        for name in names:
            (shutil.rmtree if (folder / name).is_dir() else os.remove)(folder / name)

    return spoil


LOGS = "starts.log", "steps_executed.log"


@pytest.mark.parametrize(
    "spoil, said",
    [
        # Of a copy that was trained on elsewhere, or without its logs: its steps are not counted.
        (another_start, r"saved by a start that starts\.log .* lacks"),
        (without("privacy.json", *LOGS), r"saved by a start that starts\.log .* lacks"),
        *((logged(text), r"steps_executed\.log or starts\.log lacks") for text in ("", "1\n")),
        # Of steps that no checkpoint holds, and no crash is known.
        (without("checkpoint", LOGS[0]), r"has 4 steps, but starts\.log leads to 0; restore both"),
    ],
    ids=["another start", "no logs", "no lines", "few lines", "no starts"],
)
def test_a_plan_is_refused_as_the_start_is_whose_logs_are_not_the_runs(copy, data, spoil, said):
    spoil(copy)
    with pytest.raises(ValueError, match=said):
        plan_of(arguments(copy, data, *with_sigma(SIGMA)), copy)


def test_another_checkpoint_folder_is_refused(copy, data):
    with pytest.raises(ValueError, match=r"^checkpoint\.folder = 'second': .* in 'checkpoint'"):
        plan_of(arguments(copy, data, *with_sigma(SIGMA), "--checkpoint.folder=second"), copy)
    with pytest.raises(ValueError, match=r"^checkpoint\.enable = false: .* in 'checkpoint'"):
        plan_of(arguments(copy, data, *with_sigma(SIGMA), "--checkpoint.no-enable"), copy)
    shutil.copytree(copy / "checkpoint", copy / "backup")  # may be where it goes on from the other
    assert plan_of(arguments(copy, data, *with_sigma(SIGMA)), copy).steps == 4
    assert run(copy)[0] == 0


def test_weights_in_the_runs_own_folder_are_its_own(tmp_path):
    (tmp_path / "new" / "hf").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is in job\.dump_folder"):
        starting_from(tmp_path / "new" / "hf", f"--job.dump_folder={tmp_path}/new", PUBLIC_OPTION)
