"""`torchtitan-dp tune` on trials that take no steps but write a run's own files."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.accounts import begun, edit, export, opened, publish, taken
from tests.processes import forks
from tests.processes.runs import arguments, write_records
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.checkpoint.start import with_initial
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger import Lineage, Losable, RunLog, read_published, write_fingerprint
from torchtitan_dp.ledger.lineage import TRIAL, History, NoisedLoss
from torchtitan_dp.ledger.spending import total
from torchtitan_dp.release.card import claims
from torchtitan_dp.train.check import check_run
from torchtitan_dp.tune import __main__ as tune
from torchtitan_dp.tune.__main__ import Result, Trial, alike, result_of

STEPS, EPSILON = 4, 4.0
LOSSES = {"trial_1": 3.5, "trial_2": 2.0, "trial_3": 3.0}
RATES = ("optimizer.lr=1e-3,3e-3,1e-2",)
A_TRIAL = "is a trial of a search, or began with the weights of one"


class Trainer:
    """Stands in for the launcher: the files of a run, whose last losses are given by trial."""

    def __init__(self, **losses: float) -> None:
        self.losses, self.started = losses, []
        self.true = {name: -loss for name, loss in losses.items()}  # the other way around
        self.codes: dict[str, int] = {}

    def __call__(self, argv: list[str]) -> int:
        config = load_config(argv, 1)
        folder, steps = config.job.dump_folder, config.training.steps
        assert not config.checkpoint.last_save_in_hf  # it would have the trial's own epsilon
        name = Path(folder).name
        self.started.append(name)
        checked = check_run(config)
        ledger, code = checked.plan.ledger, self.codes.pop(name, 0)
        write_fingerprint(folder, checked.records.fingerprint, checked.records.settings)
        if code:
            publish(ledger, folder)
            ledger = begun(ledger, folder, 2, loses=2)
            return code
        log = RunLog(folder)
        ledger = taken(opened(ledger, log, Losable(steps, steps)), log, steps)
        log.end_start(steps)
        log.begin_loss(steps)
        terms = ledger.heldout_loss
        noised = NoisedLoss(steps, self.losses[name], terms.noise_multiplier * 4.0 / 1000)
        terms = dataclasses.replace(terms, noised=noised)
        ledger = dataclasses.replace(ledger, heldout_loss=terms)
        publish(ledger, folder)
        writer = SummaryWriter(f"{folder}/tb")
        writer.add_scalar("not_private/heldout_loss", self.true[name], STEPS)
        writer.close()
        print(
            f"step: {STEPS}/{STEPS}  not private: held-out loss: {self.true[name]:.4f}",
            file=sys.__stdout__,
        )
        return 0


LOSSES_AT = "--validation.enable", "--validation.publish_epsilon=1", "--validation.publish_delta"


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer(**LOSSES)
    monkeypatch.setattr(tune, "_train", trainer)
    return trainer


class Search:
    """The command in a working directory of its own."""

    folder = Path("out_tune")

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        patch.chdir(root)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("NGPU", "1")
        patch.setattr(tune, "TELLS_APART", 100.0)  # of 14 held-out units

    def __call__(self, *overrides: str, epsilon: object = EPSILON, tries=RATES) -> tuple[int, str]:
        """Run it: its exit code, and what it prints."""
        basics = arguments("out", "data", "--data.heldout_fraction=0.3", *overrides)
        asked = [option for one in tries for option in ("--try", one)]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                code = tune.main([*basics, f"--epsilon={epsilon}", *asked])
            except SystemExit as end:
                code = end.code
        return code, said.getvalue()


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search that has not begun."""
    write_records(tmp_path / "data", 48)
    return Search(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The working directory of one that is done."""
    root = tmp_path_factory.mktemp("ended")
    write_records(root / "data", 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_train", Trainer(**LOSSES))
        assert Search(root, patch)()[0] == 0
    return root


@pytest.fixture
def done(ended, tmp_path, monkeypatch):
    """A copy of it."""
    shutil.copytree(ended, tmp_path / "copy")
    return Search(tmp_path / "copy", monkeypatch)


def spent(search):
    return total([verify(str(folder)) for folder in sorted(search.folder.glob("trial_*"))])


def test_the_best_is_that_of_the_published_losses_alone(search, trainer, tmp_path):
    """True losses, in logs and in TensorBoard, say the opposite."""
    code, said = search("--json", str(tmp_path / "found.json"), "--checkpoint.last_save_in_hf")
    assert code == 0
    assert trainer.started == ["trial_1", "trial_2", "trial_3"]
    assert "best: trial_2: --optimizer.lr=3e-3\n" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["trial"] for one in found["trials"]] == ["trial_2", "trial_3", "trial_1"]
    assert found["announced"]["epsilon_planned"] == found["spent"]["epsilon"]


def test_what_the_ledger_adds_up_is_what_was_announced(search, trainer, tmp_path):
    """Of trials whose steps differ, and so their noise."""
    tries = ("training.global_batch_size/training.steps=2/6,3/4,6/2",)
    _, planned = search("--plan", tries=tries)
    assert trainer.started == []
    assert not search.folder.exists()
    assert search("--json", str(tmp_path / "found.json"), tries=tries)[0] == 0
    announced = json.loads((tmp_path / "found.json").read_text())["announced"]
    found = spent(search)
    assert found.epsilon == found.epsilon_planned == announced["epsilon_planned"]
    assert found.heldout_epsilon == announced["heldout_epsilon"]
    assert 0.99 * EPSILON <= found.epsilon <= EPSILON
    assert 0.99 * EPSILON <= found.heldout_epsilon <= EPSILON
    assert f"all together: epsilon = {found.epsilon:.3f}"[:-1] in planned


def test_losses_that_noise_cannot_tell_apart_are_named(search, trainer):
    trainer.losses |= {"trial_3": 2.001}
    _, said = search()
    assert "noise may have put it before trial_3: " in said
    results = [Result(Trial(name, "", {}), loss, 0.1) for name, loss in (("a", 1.0), ("b", 1.28))]
    assert [one.trial.name for one in alike(results)] == ["b"]  # 2 * sqrt(2) * 0.1
    assert alike([results[0], results[1]._replace(loss=1.29)]) == []


def test_a_search_that_noise_would_decide_is_refused(search, trainer, monkeypatch):
    """In its plan too, with the number of units that suffices, before a trial spends anything."""
    monkeypatch.setattr(tune, "TELLS_APART", 0.3)
    code, said = search()
    *_, line = said.splitlines()
    assert (code, trainer.started) == (2, [])
    assert line.startswith("error: --epsilon = 4: noise of ")
    assert "(by 0.3, say): lower validation.publish_clip" in line  # half of them are held out
    assert not (search.folder / "trial_1").exists()
    assert search("--validation.publish_clip=0.1")[0] == 0


def test_a_trial_that_is_done_is_not_run_again(search, trainer):
    trainer.codes["trial_2"] = 75
    code, said = search()
    assert (code, trainer.started) == (75, ["trial_1", "trial_2"])
    assert "best" not in said
    before = (search.folder / "trial_1" / "privacy.json").read_bytes()
    code, said = search(epsilon=6)
    assert (code, trainer.started[2:]) == (0, ["trial_2", "trial_3"])
    assert (search.folder / "trial_1" / "privacy.json").read_bytes() == before
    assert "best: trial_2" in said


def test_what_a_crash_lost_counts_and_goes_beyond_the_target_only_if_asked(search, trainer):
    trainer.codes["trial_2"] = -signal.SIGKILL
    code, said = search()
    assert code == 1
    assert "trial_2 failed, and is not compared" in said
    assert "best: trial_3" in said
    code, said = search()
    assert (code, trainer.started) == (2, ["trial_1", "trial_2", "trial_3"])
    assert "error: --epsilon = 4: the noise of all trials is fixed" in said
    code, said = search(epsilon=6)
    assert (code, trainer.started[3:]) == (0, ["trial_2"]), said
    found = spent(search)
    assert found.steps_executed == 3 * STEPS + 2
    assert EPSILON < found.epsilon < 6


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_goes_to_the_trial(number, monkeypatch):
    """Which saves, and ends with the exit code of a stop."""
    forks.need()
    script = "import os, signal, sys, time\n"
    script += f"signal.signal(signal.{number}, lambda *_: sys.exit(0))\n"
    script += f"os.kill(os.getppid(), signal.{number})\ntime.sleep(60)"
    started = []

    def start(command, stdout):
        assert stdout == 2  # stderr: stdout is for the result
        started.append(command)
        return popen([sys.executable, "-c", script])

    popen = subprocess.Popen
    monkeypatch.setattr(tune.subprocess, "Popen", start)
    before = signal.getsignal(getattr(signal, number))
    assert tune._train(["--training.steps=4"]) == 75
    assert started[0][1:] == ["-m", "torchtitan_dp", "train", "--training.steps=4"]
    assert signal.getsignal(getattr(signal, number)) == before


def test_a_loss_before_the_last_step_is_no_result(done):
    trial = Trial("trial_2", str(done.folder / "trial_2"), {})
    assert result_of(trial).loss == LOSSES["trial_2"]
    loss = read_published(trial.folder).heldout_loss.fields()
    edit(trial.folder, heldout_loss=loss | {"noised": [1, *loss["noised"][1:]]})
    assert result_of(trial) is None


def gone(folder):
    shutil.rmtree(folder / "trial_1")


def emptied(folder):
    gone(folder)
    (folder / "trial_1").mkdir()


def copied(folder):
    """With its own mark, by hand."""
    mark = (folder / "trial_1" / "trial.json").read_bytes()
    gone(folder)
    shutil.copytree(folder / "trial_2", folder / "trial_1")
    (folder / "trial_1" / "trial.json").write_bytes(mark)


def swapped(folder):
    gone(folder)
    shutil.copytree(folder / "trial_2", folder / "trial_1")


@pytest.mark.parametrize(
    "what, line",
    [
        (lambda at: edit(at / "trial_1", private=False), "a trial is not private"),
        (copied, "two trials are copies of one run"),
        (swapped, "another configuration or other trials"),
        (lambda at: shutil.copytree(at / "trial_2", at / "trial_4"), "but no trial of this search"),
        (lambda at: (at / "trial_1/trial.json").unlink(), "is a run, but no trial of this search"),
        (lambda at: (at / "trial_1/trial.json").write_text("{"), "cannot be read"),
    ],
)
def test_what_may_have_spent_more_is_refused(done, trainer, what, line):
    what(done.folder)
    code, said = done()
    assert (code, trainer.started) == (2, [])
    assert [line in one for one in said.splitlines() if one.startswith("error: ")] == [True]


@pytest.mark.parametrize("empty", [gone, emptied])
def test_a_trial_that_was_launched_and_is_empty_is_refused(search, trainer, monkeypatch, empty):
    """The search was killed while it trained its first one: the others' marks are there."""

    def killed(argv):
        trainer(argv)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tune, "_train", killed)
        with pytest.raises(KeyboardInterrupt):
            search()
    empty(search.folder)
    code, said = search()
    assert code == 2
    assert "is not there, and may have spent its epsilon" in said


