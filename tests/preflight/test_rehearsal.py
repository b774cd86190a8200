"""A run is rehearsed on padding: nothing changes by it, and what fails fails for all records."""

import copy
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torch.utils._pytree import tree_map_only
from torchtitan.protocols import train_spec

from tests import build
from tests.hazards.test_trainer import feed
from tests.processes.ranks import on_ranks
from tests.processes.runs import arguments, with_sigma, write_records
from torchtitan_dp.checkpoint.start import decision
from torchtitan_dp.config.derived import ladder
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data.batching import Microbatch
from torchtitan_dp.gradients import optimizer as optimizer_module
from torchtitan_dp.plan.fake_step import MemoryTracker
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.train import rehearsal
from torchtitan_dp.train import trainer as train
from torchtitan_dp.train.processor import SampleStatistics
from torchtitan_dp.train.rehearsal import rehearse
from torchtitan_dp.train.spec import register

STEPS = 3
TWO = ("--training.local_batch_size=2",)
HOW = {
    "microbatch": (),
    "offload": ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs"),
    "grad_sample": TWO,
    "secure": ("--privacy.secure_noise", *TWO),
}


def command(root: Path, *overrides: str) -> list[str]:
    """A tiny run in `root / "run"` on records that lie beside it."""
    data = root / "records"
    if not data.exists():
        write_records(data)
    return arguments(
        root / "run",
        *(data, "--model.flavor=debug", f"--training.steps={STEPS}", "--privacy.debug_seed=5"),
        *("--checkpoint.interval=100", "--metrics.no-enable_tensorboard"),
        "--parallelism.context_parallel_degree=1",
        *with_sigma(1),
        *overrides,
    )


def start(argv: list[str]) -> Any:
    """A trainer in a process that may have had one before."""
    config = load_config(argv, dist.get_world_size())
    train_spec._extra_train_specs.clear()
    decide = decision(config)
    register(config, decide=decide)
    os.makedirs(config.job.dump_folder, exist_ok=True)
    return train.DPTrainer(config, decide)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """On one process: copies of the local tensors."""
    local = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in state.items()}
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in local.items()}


def everything(trainer: Any) -> dict[str, Any]:
    """What a rehearsal must leave alone."""
    (model,) = trainer.model_parts
    return {
        **whole(model.state_dict()),
        "lr": copy.deepcopy(trainer.lr_schedulers.state_dict()),
        "ledger": trainer.ledger.to_json(),
        "begun": trainer.books.log.count,
        "rng": torch.get_rng_state(),
        "step": trainer.step,
        "gradients": [parameter.grad for parameter in model.parameters()],
        "rates": [group["lr"] for group in trainer.optimizers.optimizers[0].param_groups],
        "tokens": trainer.metrics_processor.ntokens_since_last_log,
    }


def optimizer_state(trainer: Any) -> list[torch.Tensor]:
    (optimizer,) = trainer.optimizers.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in parameters]  # [] would make one
    return [whole({"": s[key]})[""] for s in states if s for key in sorted(s)]


def same(first: Any, second: Any) -> bool:
    """Bit by bit: -0.0 is not 0.0."""

    def bits(x: torch.Tensor) -> Any:
        return x.shape, x.dtype, x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    one, other = (tree_map_only(torch.Tensor, bits, tree) for tree in (first, second))
    return bool(one == other)


def trained(argv: list[str], rehearsed: bool) -> tuple[dict[str, Any], list[torch.Tensor], str]:
    """A run to its end: weights and all else, optimizer state, and the changes, if a rehearsal
    made any."""
    changes = []

    def watched(trainer: Any) -> None:
        if not rehearsed:
            return
        before, state = everything(trainer), optimizer_state(trainer)
        trainer.metrics_processor.time_last_log = time.perf_counter()
        rehearse(trainer)
        after, made = everything(trainer), optimizer_state(trainer)
        changes.extend(key for key in before if not same(before[key], after[key]))
        total = trainer.clipped_sum
        if total.accumulating or not total.is_laid_out or total._whole.any():
            changes.append("sum")
        if not made or (state and not same(state, made)):
            changes.append("optimizer")
        if not state and any(value.any() for value in made):
            changes.append("fresh optimizer")

    with mock.patch.object(train, "rehearse", watched):
        trainer = start(argv)
        try:
            trainer.train()
            return everything(trainer), optimizer_state(trainer), ", ".join(changes)
        finally:
            trainer.close()


def outcomes(root: Path, *overrides: str) -> list[Any]:
    """What the same run comes to with a rehearsal, which must change nothing, and without one."""
    found = []
    for rehearsed in (True, False):
        argv = command(root / str(rehearsed), *overrides)
        ((after, state, changed),) = on_ranks(1, trained, argv, rehearsed)
        assert changed == ""
        assert after.pop("step") == STEPS
        after.pop("ledger")
        found.append((after, state))
    return found


