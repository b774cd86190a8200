"""The private logs: synced before what they announce, whole or refused; what they count as lost."""

import os
import stat
from dataclasses import replace

import pytest

from tests.accounts import begun, ended, opened, taken
from tests.ledger.test_ledger import SETTINGS
from torchtitan_dp.base.process import Fault
from torchtitan_dp.ledger import Lineage, Losable, RunLog, log
from torchtitan_dp.ledger.lineage import HeldOutLoss

RUN = Lineage(SETTINGS)


def lost(folder, lineage=RUN):
    return RunLog(str(folder)).enter_lost(lineage).lost


def test_every_step_ever_begun_is_counted(tmp_path):
    begun(RUN, tmp_path, 3)
    begun(RUN, tmp_path, 1)  # after a crash
    assert RunLog(str(tmp_path)).count == 4
    for name in ("steps_executed.log", "starts.log"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_step_is_on_disk_before_its_update(tmp_path, monkeypatch):
    synced, path = [], tmp_path / "steps_executed.log"

    def sync(descriptor):
        of_log = os.path.samestat(os.fstat(descriptor), path.stat())
        synced.append(path.read_bytes() if of_log else "folder")

    of_run = RunLog(str(tmp_path))
    opened(RUN, of_run, Losable(2, 2))
    monkeypatch.setattr(log.os, "fsync", sync)
    of_run.begin_step(1)
    assert synced == [b"1\n", "folder"]  # whose entry is new
    of_run.begin_step(2)
    assert len(synced) == 3


@pytest.mark.parametrize("torn", [b"1", b"34"])
def test_a_torn_line_of_a_step_swallows_nothing(tmp_path, torn):
    begun(RUN, tmp_path, 2)
    with open(tmp_path / "steps_executed.log", "ab") as file:
        file.write(torn)
    begun(RUN, tmp_path, 1)
    assert RunLog(str(tmp_path)).count == 3
    assert (tmp_path / "steps_executed.log").read_text().endswith(" torn\n1\n")


@pytest.mark.parametrize(
    "name, line",
    [
        ("steps_executed.log", "x"),
        ("steps_executed.log", "3 4"),
        ("steps_executed.log", ""),
        ("starts.log", "began a 0 1 1"),
        ("starts.log", "begin a 0 1"),
        ("starts.log", "begin a 0 1 0"),
        ("starts.log", "saved 1 0"),
        ("starts.log", "loss"),
    ],
)
def test_a_line_that_no_run_wrote_is_refused(tmp_path, name, line):
    ended(RUN, tmp_path)
    with open(tmp_path / name, "a") as file:
        file.write(f"{line}\n")
    number = len((tmp_path / name).read_text().splitlines())
    with pytest.raises(ValueError, match=rf"{name}, line {number}: .* restore the file"):
        RunLog(str(tmp_path))


def test_a_log_that_another_run_writes_to_is_not_written_on(tmp_path):
    """A lock that somebody removed, or a file system without locks: neither run knows of all."""
    one, other = RunLog(str(tmp_path)), RunLog(str(tmp_path))
    opened(RUN, one, Losable(3, 3))
    with pytest.raises(Fault, match=r"starts\.log .* another run"):
        opened(RUN, other, Losable(3, 3))
    one.begin_step(1)
    os.remove(tmp_path / "steps_executed.log")
    with pytest.raises(Fault, match="another run"):
        one.begin_step(2)


def test_row66_a_loss_counts_from_its_line_on(tmp_path):
    """Also where a crash came before its result."""
    loss = HeldOutLoss(3.0, 4.0, 1e-5, 1.0)
    lineage = ended(replace(RUN, heldout_loss=loss), tmp_path, 2)
    RunLog(str(tmp_path)).begin_loss(2)
    with open(tmp_path / "starts.log", "a") as file:
        file.write("loss")  # torn: its noise was not drawn
    read = RunLog(str(tmp_path))
    assert read.enter_lost(lineage).heldout_loss.begun == 1
    assert "1 published losses, and the ledger has fewer" in read.undercounted(lineage)
    stated = replace(lineage, heldout_loss=replace(loss, begun=2))
    assert read.lacks(stated) == "starts.log lacks a published loss that privacy.json counts"


# What is lost.


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_a_crash_counts_as_what_it_could_lose(tmp_path, steps):
    begun(RUN, tmp_path, steps, loses=10)
    assert lost(tmp_path) == 10
    ended(RUN, tmp_path, 3)
    assert lost(tmp_path, replace(RUN, steps=3)) == 10
    begun(replace(RUN, steps=3), tmp_path, 1, loses=4)
    assert lost(tmp_path, replace(RUN, steps=3)) >= 10 + 4


def test_a_start_that_ended_lost_nothing_until_its_checkpoint_is_gone(tmp_path):
    assert lost(tmp_path, ended(RUN, tmp_path, 4)) == 0
    assert lost(tmp_path) == 4


@pytest.mark.parametrize("at, behind", [(8, 0), (7, 4), (4, 4), (3, 8), (0, 8)])
def test_a_load_behind_a_saved_step_counts_whole_intervals(tmp_path, at, behind):
    of_run = RunLog(str(tmp_path))
    taken(opened(RUN, of_run, Losable(8, 4)), of_run, 8)
    of_run.saved(8)
    assert lost(tmp_path, replace(RUN, steps=at)) == 8 + behind
    of_run.end_start(8)
    assert lost(tmp_path, replace(RUN, steps=at)) == behind


def test_a_step_beyond_what_a_crash_may_lose_is_refused(tmp_path):
    of_run = RunLog(str(tmp_path))
    lineage = opened(RUN, of_run, Losable(2, 2))
    lineage = taken(lineage, of_run, 2)
    with pytest.raises(Fault, match=r"step 3 is not taken: .* checkpoint, 0, .* lose 3 of 2"):
        of_run.begin_step(3)
    assert RunLog(str(tmp_path)).count == 2
    of_run.saved(1)
    of_run.begin_step(3)
    with pytest.raises(Fault, match="step 4 is not taken"):
        of_run.begin_step(4)


@pytest.mark.parametrize("torn", ["b", "begin", "begin 0f3", "en", "begin 0f3 0 10"])
def test_a_torn_line_of_a_start_is_a_crash_and_swallows_nothing(tmp_path, torn):
    lineage = ended(RUN, tmp_path, 10)
    with open(tmp_path / "starts.log", "a") as file:
        file.write(torn)
    assert lost(tmp_path, lineage) == 10
    begun(lineage, tmp_path, loses=7)
    assert lost(tmp_path, lineage) == 10 + 7
