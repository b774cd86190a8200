"""The table of scalars, docs/watching.md, which shows it, and the sinks: who gets which scalars."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from torchtitan_dp.config import JobConfig
from torchtitan_dp.preflight import check
from torchtitan_dp.process import Fault
from torchtitan_dp.watch import outlets
from torchtitan_dp.watch.outlets import SCALARS, Guarded, Later, TensorBoard, find, tag

DOCUMENT = Path(__file__).parents[2] / "docs" / "watching.md"


def test_the_public_ones_are_these_alone() -> None:
    public = {scalar.name for scalar in SCALARS if scalar.public}
    of_the_ledger = {"epsilon", "epsilon_planned", "noise_multiplier", "heldout_loss_noised"}
    assert public == {"lr", *of_the_ledger}


@pytest.mark.parametrize("name", ["grad_norm_of_mrs_miller", "epsilon/", "LR", "lr_of_record"])
def test_an_unknown_scalar_is_not_private(name: str) -> None:
    assert find(name) is None
    assert tag(name, private=True) == f"not_private/{name}"


def test_sections() -> None:
    assert tag("lr", private=True) == "private_to_publish/lr"
    assert tag("loss", private=True) == "not_private/loss"
    assert tag("heldout_loss_at/0-127", private=True) == "not_private/heldout_loss_at/0-127"
    tags = {tag(scalar.name, private=False) for scalar in SCALARS}
    assert tags == {f"not_private/{scalar.name}" for scalar in SCALARS}


def test_the_document_has_the_table() -> None:
    rows = [f"| `{s.name}` | {s.words} | {'yes' if s.public else 'no'} |" for s in SCALARS]
    assert "\n".join(rows) in DOCUMENT.read_text(encoding="utf-8")


METRICS = {"lr": 1e-3, "epsilon": 2.0, "loss": 3.0, "new": 4.0}


def sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, private: bool, everything: bool
) -> dict[str, float]:
    """What a service got of one step."""
    service = MagicMock()
    monkeypatch.setattr(outlets.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(outlets, "WandB", lambda *_, **__: service)
    keys = {"enable_tensorboard": False, "enable_mlflow": False, "send_not_private": everything}
    found = outlets.open_outlets(config_of(folder, **keys), 0, private=private)
    found.log(METRICS, 3)
    assert everything or not service.log.called
    found.send()
    return service.log.call_args.args[0] if service.log.called else {}


def config_of(folder: Path, **metrics: bool) -> Any:
    keys: dict[str, Any] = {"save_tb_folder": "tb", "save_for_all_ranks": False}
    keys |= {"send_not_private": False, "enable_tensorboard": True}
    keys |= {"enable_wandb": True, "enable_mlflow": True, **metrics}
    job = SimpleNamespace(dump_folder=str(folder))
    return SimpleNamespace(job=job, metrics=SimpleNamespace(**keys))


def test_services_get_what_may_be_published_or_all_where_the_user_says_so(
    tmp_path, monkeypatch
) -> None:
    public = {"private_to_publish/lr": 1e-3, "private_to_publish/epsilon": 2.0}
    others = {"not_private/loss": 3.0, "not_private/new": 4.0}
    assert sent(tmp_path, monkeypatch, private=True, everything=False) == public
    assert sent(tmp_path, monkeypatch, private=False, everything=False) == {}
    assert sent(tmp_path, monkeypatch, private=True, everything=True) == public | others
    assert len(sent(tmp_path, monkeypatch, private=False, everything=True)) == 4


def test_a_service_that_fails_ends_no_run_and_is_left_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr(logging.getLogger(), "propagate", True)
    service = MagicMock()
    service.log.side_effect = ConnectionError("no route\nto host")
    guarded = Guarded("metrics.enable_mlflow", service)
    guarded.log(METRICS, 1)
    guarded.log(METRICS, 2)
    guarded.close()
    assert service.log.call_count == 1
    assert not service.close.called
    (record,) = caplog.records
    assert record.getMessage() == (
        "metrics.enable_mlflow: nothing more is sent until the next start, after "
        "ConnectionError: no route to host"
    )


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


def test_a_service_that_cannot_be_reached_gets_all_at_the_next_start(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(logging.getLogger(), "propagate", True)
    service, works = MagicMock(), False

    def open_sink(time_of_all: float | None) -> Any:
        if not works:
            raise Fault("metrics.enable_wandb = true: no key")
        return service

    for start in range(3):
        works = start > 0
        later = Later(str(tmp_path), 2 * start, {"metrics.enable_wandb": open_sink})
        for step in (1, 2) if start == 0 else ():
            later.log({"private_to_publish/lr": step / 8}, step)
        later.send()
    assert [call.args[1] for call in service.log.call_args_list] == [1, 2]  # once
    assert caplog.records[0].getMessage() == (
        "metrics.enable_wandb: not sent, after Fault: error: metrics.enable_wandb = true: no key; "
        "the same command sends it again"
    )


def opened(tmp_path, monkeypatch, rank: int, private: bool = True, **metrics: bool) -> list[str]:
    """The sinks that a rank opens."""
    monkeypatch.setattr(outlets.dist, "get_rank", lambda: rank)
    for name in ("WandB", "MLflow"):
        monkeypatch.setattr(outlets, name, lambda *_, name=name, **__: SimpleNamespace(name=name))
    found = outlets.open_outlets(config_of(tmp_path, **metrics), 0, private=private)
    return [
        sink._sink.name if isinstance(sink, Guarded) else type(sink).__name__  # type: ignore[attr-defined]
        for sink in found._sinks
    ]


def test_rank_0_alone_has_services_and_without_privacy_if_all_is_sent(
    tmp_path, monkeypatch
) -> None:
    live = ["TensorBoard", "WandB", "MLflow"]
    for private, when_sent_later in ((True, ["TensorBoard", "Later"]), (False, ["TensorBoard"])):
        assert opened(tmp_path, monkeypatch, 0, private) == when_sent_later
        assert opened(tmp_path, monkeypatch, 0, private, send_not_private=True) == live
    assert opened(tmp_path, monkeypatch, 1) == []
    assert opened(tmp_path, monkeypatch, 1, save_for_all_ranks=True) == ["TensorBoard"]
    assert (tmp_path / "tb" / "rank_1").is_dir()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line(monkeypatch, package: str) -> None:
    config = JobConfig()
    config.metrics.enable_wandb = False  # TorchTitan's key
    setattr(config.metrics, f"enable_{package}", True)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"^metrics\.enable_{package} = true: the package") as e:
        check.check_packages(config)
    assert f"pip install 'torchtitan-dp[{package}]'" in str(e.value)
