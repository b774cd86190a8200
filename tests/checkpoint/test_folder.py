"""A run's checkpoints on disk: what is finished, what is dropped, and what is set aside."""

import os
import queue
from types import SimpleNamespace

import torch.distributed.checkpoint as dcp

from torchtitan_dp.checkpoint import manager
from torchtitan_dp.checkpoint.folder import (
    drop_unfinished,
    newest_finished_checkpoint,
    set_aside,
    stale_checkpoints,
)
from torchtitan_dp.checkpoint.safe_load import load

# isort: split
from torchtitan.components.checkpoint import AsyncMode


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


def test_setting_aside_never_overwrites(tmp_path):
    folder = tmp_path / "checkpoint"
    for i in range(2):
        dcp.save({"value": i}, checkpoint_id=folder / "step-4", no_dist=True)
        kept = set_aside(str(folder), 4)
        state = {"value": -1}
        load(state, kept, no_dist=True)
        assert state == {"value": i}
    assert os.listdir(folder) == []


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
