"""What a run does when the world around it fails: signals, hung ranks, full and lying disks.

Real runs of two processes. `scripts/faults.py` does the same at random moments, many times over.
"""

import os
import resource
import signal
import stat
import sys
import time

import pytest

from tests.checkpoint.test_resume import STEPS, Folder, steps_saved
from tests.processes.runs import TIMEOUT_S, parent, privacy, with_sigma
from torchtitan_dp.checkpoint.folder import damage, finished_checkpoints
from torchtitan_dp.checkpoint.safe_load import entries, read_metadata
from torchtitan_dp.launch import EXIT_STOPPED

HUNG_AT = 3
# Of collectives: more than a rank on a busy machine lets another wait, less than the default's 100.
COLLECTIVES_S = 10
STEPS_TO_COME = 4000  # more than can be over when a signal comes


def main(argv):
    """Training whose rank 1 falls asleep in a step."""
    import torchtitan_dp.train as train

    step = train.DPTrainer.train_step

    def hanging(self, loader):
        if self.step == HUNG_AT and os.environ["RANK"] == "1":
            time.sleep(1000)
        step(self, loader)

    train.DPTrainer.train_step = hanging
    train.main(argv)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run to the end, with whole checkpoints at steps 2 and 4."""
    folder = Folder(tmp_path_factory.mktemp("finished"), *with_sigma(1))
    folder.train()
    return folder


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A run one of whose ranks hangs after its first checkpoint; how long its end took."""
    folder = Folder(tmp_path_factory.mktemp("hung"), *with_sigma(1))
    run = folder.start(
        f"--training.steps={STEPS_TO_COME}",
        f"--comm.train_timeout_seconds={COLLECTIVES_S}",
        program=(__file__,),
    )
    try:
        run.wait_for((folder.checkpoint(2) / ".metadata").exists, "the first checkpoint")
        begun = time.monotonic()
        code = run.process.wait(TIMEOUT_S)
        return folder, code, time.monotonic() - begun, run.dies(), run.output()
    finally:
        run.end()


def test_a_hung_rank_ends_the_run(hung):
    """By the timeout of collectives and 5 s of grace for SIGTERM, instead of after 100 s."""
    folder, code, seconds, dead, output = hung
    assert code == 1
    assert seconds < 90, output
    assert dead
    assert steps_saved(folder) == [2]
    assert "error: another rank is gone or hangs (" in output
    assert "Traceback" not in output


@pytest.fixture(scope="module")
def stopped(hung):
    """The same run, started again and told to stop by a scheduler while it trains."""
    folder, *_ = hung
    steps = f"--training.steps={STEPS_TO_COME}"
    # The launcher answers the signal: the real one.
    run = folder.start(steps, "--checkpoint.interval=10000", real=True)
    try:
        run.wait_for(lambda: folder.steps_begun() > HUNG_AT + 2, "the next steps")
        launched = {parent(pid) == run.process.pid for pid in run.workers()}
        run.process.send_signal(signal.SIGTERM)
        code = run.process.wait(TIMEOUT_S)
        return folder, code, run.output(), run.dies(), launched
    finally:
        run.end()


def test_sigterm_saves_a_checkpoint_and_stops(stopped):
    folder, code, output, dead, launched = stopped
    assert launched == {True}  # so workers die with it, as in test_resume
    assert (code, dead) == (EXIT_STOPPED, True)
    assert "Training starts at step 3" in output  # what the hung run had saved
    last = max(steps_saved(folder))
    assert last > HUNG_AT
    assert (
        f"stopped at step {last} of {STEPS_TO_COME}, as requested, saved: the same command"
        in output
    )
    spent = privacy(folder.out)
    assert (spent["private"], spent["steps"]) == (True, last)
    assert spent["steps_executed"] >= folder.steps_begun() >= last


