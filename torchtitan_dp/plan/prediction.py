"""The process that predicts memory: the step under fake tensors, for lengths, AC modes and ranks.

A rank's own step is predicted as it is, with all layers. For other lengths, modes and ranks models
of few layers suffice, at two lengths: layers are alike, so what is alive in a stretch of the step
(the loss head's, the last block's backward, the first one's) grows by the same bytes with each, and
so it does with each token. The peak is that of the highest stretch, which need not be the highest
of few layers or tokens. The extrapolation is held against the whole model's, and asked no more
where they differ; what comes close to the limit, and what is shorter, is predicted with all layers
too.
"""

import contextlib
import copy
import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.families import ModelArgs
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.fake_step import Step, fake_world
from torchtitan_dp.plan.labels import GATHERED, tracking
from torchtitan_dp.plan.memory import CATEGORIES, LONGEST, MODES, MemoryPlan, limit_bytes

FEW_LAYERS = (4, 5)  # so that each stretch of a deeper model is there (`fake_step`)
ENOUGH_LAYERS = 8  # of a model: fewer are as quickly predicted themselves
LONG = 4096  # tokens a rank, from which on few layers tell
TOLERANCE = 0.005  # of a peak: as much as an extrapolation may be off where it is held against
CLOSE = 0.03  # of the limit: nearer to it, an extrapolation does not decide
Say = Callable[[str], None]


class _Microbatch(NamedTuple):
    """Holds what is predicted of a microbatch."""

    peak: tuple[int, dict[str, int]]  # bytes, and what they are of
    bytes_without_gathered: int  # at the peak of all but gathered weights
    stretches: dict[str, int]  # the peak bytes of each


class _Model:
    """Predicts the peaks of a model that is built once, for samples of any length."""

    def __init__(self, config: JobConfig, args: ModelArgs, mode: str) -> None:
        config = copy.deepcopy(config)
        config.activation_checkpoint.mode = mode
        self._stack = contextlib.ExitStack()
        self._tracker = self._stack.enter_context(tracking())
        self._step = Step(config, args, self._tracker)
        self._tracker.start_over()
        self._step.update()
        self.update = self._tracker.peak_bytes, _by_category(self._tracker.peak)
        self._known: dict[int, _Microbatch] = {}

    def microbatch(self, seq_len: int) -> "_Microbatch":
        """Predict a microbatch after the first update, which is the first of its step."""
        if seq_len not in self._known:
            self._step.free_gathered()
            tracker = self._tracker
            tracker.start_over()
            self._step.microbatch(seq_len)
            self._known[seq_len] = _Microbatch(
                (tracker.peak_bytes, _by_category(tracker.peak)),
                tracker.peak_bytes_without,
                tracker.stretches,
            )
        return self._known[seq_len]

    def stretches(self, seq_len: int) -> dict[str, int]:
        """Predict the peak bytes of each of a microbatch's stretches, and of the update."""
        return self.microbatch(seq_len).stretches | {"update": self.update[0]}

    def at(self, seq_len: int) -> tuple[int, dict[str, int]]:
        """Predict the peak of both, and what it is of."""
        return max(self.update, self.microbatch(seq_len).peak, key=lambda found: found[0])

    def kept_gathered(self, seq_len: int) -> int:
        """Bound the peak of both from above, were the weights kept gathered within a step.

        It is an upper bound: the buffers of the last gather are taken to be there all the time.
        """
        without = self.microbatch(seq_len).bytes_without_gathered
        return max(self.update[0], without + self._step.gathered_bytes)

    def close(self) -> None:
        """Free it: one model is tracked at a time."""
        self._stack.close()
        del self._step, self._tracker
        gc.collect()


def _by_category(peak: dict[str, int]) -> dict[str, int]:
    """Count gathered weights as communication, as their gathering is."""
    parts = dict(peak)
    gathered = parts.pop(GATHERED, 0)
    return parts | {"communication": parts.get("communication", 0) + gathered}


class Peaks(Protocol):
    """Names what the search for the longest sample needs: peaks in bytes, by length."""

    def estimate(self, *lengths: int) -> list[float]:
        """Return peaks to go by."""

    def decide(self, seq_len: int) -> float:
        """Return a peak to hold against the limit."""


class Whole:
    """Predicts with all layers."""

    def __init__(self, config: JobConfig, args: ModelArgs, mode: str) -> None:
        self.config, self.args, self.mode = config, args, mode
        self.known: dict[int, float] = {}

    def estimate(self, *lengths: int) -> list[float]:
        if wanted := [length for length in lengths if length not in self.known]:
            model = _Model(self.config, self.args, self.mode)
            self.known |= {length: model.at(length)[0] for length in wanted}
            model.close()
        return [self.known[length] for length in lengths]

    def decide(self, seq_len: int) -> float:
        return self.estimate(seq_len)[0]


