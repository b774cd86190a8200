"""Hazard 69, its second half, and 70: weights that are not finite, which spend epsilon on noise,
and a resume's own schedule: it must train as its files say."""

import copy
import re
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.lr_scheduler import build_lr_schedulers

from tests import build
from tests.checkpoint.test_resume import Folder, steps_saved
from tests.processes.runs import TIMEOUT_S, privacy, with_sigma
from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint import manager
from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.models.hugging_face import on_meta, shape
from torchtitan_dp.models.hugging_face_weights import export
from torchtitan_dp.models.parallelize import build_optimizers
from torchtitan_dp.models.parameters import first_overflow, overflow
from torchtitan_dp.release.__main__ import empty_model, load_weights
from torchtitan_dp.report.run_folder import open_run, status_rows

BAD = [float("nan"), float("inf"), float("-inf"), 3e36]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run to its end, step 4, with checkpoints at steps 2 and 4."""
    folder = Folder(tmp_path_factory.mktemp("finished"), *with_sigma(1))
    folder.train()
    return folder


# An interval of 1: the step's own save looks first. Of 100: ranks agree after the step.
@pytest.mark.parametrize("interval", [1, 100])
def test_row69_a_run_ends_at_the_step_after_which_weights_are_not_finite(
    finished, tmp_path, interval
):
    folder = Folder(tmp_path, *with_sigma(1), copy_of=finished)
    spent = privacy(folder.out)["epsilon"]
    options = ("--training.steps=8", "--optimizer.lr=1e37", f"--checkpoint.interval={interval}")
    with folder.start(*options) as run:
        assert run.process.wait(TIMEOUT_S) == 1, run.output()
    (line,) = set(re.findall(r"error: .*", run.output()))  # on all ranks alike
    assert line.startswith("error: optimizer.lr = 1e+37: after step 5 the weights are not finite")
    assert "goes on from step-4" in line
    assert "Traceback" not in run.output()
    assert sorted(steps_saved(folder)) == [2, 4]
    assert folder.steps_begun() == 5
    status = {row.name: row.value for row in status_rows(open_run(str(folder.out)))}
    assert status["state"].startswith("stopped: optimizer.lr = 1e+37: after step 5")
    if interval == 1:
        return
    assert "Training starts at step 5" in folder.train("--training.steps=5")  # the remedy works
    assert privacy(folder.out)["epsilon_executed"] > privacy(folder.out)["epsilon"] > spent
    assert not (folder.out / "fault.txt").exists()


def checkpointer(model, **more):
    """A stand-in for one whose rank is alone."""
    return SimpleNamespace(
        _named=list(model.named_parameters()), _average=None, enable=False, folder="", **more
    )


@pytest.mark.parametrize("last", [True, False])
def test_row69_no_checkpoint_is_written_of_such_weights(monkeypatch, last):
    monkeypatch.setattr(manager.dist, "all_reduce", lambda *_, **__: None)
    saved = MagicMock()
    monkeypatch.setattr(manager.CheckpointManager, "save", saved)
    fake = object.__new__(Checkpointer)
    model = nn.Linear(2, 2)
    vars(fake).update(vars(checkpointer(model, _config=build.config(), start=Start())))
    fake.enable, fake.interval, fake.load_only = not last, 2, False
    fake.enable_first_step_checkpoint, fake.save_future = False, None
    fake.async_mode, fake._under_way, fake.on_saved = manager.AsyncMode.DISABLED, None, MagicMock()
    fake.save(2, last_step=last)
    assert saved.call_count == 1
    assert fake.on_saved.call_args_list == (
        [] if last else [call(2)]
    )  # without checkpoints, or with
    with torch.no_grad():
        model.bias[0] = torch.nan
    with pytest.raises(Fault, match="after step 2 the weights are not finite"):
        fake.save(2, last_step=last)
    assert saved.call_count == 1
    assert fake.on_saved.call_count == (not last)
    fake.enable = False


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (Start("c/step-4", "checkpoint.folder", True, 4), "from the one before"),
        (Start("given", "model.hf_assets_path"), "use an intact copy"),
    ],
)
def test_row69_such_weights_are_not_trained_on(monkeypatch, start, words):
    monkeypatch.setattr(manager.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(manager.dist, "all_gather_object", lambda names, own: names.append(own))
    model = nn.Linear(2, 2)
    fake = checkpointer(model, start=start)
    Checkpointer._require_finite_start(fake)
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    with pytest.raises(
        Fault, match=f"{start.key} = '{start.place}': weight is missing or not finite.*{words}"
    ):
        Checkpointer._require_finite_start(fake)


@pytest.mark.parametrize("bad", BAD)
def test_row69_such_weights_are_not_released(tmp_path, bad):
    model = empty_model(build.ARGS)
    held = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    dcp.save(held, checkpoint_id=tmp_path / "whole", no_dist=True)
    load_weights(str(tmp_path / "whole"), model)
    held["model.model.norm.weight"][0] = bad
    dcp.save(held, checkpoint_id=tmp_path / "broken", no_dist=True)
    with pytest.raises(ValueError, match=r"norm\.weight is not finite there"):
        load_weights(str(tmp_path / "broken"), model)


# --- the schedule and the optimizer's settings of a resume ----------------------------------------

BEFORE = ("--training.steps=4", "--lr_scheduler.warmup_steps=1", "--optimizer.weight_decay=0.1")
CHANGES = {
    "another lr": ("--training.steps=8", "--optimizer.lr=7e-5"),
    "more steps after the end": ("--training.steps=8",),
    "a longer warmup": ("--training.steps=8", "--lr_scheduler.warmup_steps=7"),
    "another decay": (
        *("--training.steps=8", "--lr_scheduler.decay_ratio=0.25"),
        *("--lr_scheduler.decay_type=cosine", "--lr_scheduler.min_lr_factor=0.2"),
    ),
    "other settings": (
        *("--training.steps=8", "--optimizer.weight_decay=0.3", "--optimizer.beta1=0.5"),
        *("--optimizer.beta2=0.7", "--optimizer.eps=1e-5", "--optimizer.implementation=foreach"),
    ),
    "a decoupled decay": ("--training.steps=8", "--optimizer.name=Adam"),
}


def parts(*options):
    """A model's optimizers and schedules, as TorchTitan builds them from a configuration."""
    settings = build.config(*BEFORE, "--optimizer.implementation=for-loop", *options)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizers = build_optimizers([model], settings.optimizer, MagicMock(), None)
    schedules = build_lr_schedulers(optimizers, settings.lr_scheduler, settings.training.steps)
    return settings, model, optimizers, schedules


