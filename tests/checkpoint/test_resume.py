"""Killed at any moment, then the same command: no worker lives on, no step is lost or unaccounted.
Real runs of two processes at cp 2; rows 11, 31, 45 and 46, where they need a restart."""

import json
import math
import re
import shutil

import pytest
import torch

import torchtitan_dp.plan.__main__ as plan
from tests.accounts import edit
from tests.processes import runs
from tests.processes.runs import Run, arguments, privacy, weights, with_sigma, write_records
from torchtitan_dp.base.process import lock_folder
from torchtitan_dp.checkpoint.plan import earlier_ledger
from torchtitan_dp.checkpoint.start import decide_start, plan_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger.schema import ledger_of, read_published_fields
from torchtitan_dp.ledger.spending import spent
from torchtitan_dp.privacy.meaning import meaning

STEPS = 4


class Folder:
    """One dump folder, its data and its command line."""

    def __init__(self, place, *overrides, copy_of=None):
        self.place, self.out = place, place / "out"
        if copy_of is None:
            self.data = write_records(place / "data")
        else:
            self.data = copy_of.data
            shutil.copytree(copy_of.out, self.out)
        self.command = arguments(self.out, self.data, *overrides)

    def start(self, *overrides, **options):
        return Run([*self.command, *overrides], log=self.place / "log", **options)

    def train(self, *overrides, **options):
        return runs.train([*self.command, *overrides], log=self.place / "log", **options)

    def steps_begun(self):
        return len((self.out / "steps_executed.log").read_text().splitlines())

    def checkpoint(self, step):
        return self.out / "checkpoint" / f"step-{step}"

    def planned_epsilon(self, capsys, steps):
        capsys.readouterr()
        options = [f"--training.steps={steps}", "--world_size=2", "--no_memory", "--json=-"]
        plan.main([*self.command, *options])
        return json.loads(capsys.readouterr().out)["epsilon"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run to the end, and what it published."""
    folder = Folder(tmp_path_factory.mktemp("finished"))
    assert f"done: {STEPS} steps" in folder.train()
    return folder, privacy(folder.out)


def test_a_run_ends_at_its_step(finished):
    folder, spent = finished
    assert spent["private"] is True
    assert spent["steps"] == spent["steps_executed"] == folder.steps_begun() == STEPS
    assert 0.999 * 8 <= spent["epsilon"] == spent["epsilon_executed"] <= 8  # hazard 38
    assert spent["sample_rate"] == 3 / 24
    assert "global_batch_size" in spent["sample_rate_source"]  # hazard 15
    assert folder.checkpoint(STEPS).joinpath(".metadata").exists()


def test_a_finished_run_is_not_described_by_a_start_that_trains_nothing(finished, capsys):
    """Its release would state that start's settings."""
    folder, _ = finished
    settings = (folder.out / "run_config.json").read_bytes()
    assert "NOT private" not in folder.train("--metrics.log_freq=2")
    assert (folder.out / "run_config.json").read_bytes() == settings
    with pytest.raises(SystemExit):
        folder.planned_epsilon(capsys, STEPS - 1)
    line = f"training.steps = {STEPS - 1}: {STEPS} were taken; give no fewer"
    assert line in capsys.readouterr().err


def test_what_a_resume_changes_is_a_caveat_or_refused(finished):
    def planned(*overrides):
        more = f"--training.steps={STEPS + 2}", "--privacy.target_epsilon=20"
        config = load_config([*finished[0].command, *more, *overrides], 2)
        earlier = earlier_ledger(config.job.dump_folder)
        return plan_start(config, 24, decide_start(config), earlier).ledger.caveats

    changed = "optimizer.lr changed after the first start, which is assumed not to follow from "
    assert f"{changed}results" in planned("--optimizer.lr=1e-5")
    assert f"{changed}results" not in planned()
    with pytest.raises(ValueError, match=r"debug_seed = 1: this run is private, and would not be"):
        planned("--privacy.debug_seed=1")


def test_rate_and_epsilon_are_of_all_steps_that_were_planned(finished, tmp_path, capsys):
    """Fewer were asked for later: they count unless the owner states why they were not taken."""
    folder = Folder(tmp_path, copy_of=finished[0])
    edit(folder.out, planned_steps=STEPS + 2)
    plan.main([*folder.command, f"--training.steps={STEPS}", "--world_size=2"])
    said = capsys.readouterr().out
    (stated,) = re.findall(r"6 steps were planned before: .* states epsilon = ([0-9.]+), of", said)
    assert float(stated) > 8
    (times,) = re.findall(r"more than ([0-9.]+) times \(e\^epsilon\)", said)
    assert float(times) == pytest.approx(math.exp(float(stated)), rel=0.01)
    known = ledger_of(read_published_fields(str(folder.out)))
    bounds = meaning(spent(known, 2), known.settings.delta)
    (rate, _) = re.findall(r"detects at most ([0-9.]+)% of", said)
    assert float(rate) / 100 == pytest.approx(bounds.detected[0][1], rel=0.01)


def test_two_starts_from_one_checkpoint_differ(finished, tmp_path):
    """Hazard 11, and 46: the steps of an abandoned branch stay in `steps_executed`."""
    original, spent = finished
    folder = Folder(tmp_path, copy_of=original)
    first = weights(folder.checkpoint(STEPS))
    shutil.rmtree(folder.checkpoint(STEPS))
    assert "Training starts at step 3" in folder.train()
    second = weights(folder.checkpoint(STEPS))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    again = privacy(folder.out)
    assert again["steps"] == STEPS
    assert again["epsilon"] == spent["epsilon"]
    assert again["steps_executed"] == folder.steps_begun() == STEPS + 2
    assert again["epsilon_executed"] > again["epsilon"]


def killed(place, *overrides):
    """Start a run with noise given, and kill its launcher once its first checkpoint is whole."""
    folder = Folder(place, *with_sigma(1), *overrides)
    # More steps than can be over when the signal comes.
    with folder.start("--training.steps=4000", "--checkpoint.keep_latest_k=2") as run:
        # Any one: step 2's is gone again after step 6.
        run.wait_for(lambda: bool(steps_saved(folder)), "a checkpoint")
        assert len(run.workers()) == 2
        with pytest.raises(ValueError, match="another run uses it"):
            lock_folder(str(folder.out), wait_s=0)
        run.kill([run.process.pid])
        assert run.dies(), f"{run.processes()} live on:\n{run.output()}"
        lock_folder(str(folder.out), wait_s=60).close()  # free for the next
        assert "done:" not in run.output()
    return folder


def steps_saved(folder):
    return [
        int(metadata.parent.name.removeprefix("step-"))
        for metadata in folder.out.glob("checkpoint/step-*/.metadata")
    ]


def test_killed_and_resumed(tmp_path, capsys):
    folder = killed(tmp_path, "--checkpoint.async_mode=async")
    begun, at = folder.steps_begun(), max(steps_saved(folder))
    assert privacy(folder.out)["steps"] >= at  # never less than the newest checkpoint holds
    last = at + 2
    # Noise was given, not a target: going on is the user's choice, and the plan says what it costs.
    assert folder.planned_epsilon(capsys, at) < folder.planned_epsilon(capsys, last)
    assert f"Training starts at step {at + 1}" in folder.train(f"--training.steps={last}")
    spent = privacy(folder.out)
    assert spent["private"] is True
    assert spent["steps"] == last
    assert spent["epsilon"] == folder.planned_epsilon(capsys, last)
    assert spent["steps_executed"] >= folder.steps_begun() == begun + 2 >= last
    # Hazard 59: by multiples of checkpoint.interval, of which a crash counts as one at least.
    assert spent["steps_executed"] - last in (2, 4)
    assert spent["epsilon_executed"] >= spent["epsilon"]
    assert max(steps_saved(folder)) == last


def test_killed_in_its_first_save(finished, tmp_path):
    """A `checkpoint/` without one whole step must not stop the start, nor reset the account."""
    folder = Folder(tmp_path, copy_of=finished[0])
    for step in steps_saved(folder):
        (folder.checkpoint(step) / ".metadata").unlink()
    begun = folder.steps_begun()
    output = folder.train("--training.steps=2")
    assert "has no whole checkpoint" in output
    assert "Training starts at step 1" in output
    spent = privacy(folder.out)
    assert spent["steps"] == 2
    assert spent["steps_executed"] == begun + 2
    assert steps_saved(folder) == [2]