def test_a_trial_is_not_released_as_if_nothing_had_chosen_it(done, tmp_path):
    """Nor elsewhere, nor by another name, nor what begins with its weights."""
    trial, link = done.folder / "trial_1", tmp_path / "link"
    link.symlink_to(trial.resolve())
    shutil.copytree(trial, tmp_path / "best", ignore=shutil.ignore_patterns("trial.json"))
    for folder in (trial, link, tmp_path / "best"):
        with pytest.raises(ValueError, match=A_TRIAL):
            claims(str(folder), "step-2", read_published(str(folder)))
    assert TRIAL in json.loads((trial / "privacy.json").read_text())["caveats"]
    config, weights = load_config(arguments("next", "data"), 1), tmp_path / "hf"
    export(read_published(str(trial)), weights)
    terms = read_published(str(trial)).settings
    for _ in range(2):  # also what begins with its child's weights
        child = with_initial(History(), config, str(weights))
        assert child.is_trial
        with pytest.raises(ValueError, match=A_TRIAL):
            claims("next", "step-2", child)
        export(Lineage(terms, caveats=child.caveats, ancestors=child.ancestors), weights)


@pytest.mark.parametrize(
    "overrides, options, line",
    [
        (["--optimizer.beta1=0.8"], {}, "another configuration or other trials"),
        ([], {"tries": ["optimizer.lr=1e-3,3e-3"]}, "another configuration or other trials"),
        ([], {"epsilon": 3.0}, "--epsilon = 3: the noise of all trials is fixed"),
    ],
)
def test_another_command_does_not_go_on(done, trainer, overrides, options, line):
    code, said = done(*overrides, **options)
    assert (code, trainer.started) == (2, [])
    assert line in said