class Extrapolated:
    """Predicts from few layers and two lengths; what is close to the limit, with all layers."""

    def __init__(self, whole: Whole, limit: int, unit: int) -> None:
        self._whole, self._limit = whole, limit
        self.short = LONG * whole.config.parallelism.context_parallel_degree
        self._lengths = _line(unit)
        self._corners: dict[str, tuple[list[int], ...]] = {}

    def estimate(self, *lengths: int) -> list[float]:
        if not self._corners:
            few, more = map(self._stretches, FEW_LAYERS)
            both = few[0].keys() & more[0].keys()
            self._corners = {
                name: tuple([found[name] for found in layers] for layers in (few, more))
                for name in both
            }
        return [
            max(self._at(length, *found) for found in self._corners.values()) for length in lengths
        ]

    def _stretches(self, layers: int) -> list[dict[str, int]]:
        """Predict what each stretch of a step takes with so many layers, at both lengths."""
        args = copy.deepcopy(self._whole.args)
        args.n_layers = layers
        model = _Model(self._whole.config, args, self._whole.mode)
        found = [model.stretches(length) for length in self._lengths]
        model.close()
        return found

    def _at(self, seq_len: int, few: list[int], more: list[int]) -> float:
        """Draw lines through a stretch's bytes: over layers, then over lengths."""
        share = (self._whole.args.n_layers - FEW_LAYERS[0]) / (FEW_LAYERS[1] - FEW_LAYERS[0])
        of_all = [low + share * (high - low) for low, high in zip(few, more, strict=True)]
        start, end = self._lengths
        return of_all[0] + (of_all[1] - of_all[0]) * (seq_len - start) / (end - start)

    def decide(self, seq_len: int) -> float:
        if seq_len < self.short:
            return self._whole.decide(seq_len)
        (guess,) = self.estimate(seq_len)
        close = abs(guess - self._limit) <= CLOSE * self._limit
        return self._whole.decide(seq_len) if close else guess


def _line(unit: int) -> tuple[int, int]:
    """Return two lengths from which others are told."""
    return unit * 2**13, unit * 2**14


def longest(peaks: Peaks, limit: int, unit: int) -> int | None:
    """Find the longest sample within `limit` bytes that is `unit` times a power of two.

    From some thousand tokens a rank on, memory is a line in T: two predictions give the line, and
    where it meets the limit is predicted too.
    """
    short, long = _line(unit)
    below, above = peaks.estimate(short, long)
    slope = max((above - below) / (long - short), 1.0)
    guess = max(min(long + (limit - above) / slope, LONGEST), unit)
    power = (int(guess) // unit).bit_length() - 1
    while power >= 0 and peaks.decide(unit * 2**power) > limit:
        power -= 1
    return unit * 2**power if power >= 0 else None


def measure(
    config: JobConfig,
    args: ModelArgs,
    world_size: int,
    memory_gib: float,
    *,
    seek_longest: bool,
    say: Say = lambda doing: None,
) -> MemoryPlan:
    """Predict rank 0's memory, and how long samples may be, within a fake world."""
    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    seq_len, own = config.training.seq_len, config.activation_checkpoint.mode
    limit, unit = limit_bytes(memory_gib), 2 * config.parallelism.context_parallel_degree
    say(f"a step of {seq_len:,} tokens a sample")
    model = _Model(config, args, own)
    update, (peak, parts) = model.update[0], model.at(seq_len)
    keeps = config.parallelism.keep_weights_gathered
    kept = None if keeps else model.kept_gathered(seq_len)
    model.close()
    lengths: dict[str, int | None] = {}
    for mode in MODES if seek_longest else ():
        say(f"the longest sample with activation_checkpoint.mode = '{mode}'")
        whole = Whole(config, args, mode)
        if mode == own:
            whole.known[seq_len] = peak
        lengths[mode] = None
        if update <= limit:
            lengths[mode] = longest(_peaks(whole, limit, unit), limit, unit)
    parts = {name: parts.get(name, 0) for name in CATEGORIES}
    return MemoryPlan(world_size, seq_len, parts, memory_gib, lengths, kept_gathered_bytes=kept)


def enough_ranks(
    overrides: list[str], args: ModelArgs, world_size: int, limit: int, say: Say
) -> int | None:
    """Find whether twice or four times as many ranks fit, if the configuration's degrees follow."""
    for ranks in (2 * world_size, 4 * world_size):
        try:
            config = load_config(overrides, ranks)
        except ValueError:
            continue
        say(f"{ranks} ranks")
        config.compile.enable = False
        with fake_world(ranks):
            whole = Whole(config, args, config.activation_checkpoint.mode)
            few = args.n_layers > ENOUGH_LAYERS
            unit = 2 * config.parallelism.context_parallel_degree
            peaks: Peaks = Extrapolated(whole, limit, unit) if few else whole
            if peaks.decide(config.training.seq_len) <= limit:
                return ranks
    return None


def _peaks(whole: Whole, limit: int, unit: int) -> Peaks:
    """Choose how to predict: as quickly as what `whole` knows already is met."""
    if whole.args.n_layers <= ENOUGH_LAYERS:
        return whole
    quick = Extrapolated(whole, limit, unit)
    known = [seq_len for seq_len in whole.known if seq_len >= quick.short]
    for seq_len, guess in zip(known, quick.estimate(*known), strict=True):
        if abs(guess - whole.known[seq_len]) > TOLERANCE * whole.known[seq_len]:
            return whole
    return quick


def answer(
    overrides: list[str],
    world_size: int,
    memory_gib: float,
    seek_longest: bool,
    say: Say = lambda doing: None,
) -> MemoryPlan:
    """Predict, in a process that has no process group, what `memory.predict` asks for."""
    config = load_config(overrides, world_size)
    args = shape(config)
    with fake_world(world_size):
        plan = measure(config, args, world_size, memory_gib, seek_longest=seek_longest, say=say)
    if seek_longest and not plan.fits:
        limit = limit_bytes(memory_gib)
        ranks = enough_ranks(overrides, args, world_size, limit, say)
        plan = dataclasses.replace(plan, fitting_world_size=ranks)
    return plan


def main() -> None:
    """Answer the task on stdin: what is being done, a line each, and the plan as JSON."""

    def say(doing: str) -> None:
        print(doing, flush=True)

    overrides, world_size, memory_gib, seek_longest = json.load(sys.stdin)
    plan = answer(overrides, world_size, memory_gib, seek_longest, say)
    print(json.dumps(dataclasses.asdict(plan)))


if __name__ == "__main__":
    main()
