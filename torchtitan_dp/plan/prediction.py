"""Predicts memory by running the step under fake tensors, for lengths, AC modes and ranks.

A run's own step is predicted with all layers; elsewhere few suffice. What is alive in a stretch of
the step (the loss head's, the last block's backward, the first one's) grows by the same bytes with
each layer and each token: two models of few layers, at two lengths, determine any, and the peak is
the highest stretch's. Lengths that are estimated close to the limit, short ones (below `LONG`) and
those beyond a window that no line has seen are predicted with all layers; so are all where few
miss the run's own peak by more than `TOLERANCE`.

`python -m torchtitan_dp.plan.prediction` answers a task on stdin (`memory.predict`).
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
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
ENOUGH_LAYERS = 8  # up to so many, a prediction with all layers is as quick
LONG = 4096  # tokens per rank, from which few layers suffice
CLOSE = 0.03  # of the limit: nearer to it, an extrapolation does not decide
TOLERANCE = 0.005  # of a peak: the most that an extrapolation may differ from the whole model's
_NICER = 5

Found = tuple[int | None, float | None]
MakeStep = Callable[[JobConfig, ModelArgs, MemoryTracker], Step]


class Model:
    """Predicts the peaks of a model that is built once, for samples of any length."""

    def __init__(
        self, config: JobConfig, args: ModelArgs, mode: str, make: MakeStep = Step
    ) -> None:
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


def step_peak(config: JobConfig, args: ModelArgs, world_size: int, make: MakeStep = Step) -> float:
    """Predict the peak bytes of a rank's step on samples of `training.seq_len`, in a fake world of
    its own, from few layers where those stand for all."""
    config, seq_len = copy.deepcopy(config), config.training.seq_len
    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    layers, mode = few_layers(args), config.activation_checkpoint.mode
    with fake_world(world_size):
        if args.n_layers <= layers[1] or mode not in MODES:  # others are no line in layers
            return max(stretches_of(config, args, mode, args.n_layers, [seq_len], make)[0].values())
        few, more = (stretches_of(config, args, mode, n, [seq_len], make)[0] for n in layers)
    both = few.keys() & more.keys()
    return max(of_layers(args.n_layers, few[name], more[name], layers) for name in both)


def stretches_of(
    config: JobConfig,
    args: ModelArgs,
    mode: str,
    n_layers: int,
    lengths: Sequence[int],
    make: MakeStep = Step,
) -> list[dict[str, int]]:
    """Predict each stretch of a step of so many layers, by length."""
    model = Model(config, dataclasses.replace(args, n_layers=n_layers), mode, make)
    found = [model.stretches(length) for length in lengths]
    model.close()
    return found


class Whole:
    """Peaks in bytes, by length, predicted with all layers."""

    def __init__(self, config: JobConfig, args: ModelArgs, mode: str) -> None:
        self.config, self.args, self.mode = config, args, mode
        self.known: dict[int, float] = {}
        self.update = math.inf  # the peak of one, after any estimate: no length changes it

    def estimate(self, *lengths: int) -> list[float]:
        """Return the peaks, or close estimates of them."""
        if wanted := [length for length in lengths if length not in self.known]:
            model = Model(self.config, self.args, self.mode)
            self.update = model.update[0]
            self.known |= {length: model.at(length)[0] for length in wanted}
            model.close()
        return [self.known[length] for length in lengths]

    def decide(self, seq_len: int) -> float:
        """Return the peak, estimated only where it is far from the limit."""
        return self.estimate(seq_len)[0]


class Extrapolated:
    """The same from few layers and two lengths; lengths close to the limit with all layers."""

    def __init__(self, whole: Whole, limit: int, unit: int) -> None:
        self._whole, self._limit = whole, limit
        self.short = LONG * whole.config.parallelism.context_parallel_degree
        self._lengths, self._layers = two_lengths(unit), few_layers(whole.args)
        self._lines: dict[str, tuple[float, float]] = {}  # a stretch's bytes at both lengths
        self.update = math.inf

    def estimate(self, *lengths: int) -> list[float]:
        (start, end), n_layers = self._lengths, self._whole.args.n_layers
        if not self._lines:
            of = self._whole.config, self._whole.args, self._whole.mode
            few, more = (stretches_of(*of, layers, self._lengths) for layers in self._layers)
            for name in few[0].keys() & more[0].keys():
                pairs = zip(few, more, strict=True)
                at = [of_layers(n_layers, a[name], b[name], self._layers) for a, b in pairs]
                self._lines[name] = at[0], at[1]
            self.update = self._lines["update"][0]
        return [
            max(a + (b - a) * (length - start) / (end - start) for a, b in self._lines.values())
            for length in lengths
        ]

    def decide(self, seq_len: int) -> float:
        bends = any(self._lengths[0] < window < seq_len for window in _windows(self._whole.args))
        if seq_len < self.short or bends:
            return self._whole.decide(seq_len)
        (guess,) = self.estimate(seq_len)
        close = abs(guess - self._limit) <= CLOSE * self._limit
        return self._whole.decide(seq_len) if close else guess


def few_layers(args: ModelArgs) -> tuple[int, int]:
    """Return how many of the first layers stand for all: two numbers, a period of the layers'
    windows apart, whose layers end as all do, and have each kind among those between."""
    windows, n_layers, few = _windows(args), args.n_layers, FEW_LAYERS[0]
    period = next(p for p in range(1, n_layers + 1) if windows[p:] == windows[: n_layers - p])
    few += (n_layers - few) % period + (period if period > 1 else 0)
    return few, few + period


def _windows(args: ModelArgs) -> list[float]:
    return [math.inf if window is None else window for window in args.windows()]


def of_layers(
    n_layers: int, few: float, more: float, layers: tuple[int, int] = FEW_LAYERS
) -> float:
    """Draw a line through what two numbers of layers take, and read it at `n_layers`."""
    share = (n_layers - layers[0]) / (layers[1] - layers[0])
    return few + share * (more - few)


def two_lengths(unit: int) -> tuple[int, int]:
    """Return the two lengths to extrapolate from."""
    return unit * 2**13, unit * 2**14


def longest(peaks: Whole | Extrapolated, limit: int, unit: int) -> int | None:
    """Find the longest sample within `limit` bytes that is `unit` times a power of two.

    From some thousand tokens a rank on, memory is a line in T: two predictions give the line, and
    where it meets the limit is predicted too.
    """
    short, long = two_lengths(unit)
    below, above = peaks.estimate(short, long)
    if peaks.update > limit:
        return None
    slope = max((above - below) / (long - short), 1.0)
    guess = max(min(long + (limit - above) / slope, LONGEST), unit)
    power = (int(guess) // unit).bit_length() - 1
    while power >= 0 and peaks.decide(unit * 2**power) > limit:
        power -= 1
    return unit * 2**power if power >= 0 else None


def search(config: JobConfig, args: ModelArgs, world_size: int, mode: str, limit: int) -> Found:
    """Find the longest sample with a mode of activation checkpointing, in a fake world of its own:
    its length, and, if few layers stood for all, their estimate of the peak at the run's own one.
    """
    own, unit = config.training.seq_len, 2 * config.parallelism.context_parallel_degree
    with fake_world(world_size):
        whole = Whole(config, args, mode)
        if args.n_layers <= max(ENOUGH_LAYERS, *few_layers(args)):
            return longest(whole, limit, unit), None
        few = Extrapolated(whole, limit, unit)
        found = longest(few, limit, unit)
        return found, few.estimate(own)[0] if own >= few.short else None


def answer(
    overrides: list[str], world_size: int, memory_gib: float, seek_longest: bool
) -> MemoryPlan:
    """Predict what `memory.predict` asks for, in a process that has no process group."""
    config = load_config(overrides, world_size)
    config.compile.enable = False
    args, own, seq_len = shape(config), config.activation_checkpoint.mode, config.training.seq_len
    groups = communicators(mesh_degrees(config))
    limit = limit_bytes(memory_gib, groups)
    searches = {
        mode: _beside(functools.partial(search, config, args, world_size, mode, limit))
        for mode in (MODES if seek_longest else ())
    }
    with fake_world(world_size):
        model = Model(config, args, own)
        (peak, parts), host_bytes = model.at(seq_len), model.host_bytes
        model.close()
    lengths = {}
    for mode, result in searches.items():
        lengths[mode], guess = result()
        if mode == own and guess is not None and abs(guess - peak) > TOLERANCE * peak:
            with fake_world(world_size):
                unit = 2 * config.parallelism.context_parallel_degree
                lengths[mode] = longest(Whole(config, args, mode), limit, unit)
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

    process = fork.Process(target=run, daemon=True)
    process.start()
    sender.close()

    def result() -> Found:
        try:
            return cast(Found, receiver.recv())
        except EOFError:
            raise RuntimeError("a search for the longest sample ended without a result") from None

    return result


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(answer(*json.load(sys.stdin)))))