@pytest.mark.parametrize(
    "overrides, options, line",
    [
        (["--privacy.debug_seed=1"], {}, "privacy.debug_seed = 1: all trials"),
        (["--privacy.no-enable"], {}, "privacy.enable = false: "),
        ([*LOSSES_AT, "1e-9"], {}, "publish_delta = 1e-09: a search has one"),
        (["--data.heldout_fraction=0"], {}, "data.heldout_fraction = 0.0: validation.enable"),
        (["--privacy.sample_rate=0.1"], {}, "a public privacy.sample_rate"),
        ([], {"epsilon": "nan"}, "--epsilon = nan: "),
        (["--privacy.delta=1e-12"], {"epsilon": 1e-9}, "--epsilon = 1e-09, of all trials: "),
        ([], {"tries": ["training.global_batch_size=3,900"]}, "=900: training.global_batch_size"),
        ([], {"tries": ["optimizer.lr=1e-3,much"]}, "--optimizer.lr=much: "),
    ],
)
def test_mistakes_are_found_before_the_first_trial(search, trainer, overrides, options, line):
    code, said = search(*overrides, **options)
    assert (code, trainer.started) == (2, [])
    errors = [one for one in said.splitlines() if one.startswith("error: ")]
    assert len(errors) == 1, said
    assert line in errors[0]
