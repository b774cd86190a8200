"""The process that predicts memory: the step under fake tensors, for lengths, AC modes and ranks.

A rank's own step is predicted as it is, with all layers. For other lengths, modes and ranks few
layers suffice (`peaks`), unless their estimate of the run's own step differs from the whole
model's. The searches run beside the step, in processes of their own.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import cast

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.memory import (
    CATEGORIES,
    LONGEST,
    MODES,
    MemoryPlan,
    communicators,
    limit_bytes,
)
from torchtitan_dp.plan.peaks import (
    Extrapolated,
    Model,
    Peaks,
    Whole,
    few_layers,
    fits,
    shortest,
    two_lengths,
)

ENOUGH_LAYERS = 8  # up to so many, a prediction with all layers is as quick
_NICER = 5
TOLERANCE = 0.005  # of a peak: the most that an extrapolation may differ from the whole model's
Say = Callable[[str], None]
Found = tuple[int | None, float | None]


def longest(peaks: Peaks, limit: int, unit: int) -> int | None:
    """Find the longest sample within `limit` bytes that is `unit` times a power of two.

    From some thousand tokens a rank on, memory is a line in T: two predictions give the line, and
    where it meets the limit is predicted too.
    """
    short, long = two_lengths(unit)
    below, above = peaks.estimate(short, long)
    if peaks.update() > limit:
        return None
    slope = max((above - below) / (long - short), 1.0)
    guess = max(min(long + (limit - above) / slope, LONGEST), unit)
    power = (int(guess) // unit).bit_length() - 1
    while power >= 0 and peaks.decide(unit * 2**power) > limit:
        power -= 1
    return unit * 2**power if power >= 0 else None


def measure(config: JobConfig, args: ModelArgs, world_size: int, memory_gib: float) -> MemoryPlan:
    """Predict rank 0's memory within a fake world."""
    seq_len = config.training.seq_len
    model = Model(config, args, config.activation_checkpoint.mode)
    parts = model.at(seq_len)[1]
    plan = MemoryPlan(
        world_size,
        seq_len,
        {name: parts.get(name, 0) for name in CATEGORIES},
        memory_gib,
        {},
        communicators=communicators(mesh_degrees(config)),
        host_bytes=model.host_bytes,
    )
    model.close()
    return plan


def search(config: JobConfig, args: ModelArgs, world_size: int, mode: str, limit: int) -> Found:
    """Find the longest sample with a mode of activation checkpointing, in a fake world of its own:
    its length, and, if few layers stood for all, their estimate of the peak at the run's own one.
    """
    own = config.training.seq_len
    with fake_world(world_size):
        peaks = _peaks(config, args, mode, limit)
        found = longest(peaks, limit, shortest(config))
        estimated = isinstance(peaks, Extrapolated) and own >= peaks.short
        return found, peaks.estimate(own)[0] if estimated else None


def _peaks(config: JobConfig, args: ModelArgs, mode: str, limit: int) -> Peaks:
    """Let few layers stand for all, where there are many."""
    whole = Whole(config, args, mode)
    few = args.n_layers > max(ENOUGH_LAYERS, *few_layers(args))
    return Extrapolated(whole, limit, shortest(config)) if few else whole


def enough_ranks(
    overrides: list[str], args: ModelArgs, world_size: int, memory_gib: float, say: Say
) -> int | None:
    """Find whether twice or four times as many ranks fit, if the configuration's degrees follow."""
    for ranks in (2 * world_size, 4 * world_size):
        try:
            config = load_config(overrides, ranks)
        except ValueError:
            continue
        say(f"{ranks} ranks")
        if fits(config, args, ranks, memory_gib):
            return ranks
    return None


def answer(
    overrides: list[str],
    world_size: int,
    memory_gib: float,
    seek_longest: bool,
    say: Say = lambda doing: None,
) -> MemoryPlan:
    """Predict what `memory.predict` asks for, in a process that has no process group."""
    config = load_config(overrides, world_size)
    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    args = shape(config)
    limit = limit_bytes(memory_gib, communicators(mesh_degrees(config)))
    terms = config, args, world_size
    searches = {
        mode: _beside(functools.partial(search, *terms, mode, limit))
        for mode in (MODES if seek_longest else ())
    }
    say(f"a step of {config.training.seq_len:,} tokens a sample")
    with fake_world(world_size):
        plan = measure(*terms, memory_gib)
    lengths = {}
    for mode, result in searches.items():
        say(f"the longest sample with activation_checkpoint.mode = '{mode}'")
        lengths[mode], guess = result()
        peak, own = plan.peak_bytes, mode == config.activation_checkpoint.mode
        if own and guess is not None and abs(guess - peak) > TOLERANCE * peak:
            with fake_world(world_size):
                whole = Whole(config, args, mode)
                lengths[mode] = longest(whole, limit, shortest(config))
    plan = dataclasses.replace(plan, longest_seq_len=lengths)
    if seek_longest and not plan.fits:
        ranks = enough_ranks(overrides, args, world_size, memory_gib, say)
        plan = dataclasses.replace(plan, fitting_world_size=ranks)
    return plan


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
            found = receiver.recv()
        except EOFError:
            raise RuntimeError("a search for the longest sample ended without a result") from None
        process.join()
        return cast(Found, found)

    return result


def main() -> None:
    """Answer the task on stdin: what is being done, a line each, and the plan as JSON."""

    def say(doing: str) -> None:
        print(doing, flush=True)

    overrides, world_size, memory_gib, seek_longest = json.load(sys.stdin)
    plan = answer(overrides, world_size, memory_gib, seek_longest, say)
    print(json.dumps(dataclasses.asdict(plan)))


if __name__ == "__main__":
    main()
