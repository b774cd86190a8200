"""Predicts memory by running the step under fake tensors, for lengths, AC modes and ranks.

A run's own step is predicted with all layers. The longest sample is found with few: what is alive
in a stretch of the step (the loss head's, the last block's backward, the first one's) grows by the
same bytes with each layer, two models of few layers determine any, and the peak is the highest
stretch's.

`python -m torchtitan_dp.plan.prediction` answers a task on stdin (`memory.predict`).
"""

import bisect
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import cast

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed.host_memory import InputsOnHost
from torchtitan_dp.gradients.fsdp import free_gathered
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.fake_step import MemoryTracker, Step, fake_world, tracking
from torchtitan_dp.plan.memory import (
    CATEGORIES,
    LONGEST,
    MODES,
    MemoryPlan,
    communicators,
    limit_bytes,
)

FEW_LAYERS = (4, 5)  # so that each stretch of a deeper model is there (`fake_step`)
_NICER = 5

Found = int | None
StepOf = Callable[[JobConfig, ModelArgs, MemoryTracker], Step]


class Model:
    """Predicts the peaks of a model that is built once, for samples of any length."""

    def __init__(self, config: JobConfig, args: ModelArgs, mode: str, make: StepOf = Step) -> None:
        """Build a step with this mode of activation checkpointing, and predict its update."""
        config = copy.deepcopy(config)
        config.activation_checkpoint.mode = mode
        self._stack = contextlib.ExitStack()
        self._tracker = self._stack.enter_context(tracking())
        self._step = make(config, args, self._tracker)
        self._tracker.start_over()
        self._step.update()
        self.update = self._tracker.peak_bytes, dict(self._tracker.peak)

    def at(self, seq_len: int) -> tuple[int, dict[str, int]]:
        """Predict the peak of update and microbatch, in all and by category."""
        self.stretches(seq_len)
        microbatch = self._tracker.peak_bytes, dict(self._tracker.peak)
        return max(self.update, microbatch, key=lambda found: found[0])

    def stretches(self, seq_len: int) -> dict[str, int]:
        """Predict each stretch's peak bytes, of an update and of the microbatch after it."""
        free_gathered(self._step.model)
        self._tracker.start_over()
        self._step.microbatch(seq_len)
        return self._tracker.stretches | {"update": self.update[0]}

    @property
    def host_bytes(self) -> int:
        """The host's page-locked memory for the longest sample so far."""
        around = self._step.model.around_block
        return around.host_bytes if isinstance(around, InputsOnHost) else 0

    def close(self) -> None:
        """Free it: one model is tracked at a time."""
        self._stack.close()
        del self._step, self._tracker
        gc.collect()


def step_peak(config: JobConfig, args: ModelArgs, world_size: int, make: StepOf = Step) -> float:
    """Predict the peak bytes of a rank's step on samples of `training.seq_len`, in a fake world of
    its own, from few layers where those stand for all."""
    config = copy.deepcopy(config)
    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    with fake_world(world_size):
        mode = config.activation_checkpoint.mode
        return peak_of(config, args, mode, config.training.seq_len, make)


def peak_of(
    config: JobConfig, args: ModelArgs, mode: str, seq_len: int, make: StepOf = Step
) -> float:
    """Predict the peak bytes, from few layers where those stand for all."""
    layers = few_layers(args)
    if args.n_layers <= layers[1] or mode not in MODES:  # others are no line in layers
        return max(stretches_of(config, args, mode, seq_len, make).values())
    models = (dataclasses.replace(args, n_layers=n) for n in layers)
    few, more = (stretches_of(config, model, mode, seq_len, make) for model in models)
    share = (args.n_layers - layers[0]) / (layers[1] - layers[0])
    return max(few[name] + share * (more[name] - few[name]) for name in few.keys() & more.keys())


def stretches_of(
    config: JobConfig, args: ModelArgs, mode: str, seq_len: int, make: StepOf = Step
) -> dict[str, int]:
    """Predict each stretch of a step."""
    model = Model(config, args, mode, make)
    found = model.stretches(seq_len)
    model.close()
    return found


def few_layers(args: ModelArgs) -> tuple[int, int]:
    """Return how many of the first layers stand for all: two numbers, a period of the layers'
    windows apart, whose layers end as all do, and have each kind among those between."""
    windows, n_layers, few = args.windows(), args.n_layers, FEW_LAYERS[0]
    period = next(p for p in range(1, n_layers + 1) if windows[p:] == windows[: n_layers - p])
    few += (n_layers - few) % period + (period if period > 1 else 0)
    return few, few + period


def search(config: JobConfig, args: ModelArgs, world_size: int, mode: str, limit: int) -> Found:
    """Find the longest sample within `limit` bytes that is 2 x cp times a power of two, with a mode
    of activation checkpointing, in a fake world of its own."""
    unit = 2 * config.parallelism.context_parallel_degree
    lengths = [unit << power for power in range((LONGEST // unit).bit_length())]

    with fake_world(world_size):
        peak = functools.partial(peak_of, config, args, mode)
        fitting = bisect.bisect_right(lengths, float(limit), key=peak)
    return lengths[fitting - 1] if fitting else None


def answer(overrides: list[str], world_size: int, memory_gib: float, seek: bool) -> MemoryPlan:
    """Predict what `memory.predict` asks for, in a process that has no process group."""
    config = load_config(overrides, world_size)
    config.compile.enable = False
    args, own, seq_len = shape(config), config.activation_checkpoint.mode, config.training.seq_len
    groups = communicators(mesh_degrees(config))
    limit = limit_bytes(memory_gib, groups)
    searches = {
        mode: _beside(functools.partial(search, config, args, world_size, mode, limit))
        for mode in (MODES if seek else ())
    }
    with fake_world(world_size):
        model = Model(config, args, own)
        (_, parts), host_bytes = model.at(seq_len), model.host_bytes
        model.close()
    lengths = {mode: result() for mode, result in searches.items()}
    by_category = {name: parts.get(name, 0) for name in CATEGORIES}
    terms = world_size, seq_len, by_category, memory_gib, lengths
    return MemoryPlan(*terms, communicators=groups, host_bytes=host_bytes)


def _beside(function: Callable[[], Found]) -> Callable[[], Found]:
    """Run a function in a process forked from this one, which has no thread and no device, and
    return a function that waits for it. It ends by itself where this process was killed."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run() -> None:
        os.nice(_NICER)  # the step here is the longest part: it goes first where cores are few
        sender.send(function())

    fork.Process(target=run, daemon=True).start()
    sender.close()

    def result() -> Found:
        try:
            return cast(Found, receiver.recv())
        except EOFError:
            raise RuntimeError("a search for the longest sample ended without a result") from None

    return result


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(answer(*json.load(sys.stdin)))))
