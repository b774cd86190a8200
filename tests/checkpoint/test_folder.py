"""A run's checkpoints on disk: which are whole, which are dropped or set aside, whose they are."""

import json
import os
import queue
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_dp.checkpoint import folder as module
from torchtitan_dp.checkpoint import manager
from torchtitan_dp.checkpoint.folder import (
    SETTINGS,
    damage,
    drop_unfinished,
    load,
    newest_finished_checkpoint,
    read_ledger,
    refuse_another_model,
    refuse_other_settings,
    stale_checkpoints,
)

# isort: split
from torchtitan.components.checkpoint import AsyncMode


class Malicious:
    """Makes a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "checkpoint").mkdir(mode=0o700)
    state = {"weight": torch.arange(6.0).reshape(2, 3), "flag": Malicious(tmp_path / "made")}
    return save(state, tmp_path / "checkpoint" / "step-1")


def reads(step):
    """All ways to read something of a checkpoint, of which each unpickles."""
    return (
        lambda: load({"weight": torch.zeros(2, 3), "flag": None}, step, no_dist=True),
        lambda: damage(step),
        lambda: read_ledger(step),
        lambda: refuse_another_model(step, {}, "here"),
    )


def test_a_checkpoint_of_another_user_is_refused_before_unpickling(saved, tmp_path, monkeypatch):
    """Also for root, whose own are fine: in a container all may be root's."""
    owner = os.stat(saved).st_uid
    monkeypatch.setattr(module.os, "geteuid", lambda: owner + 1)
    for read in reads(saved):
        with pytest.raises(ValueError, match=f"belongs to user {owner}, whose"):
            read()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_truncated_or_missing_file_is_told(saved, name):
    path = os.path.join(saved, name)
    assert damage(saved) == ""
    os.truncate(path, os.path.getsize(path) - 1)
    assert name in damage(saved)
    os.unlink(path)
    assert name in damage(saved)


def test_another_model_is_refused(saved):
    meta = {"weight": torch.empty(2, 3, device="meta")}
    refuse_another_model(saved, meta, "model.flavor = 'debug'")
    meta["weight"] = torch.empty(2, 4, device="meta")
    with pytest.raises(ValueError, match=r"^model\.flavor = 'debug': its weight is \[2, 4\], .*"):
        refuse_another_model(saved, meta, "model.flavor = 'debug'")


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"eps": 1e-6}, "its eps is 1e-06, that of the checkpoint .* is 1e-05; set it back"),
        ({"rope": {"theta": 2.0}}, r'its rope is {"theta": 2\.0}, .* is {"theta": 1\.0}; set'),
        ({"window": 8}, "its window is 8, that of the checkpoint .* is none; set it back"),
    ],
)
def test_other_settings_of_the_model_are_refused(tmp_path, changed, said):
    """A damaged one is left to the load."""
    given = {"eps": 1e-5, "rope": {"theta": 1.0}}
    step = save({SETTINGS: json.dumps(given)}, tmp_path / "step-1")
    refuse_other_settings(step, {**given, "window": None}, "config.json")
    with pytest.raises(ValueError, match=rf"^config\.json: {said}.*job\.dump_folder$"):
        refuse_other_settings(step, given | changed, "config.json")
    broken = save({SETTINGS: "{"}, tmp_path / "broken")
    refuse_other_settings(broken, given | changed, "config.json")


def test_only_unfinished_checkpoints_are_dropped(tmp_path):
    folder = tmp_path / "checkpoint"
    assert not drop_unfinished(str(folder))
    (folder / "step-2").mkdir(parents=True)
    assert newest_finished_checkpoint(str(folder)) == -1
    (folder / "lost+found").mkdir()  # of a mount
    assert drop_unfinished(str(folder))
    assert os.listdir(folder) == ["lost+found"]
    assert not drop_unfinished(str(folder))
    for step in (0, 3):  # step 0 is a whole one too
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / ".metadata").touch()
        (folder / "step-7").mkdir(exist_ok=True)
        assert not drop_unfinished(str(folder))
        assert newest_finished_checkpoint(str(folder)) == step


def test_row82_only_whole_checkpoints_of_this_folder_are_pruned(tmp_path):
    """Oldest first, by whole names; never an owner's copy, nor the one that was just saved."""
    whole = ("step-15", "step-30", "step-45", "step-100")
    copies = ("step-90-of-another-run", "best-step-99", "step-15-keep", "old.step-1", "Step-2")
    for name in (*whole, *copies):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-5").mkdir()  # of a save that was killed, or is under way
    (tmp_path / "step-3").touch()

    def stale(keep, saved):
        return [os.path.basename(path) for path in stale_checkpoints(str(tmp_path), keep, saved)]

    assert stale(2, 100) == ["step-15", "step-30"]
    assert stale(2, 30) == ["step-15"]  # a run that went back to an earlier one
    assert stale(4, 100) == stale(9, 100) == []


def test_row82_the_checkpointer_prunes_by_whole_names(tmp_path, monkeypatch):
    """Stand in for the pruning that TorchTitan's `save` calls after a checkpoint."""
    for name in ("step-15", "step-30", "step-45", "step-90-of-another-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    saver = object.__new__(manager.Checkpointer)
    vars(saver).update(enable=True, load_only=False, enable_ft_dataloader_checkpoints=None)
    vars(saver).update(
        ft_manager=None, async_mode=AsyncMode.DISABLED, interval=15, folder=str(tmp_path)
    )
    vars(saver).update(keep_latest_k=2, purge_queue=queue.Queue(), states={}, stager=None)
    vars(saver).update(enable_first_step_checkpoint=False, _under_way=None, save_future=None)
    saver.purge_thread = SimpleNamespace(is_alive=lambda: False)
    saver.on_saved = saver.require_finite = lambda _: None
    saver.dcp_save = lambda *_, **__: None
    monkeypatch.setattr(manager.dist, "get_rank", lambda: 0)
    saver.save(45)
    gone = [saver.purge_queue.get() for _ in range(saver.purge_queue.qsize())]
    assert gone == [str(tmp_path / "step-15")]


@pytest.mark.parametrize("place", [".", "..", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_checkpoint_that_others_may_write_to_is_refused_before_it_is_unpickled(
    saved, tmp_path, place, mode
):
    path = os.path.join(saved, place)
    os.chmod(path, os.stat(path).st_mode | mode)
    for read in reads(saved):
        with pytest.raises(ValueError, match=r"may be written by others, .* \(chmod -R go-w"):
            read()
    assert not (tmp_path / "made").exists()
    os.chmod(path, os.stat(path).st_mode & ~mode)
    os.chmod(os.path.dirname(saved), 0o1777)  # as of a mount: others cannot rename what lies there
    load({"weight": torch.zeros(2, 3), "flag": None}, saved, no_dist=True)
    assert (tmp_path / "made").exists()  # the attack works where nothing guards