@pytest.mark.thorough_cases("offload", "secure")
@pytest.mark.parametrize("how", ["microbatch", "offload", "secure"])
def test_row47_a_rehearsal_changes_nothing(tmp_path, how):
    """Weights, optimizer state and what comes after are the same bits with and without it."""
    first, other = outcomes(tmp_path, *HOW[how])
    assert same(first, other)


# What is run is what a step runs.


def stand_in(root: Path, device: str) -> Any:
    """A trainer that has a configuration and padding, and nothing else of its own."""
    trainer = mock.MagicMock()
    trainer.device = torch.device(device)
    trainer.job_config = load_config(command(root), 1)
    trainer.metrics_processor.time_last_log = 0.0
    trainer.feed, trainer.step = feed(), 0
    trainer.books.settings.mechanism.sample_rate = 0.5
    return trainer


def test_row47_every_length_is_run_beside_the_optimizers_state(tmp_path):
    """On stand-ins that note what is asked of them, in order."""
    did: list[Any] = []
    trainer = stand_in(tmp_path, "cpu")
    trainer.accumulate = lambda microbatch, _: did.append(microbatch)
    trainer.dp_optimizer.rehearse = lambda *_: did.append("update")
    trainer.clipped_sum.reset = lambda: did.append("reset")
    rehearse(trainer)
    first, update, *rungs, last_update, reset = did
    lengths = [length for length in ladder(trainer.job_config) for _ in range(2)]  # cold, timed
    assert [m.labels_BT.shape[1] for m in rungs] == lengths
    assert first.labels_BT.shape == rungs[0].labels_BT.shape
    assert (update, last_update, reset) == ("update", "update", "reset")
    assert not any(m.valid_B.any() or (m.labels_BT >= 0).any() for m in rungs)


class Device:
    """Stands in for an accelerator that is behind its host: what is queued runs, takes its seconds
    or fails when the host waits for it."""

    def __init__(self, seconds: float = 0.0, failing: int = 0) -> None:
        self.now, self.seconds, self.failing = 0.0, seconds, failing
        self.queued: list[int] = []
        self.lengths: list[int] = []

    def launch(self, microbatch: Any, _: Any) -> None:
        self.queued.append(microbatch.labels_BT.shape[1])

    def clock(self) -> float:
        return self.now

    def synchronize(self, _: Any = None) -> None:
        queued, self.queued = self.queued, []
        self.lengths += queued
        self.now += self.seconds * len(queued)
        if self.failing in queued:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def rehearsed_on(device: Device, root: Path) -> Any:
    """A stand-in of a trainer that was rehearsed on that device."""
    trainer = stand_in(root, "cuda")
    trainer.accumulate = device.launch
    with (
        mock.patch.object(torch.accelerator, "synchronize", device.synchronize),
        mock.patch.object(rehearsal.time, "perf_counter", side_effect=device.clock),
    ):
        rehearse(trainer)
    return trainer


def test_row47_collectives_must_outwait_a_device_behind_its_host(tmp_path):
    """NCCL's time-out counts from the launch: 100 s for four microbatches of the longest."""
    device = Device(seconds=25.0)
    trainer = rehearsed_on(device, tmp_path)
    assert trainer.metrics_processor.time_last_log == device.now == 25.0 * len(device.lengths)
    *_, cold, timed = device.lengths  # the first compiles
    assert cold == timed == max(device.lengths)
    with pytest.raises(SystemExit) as refusal:
        rehearsed_on(Device(seconds=26.0), tmp_path)
    line = str(refusal.value)
    assert line.startswith("error: comm.train_timeout_seconds = 100: a microbatch of 1 sample of ")
    assert "takes 26.0 s" in line
    assert "set it to 125 or more" in line
    assert len(line.splitlines()) == 1


class Operators(MemoryTracker):
    """Also notes what runs."""

    def __init__(self) -> None:
        super().__init__("all")
        self.operators: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.operators.append((str(func), shapes))
        return super().__torch_dispatch__(func, types, args, kwargs)


def traces(argv: list[str]) -> list[tuple[int, int, bool]]:
    """Of each length: the peak bytes of a microbatch of padding, and of a full one; and whether
    both run the same operators on the same shapes."""
    trainer = start(argv)
    generator = torch.Generator().manual_seed(0)

    def full(padding: Microbatch) -> Microbatch:
        tokens, labels = (
            torch.randint(0, 256, padding.tokens_BT.shape, generator=generator).to(trainer.device)
            for _ in range(2)
        )
        return Microbatch(tokens, labels, torch.ones_like(padding.valid_B), padding.positions_B)

    found = []
    try:
        rungs = ladder(trainer.job_config)
        trainer.accumulate(trainer.feed.padding(rungs[-1]), SampleStatistics())
        with Operators() as tracker:
            for length in rungs:
                padding = trainer.feed.padding(length)
                row, ran = [], []
                for microbatch in (full(padding), padding, full(padding)):  # the first warms up
                    tracker.start_over()
                    before, tracker.operators = tracker.peak_bytes, []
                    trainer.accumulate(microbatch, SampleStatistics())
                    row.append(tracker.peak_bytes - before)
                    ran.append(tracker.operators)
                found.append((row[1], row[2], ran[1] == ran[2] and len(ran[1]) > 100))
    finally:
        trainer.close()
    return found