def stepped(model, optimizers, schedules, steps):
    """The rates of the steps that are taken."""
    rates = []
    for _ in range(steps):
        rates.append(schedules.schedulers[0].get_last_lr()[0])
        assert [group["lr"] for o in optimizers for group in o.param_groups] == rates[-1:]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers.step()
        schedules.step()
    return rates


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["AdamW", "MomentumSGD"])
@pytest.mark.filterwarnings("error")
def test_row70_the_steps_of_a_resume_are_its_configurations(name, changes):
    """Rates and settings are those of a run with the new configuration from its first step on."""
    if name == "MomentumSGD" and "--optimizer.name=Adam" in changes:
        pytest.skip("another state: refused")
    named = f"--optimizer.name={name}"
    _, model, optimizers, schedules = parts(named)
    stepped(model, optimizers, schedules, 4)
    saved = copy.deepcopy((optimizers.state_dict(), schedules.state_dict()))

    settings, other, resumed, resumed_schedules = parts(named, *changes)
    other.load_state_dict(model.state_dict())
    before = [manager._settings(optimizer) for optimizer in resumed]
    resumed.load_state_dict(saved[0])
    resumed_schedules.load_state_dict(saved[1])
    fake = SimpleNamespace(
        states={manager.OPTIMIZER: resumed, manager.LR_SCHEDULER: resumed_schedules},
        start=Start("c", "checkpoint.folder", True, 4),
        _config=settings,
    )
    Checkpointer._follow_configuration(fake, before)

    _, whole, expected, expected_schedules = parts(named, *changes)
    rates = stepped(whole, expected, expected_schedules, 8)
    assert stepped(other, resumed, resumed_schedules, 4) == rates[4:]
    assert rates[4] > 0
    for optimizer, wanted in zip(resumed, expected, strict=True):
        assert manager._settings(optimizer) == manager._settings(wanted)
        assert {int(state["step"]) for state in optimizer.state.values()} == {8}


@pytest.mark.parametrize("bad", BAD)
def test_row69_one_value_that_is_not_finite_is_seen(bad):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    assert overflow(model.parameters()).item() == 0.0
    assert first_overflow(model.named_parameters()) == ""
    with torch.no_grad():
        model[1].weight[1, 0] = bad
    assert overflow(model.parameters()).item() == 1.0
    assert first_overflow(model.named_parameters()) == "1.weight"


@pytest.mark.parametrize("lora", [(), ("--lora.rank=2", "--lora.targets=q_proj")])
def test_row69_such_weights_are_not_exported(tmp_path, lora):
    settings = build.config(f"--job.dump_folder={tmp_path}", *lora)
    args = shape(settings)
    args.update_from_config(settings)
    model = on_meta(args).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    export(model, settings)
    name = f"model.model.layers.0.self_attn.q_proj.{'lora_b.' if lora else ''}weight"
    with torch.no_grad():
        dict(model.named_parameters())[name][0, 0] = torch.nan
    (tmp_path / "hf").rename(tmp_path / "before")
    with pytest.raises(ValueError, match=r"is not finite in .*32, so no model is written"):
        export(model, settings)
    assert not (tmp_path / "hf").exists()
