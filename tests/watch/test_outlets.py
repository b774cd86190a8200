"""The table of scalars, docs/watching.md, which shows it, and the sinks: who gets which scalars."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from torchtitan_dp.base.process import Fault
from torchtitan_dp.train import check, outlets
from torchtitan_dp.train.outlets import SCALARS, PublicLines, TensorBoard, find, tag


def test_the_public_ones_are_these_alone() -> None:
    public = {scalar.name for scalar in SCALARS if scalar.public}
    assert public == {"lr", "epsilon", "noise_multiplier", "heldout_loss_noised"}


def test_sections() -> None:
    """An unknown scalar is not private."""
    for name in ("grad_norm_of_mrs_miller", "epsilon/", "LR", "lr_of_record"):
        assert find(name) is None
        assert tag(name, private=True) == f"not_private/{name}"
    assert tag("lr", private=True) == "private_to_publish/lr"
    assert tag("heldout_loss_at/0-127", private=True) == "not_private/heldout_loss_at/0-127"
    tags = {tag(scalar.name, private=False) for scalar in SCALARS}
    assert tags == {f"not_private/{scalar.name}" for scalar in SCALARS}


def test_the_document_has_the_table() -> None:
    rows = [f"| `{s.name}` | {s.words} | {'yes' if s.public else 'no'} |" for s in SCALARS]
    document = Path(__file__).parents[2] / "docs" / "watching.md"
    assert "\n".join(rows) in document.read_text(encoding="utf-8")


def opened(folder: Path, patch: pytest.MonkeyPatch, rank: int, private: bool, **keys: bool) -> Any:
    """The outlets of a rank, and the tracker in W&B's place."""
    tracker = MagicMock()
    patch.setattr(outlets.dist, "get_rank", lambda: rank)
    patch.setattr(outlets, "WandB", tracker)
    metrics = {"save_tb_folder": "tb", "enable_tensorboard": True}
    metrics |= {"enable_wandb": True, **keys}
    job = SimpleNamespace(dump_folder=str(folder))
    config: Any = SimpleNamespace(job=job, metrics=SimpleNamespace(**metrics))
    return outlets.open_outlets(config, 0, private=private), tracker.return_value


@pytest.mark.parametrize("private", [True, False])
def test_a_tracker_gets_at_the_end_what_may_be_published(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, tracker = opened(tmp_path, monkeypatch, 0, private, enable_tensorboard=False)
    found.log({"lr": 1e-3, "epsilon": 2.0, "loss": 3.0, "new": 4.0}, 3)
    assert not tracker.log.called
    found.send()
    public = {"private_to_publish/lr": 1e-3, "private_to_publish/epsilon": 2.0}
    assert [call.args for call in tracker.log.call_args_list] == [(public, 3)] * private
    assert (tmp_path / "public.jsonl").exists() == private
    if private:
        assert json.loads((tmp_path / "public.jsonl").read_text()) == [3, public]


def test_steps_that_a_crash_took_back_leave_the_curve(tmp_path: Path) -> None:
    folder = str(tmp_path / "tb")
    for step, steps in ((0, range(1, 7)), (4, range(5, 9))):
        board = TensorBoard(folder, step)
        for number in steps:
            board.log({"private_to_publish/lr": float(step)}, number)
        board.close()
    scalars = EventAccumulator(folder).Reload().Scalars("private_to_publish/lr")
    assert [e.step for e in scalars] == list(range(1, 9))
    assert [e.value for e in scalars] == [0.0] * 4 + [4.0] * 4


def test_a_tracker_that_cannot_be_reached_gets_all_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger(), "propagate", True)
    tracker = MagicMock()
    tracker.side_effect = [Fault("metrics.enable_wandb = true: no\nkey"), tracker.return_value]
    monkeypatch.setattr(outlets, "WandB", tracker)
    for start in range(3):
        lines = PublicLines(str(tmp_path), 2 * start)
        for step in (1, 2) if start == 0 else ():
            lines.log({"private_to_publish/lr": step / 8}, step)
        lines.send()
    assert [call.args[1] for call in tracker.return_value.log.call_args_list] == [1, 2]  # once
    assert tracker.call_args_list[0] == tracker.call_args_list[1]  # one time
    assert caplog.records[0].getMessage() == (
        "metrics.enable_wandb: not sent, after Fault: error: metrics.enable_wandb = true: no key; "
        "a rerun sends it again"
    )


def test_rank_0_alone_has_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(rank: int, private: bool = True, **keys: bool) -> list[str]:
        found, _ = opened(tmp_path, monkeypatch, rank, private, **keys)
        return [type(sink).__name__ for sink in found._sinks]

    assert kinds(0) == ["TensorBoard", "PublicLines"]
    assert kinds(0, private=False) == ["TensorBoard"]
    assert kinds(1) == []


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(metrics=SimpleNamespace(enable_wandb=True))
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    line = "metrics.enable_wandb = true: needs pip install "
    with pytest.raises(ValueError, match=f"^{line}'torchtitan-dp.wandb.'$"):
        check.check_packages(config)