@pytest.mark.thorough_cases("offload")
@pytest.mark.parametrize("how", ["microbatch", "offload", "grad_sample"])
def test_row47_padding_takes_the_path_and_the_memory_of_samples(tmp_path, how):
    """No operator is left out where all labels are ignored."""
    argv = command(tmp_path, *HOW[how], "--training.seq_len=256", "--training.loss_chunk_tokens=32")
    (found,) = on_ranks(1, traces, argv)
    assert len(found) == 8
    assert all(padding == samples > 0 for padding, samples, _ in found), found
    assert all(alike for _, _, alike in found)
    assert found[0] < found[-1]


# What fails.


def ending(argv: list[str], where: str, what: BaseException) -> tuple[str, list[str], list[int]]:
    """The line with which a run ends whose `where` fails for samples longer than 8 tokens; what
    its folder then holds; and the steps that were begun."""
    trainer = start(argv)

    def failing(real: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if where == "update" or arguments[0].shape[1] > 8:
                raise what
            return real(*arguments)

        return run

    if where == "update":
        trainer.dp_optimizer.rehearse = failing(None)
    else:
        object.__setattr__(trainer, "sample_losses", failing(trainer.sample_losses))
    steps = AssertionError("a step was taken")
    try:
        with (
            mock.patch.object(train.DPTrainer, "train_step", side_effect=steps),
            pytest.raises(SystemExit) as fault,
        ):
            trainer.train()
    finally:
        trainer.close()
    folder = trainer.job_config.job.dump_folder
    return str(fault.value), sorted(os.listdir(folder)), [trainer.books.log.count]


OF_ONE, OF_TWO = (f"a microbatch of {n} of 16 tokens: " for n in ("1 sample", "2 samples"))
NO_MEMORY = f"{OF_ONE}out of memory ("
UPDATE = "an update (noise and optimizer): "
CPU_SAYS = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you"
KERNEL = "Could not run 'aten::flash' with arguments"
COMPILER = "Failed to find C compiler. Please specify via CC environment variable."


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), NO_MEMORY),
        (MemoryError(), NO_MEMORY),
        (RuntimeError(CPU_SAYS), NO_MEMORY),
        (NotImplementedError(f"{KERNEL}\nof"), f"{OF_TWO}NotImplementedError: {KERNEL}"),
        (RuntimeError(COMPILER), f"{UPDATE}RuntimeError: {COMPILER}"),
    ],
    ids=("device", "host", "cpu", "kernel", "update"),
)
def test_row47_what_fails_is_one_line_before_step_1(tmp_path, error, line):
    batch = f"--training.local_batch_size={2 if OF_TWO in line else 1}"
    where = "update" if UPDATE in line else "step"
    ((said, files, begun),) = on_ranks(1, ending, command(tmp_path, batch), where, error)
    line = f"error: rehearsal before the first step: {line}"
    if "out of " in line:
        assert said.startswith(line)
        fits = "training.seq_len = 8 (samples of 8 tokens passed), "
        assert f"; what would fit: {fits}" in said
        assert "activation_checkpoint.mode = 'full' (now 'none')" in said
        assert said.endswith("more ranks")
        assert "\n" not in said
    else:
        assert said == line
    assert begun == [0]
    assert "privacy.json" not in files
    assert not any("steps_executed" in name for name in files)


def noise_of_a_rehearsal_and_a_step():
    """What each asks noise for: (name, shape, standard deviation)."""
    asked = []

    def record(flat, *, std, key, name, start):
        asked.append((name, tuple(flat.shape), std, start))

    parameters = build.build().parameters
    terms = {"noise_multiplier": 0.7, "max_grad_norm": 2.0, "expected_batch_size": 4}
    adamw = torch.optim.AdamW(parameters.values())
    optimizer = optimizer_module.DPOptimizer(adamw, parameters, **terms)

    def clipped_sum():
        return {name: torch.zeros(p.to_local().numel()) for name, p in parameters.items()}

    with mock.patch.object(optimizer_module, "add_gaussian_noise_", record):
        optimizer.rehearse(clipped_sum(), (1.0,))
        rehearsed = asked.copy()
        asked.clear()
        optimizer.step(clipped_sum(), StepNoise(bytes(32)))
    return rehearsed, asked


def test_a_rehearsal_compiles_the_noise_of_a_step():
    """On CUDA noise is compiled at its first call: that must be before the first step is begun, in
    the shapes and with the standard deviation of a step."""
    ((rehearsed, asked),) = on_ranks(1, noise_of_a_rehearsal_and_a_step)
    assert rehearsed
    assert rehearsed == asked