def test_ctrl_c_saves_a_checkpoint_and_stops(stopped):
    """It goes to the whole process group of the terminal, to which torchrun's workers do not
    belong.
    """
    folder, *_ = stopped
    before, begun = max(steps_saved(folder)), folder.steps_begun()
    steps = f"--training.steps={STEPS_TO_COME}"
    run = folder.start(steps, "--checkpoint.interval=10000", real=True)
    try:
        run.wait_for(lambda: folder.steps_begun() > begun + 2, "the next steps")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(TIMEOUT_S) == EXIT_STOPPED
        assert run.dies()
    finally:
        run.end()
    last = max(steps_saved(folder))
    assert last > before
    assert folder.steps_begun() - begun == last - before  # no step is lost
    assert run.output().count("\nCtrl-C: finishing the step and saving; press it again") == 1
    assert f"stopped at step {last} of {STEPS_TO_COME}, as requested, saved: the" in run.output()
    assert "Traceback" not in run.output()


def test_a_full_disk_is_one_line_and_costs_no_checkpoint(stopped):
    """The limit on a file's size stands for the disk's."""
    folder, *_ = stopped
    last = max(steps_saved(folder))
    before = folder.checkpoint(last).joinpath("__0_0.distcp").read_bytes()
    run = folder.start(f"--training.steps={last + 2}", "--checkpoint.interval=1")
    try:
        run.wait_for(lambda: len(run.workers()) == 2, "the workers' start")
        for pid in run.workers():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**17, 2**17))
        assert run.process.wait(TIMEOUT_S) == 1
    finally:
        run.end()
    assert f"Training starts at step {last + 1}" in run.output()  # stopped, and gone on
    (told,) = [line for line in run.output().splitlines() if line.startswith("[rank0]:error: ")]
    assert f"checkpoint step-{last + 1} was not saved in {folder.out}/checkpoint, where " in told
    assert f"the last complete one is step-{last}" in told
    assert "Traceback" not in run.output()
    assert max(steps_saved(folder)) == last
    assert damage(str(folder.checkpoint(last))) == ""
    assert folder.checkpoint(last).joinpath("__0_0.distcp").read_bytes() == before


def flip_a_bit(checkpoint):
    """In a weight's data, where nothing but its checksum tells."""
    entry = max(entries(read_metadata(checkpoint)), key=lambda entry: entry.length)
    with open(checkpoint / entry.file, "rb+") as file:
        file.seek(entry.offset + entry.length // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(finished, tmp_path):
    folder = Folder(tmp_path, copy_of=finished)
    folder.command = [*folder.command, *with_sigma(1)]
    flip_a_bit(folder.checkpoint(STEPS))
    assert damage(str(folder.checkpoint(STEPS))) == ""  # sizes do not tell
    output = folder.train()
    (told,) = [line for line in output.splitlines() if "is damaged" in line]
    assert "checkpoint step-4 is damaged (" in told
    assert "the run resumes from step-2" in told
    assert "Training starts at step 3" in output
    assert sorted(steps_saved(folder)) == [2, STEPS]
    assert (folder.out / "checkpoint.damaged" / "step-4" / ".metadata").exists()
    spent = privacy(folder.out)
    assert spent["steps"] == STEPS
    assert spent["steps_executed"] == folder.steps_begun() == STEPS + 2


def test_no_whole_checkpoint_is_refused(finished, tmp_path, capsys):
    folder = Folder(tmp_path, copy_of=finished)
    folder.command = [*folder.command, *with_sigma(1)]
    for step in finished_checkpoints(str(folder.out / "checkpoint")):
        os.truncate(folder.checkpoint(step) / "__1_0.distcp", 1000)
    line = folder.refuses(capsys)
    assert line.startswith("error: no checkpoint in ")
    assert "is whole (step-4: __1_0.distcp has 1,000 of " in line
    assert sorted(steps_saved(folder)) == [2, STEPS]  # all stay where they are


def test_another_model_is_refused_in_one_line(finished, capsys):
    line = finished.refuses(capsys, "--model.flavor=1B")
    assert line.startswith("error: model.flavor = '1B': its ")
    assert "that of the checkpoint" in line
    assert "job.dump_folder" in line


def test_outputs_are_their_owners_alone(finished, stopped):
    files = [path for folder in (finished, stopped[0]) for path in folder.out.rglob("*")]
    names = " ".join(map(str, files))
    for expected in ("privacy.json", ".distcp", "events.out", "steps_executed.log", ".lock"):
        assert expected in names
    assert [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o077] == []


if __name__ == "__main__":
    main(sys.argv[1:])
