"""A run's checkpoints on disk: what is finished, what is dropped, and what is set aside."""

import os

import torch.distributed.checkpoint as dcp

from torchtitan_dp.checkpoint.folder import drop_unfinished, newest_finished_checkpoint, set_aside
from torchtitan_dp.checkpoint.safe_load import load


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
