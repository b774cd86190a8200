"""The predicted seconds of a step: a roofline over its counted work.

An operation takes the longer of its arithmetic and its memory traffic. On a device whose launches,
kernels and transfers run side by side, FSDP2 gathers the next block's weights and reduces the last
one's gradients while a block computes, and a ring passes keys on while it attends: the longer of
each pair counts, and of FSDP2's the share of one block, which nothing hides. Where nothing overlaps
(gloo, on the cores that compute) all adds up.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.machines import Machine, read
from torchtitan_dp.plan.peaks import step_of
from torchtitan_dp.plan.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GATHER,
    MEMORY,
    NEW,
    PRODUCT,
    RING,
    Counting,
    Operation,
    StepWork,
    Transfer,
    Work,
)

LAUNCHES, NOISE, WEIGHTS, SUMS = "launches", "noise", "weights and gradients", "sums over ranks"


@dataclass(frozen=True)
class StepSeconds:
    """The predicted seconds of a step, in all and by what they are spent on; parts that overlap
    count whole."""

    total: float
    microbatch: float  # one of a step's, on average
    parts: dict[str, float]

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def hours(self, steps: int) -> float:
        """Return the hours of so many steps."""
        return self.total * steps / 3600

    def describe(self, steps: int) -> str:
        return (
            f"{self.microbatch:.3g} s a microbatch, {self.total:.3g} s a step, "
            f"{self.hours(steps):.3g} h in all; most of it: {self.limit}"
        )

    def for_programs(self, steps: int) -> dict[str, Any]:
        return {
            "seconds_per_step": self.total,
            "seconds_per_microbatch": self.microbatch,
            "hours": self.hours(steps),
            "seconds_by_part": self.parts,
        }


def predict_step(
    config: JobConfig, args: ModelArgs, ranks: int, machine: Machine, rounds: float
) -> tuple[float, StepSeconds]:
    """Predict the peak bytes of a rank, and the seconds of a step of so many `rounds`, in a fake
    world of its own."""
    counting = Counting()
    with fake_world(ranks, like_cuda=machine.overlaps, repeated=counting.repeated):
        peak, work = step_of(config, args, counting)
    return peak, step_seconds(work, config, args.n_layers + 2, rounds, machine)


def step_seconds(
    work: StepWork, config: JobConfig, groups: int, rounds: float, machine: Machine
) -> StepSeconds:
    """Predict the seconds of a step.

    Args:
        work: of the first microbatch of a step, and of its update.
        groups: the number of FSDP2's: blocks, the embedding, the output layer.
        rounds: the expected microbatches of a data-parallel rank.
    """
    one_by_one = not METHODS[config.privacy.gradient_method].per_sample_layers
    windows = config.data.windows_per_draw  # of which a counted microbatch has one or two
    times = rounds * (windows if windows == 1 else windows / 2)
    times *= config.training.local_batch_size if one_by_one else 1
    later = work.microbatch
    if config.parallelism.keep_weights_gathered:
        later = Work(float, {done: n for done, n in later.items() if done.kind != GATHER})
    first, others, update = (
        parts_of(part, machine) for part in (work.microbatch, later, work.update)
    )
    update[NOISE] = work.trained_values / machine.rate(NOISE, "", work.trained_values)
    last = max(times - 1, 0)
    microbatches = _elapsed(first, machine, groups) + last * _elapsed(others, machine, groups)
    parts = {name: first[name] + last * others[name] + update[name] for name in first | update}
    total = microbatches + _elapsed(update, machine, 1)
    return StepSeconds(total, microbatches / max(times, 1), parts)


def parts_of(work: Work, machine: Machine) -> defaultdict[str, float]:
    """Predict the seconds of a part of a step, by what they are spent on."""
    parts = defaultdict[str, float](float)
    for done, times in work.items():
        for name, seconds in _seconds(done, machine):
            parts[name] += times * seconds
    return parts


def _seconds(done: Operation | Transfer, machine: Machine) -> Iterator[tuple[str, float]]:
    if isinstance(done, Transfer):
        name = {RING: RING, "all_reduce": SUMS}.get(done.kind, WEIGHTS)
        yield name, transfer_seconds(done, machine)
        return
    arithmetic = 0.0
    if done.flops:
        arithmetic = done.flops / machine.rate(done.kind, done.dtype, done.flops)
    memory = NEW if done.kind == NEW else MEMORY
    yield done.kind, max(arithmetic, done.bytes / machine.rate(memory, "", done.bytes))
    yield LAUNCHES, machine.launch


def transfer_seconds(transfer: Transfer, machine: Machine) -> float:
    """Predict a collective by its measured rate, if there is one.

    Otherwise by the link within a node, or by the slower of both links where it leaves one. Each of
    a node's ranks that take part has its own link between nodes, but a ring crosses by one.
    """
    if transfer.ranks == 1:
        return 0.0
    if machine.within is None:
        curve = machine.rates.get(transfer.kind) or machine.rates[GATHER]
        size = max(transfer.bytes, curve[0][0])  # less takes as long
        return size / read(curve, size)
    within = transfer.bytes / machine.within.bytes + machine.within.seconds
    if transfer.ranks * transfer.stride <= machine.ranks_a_node:
        return within
    assert machine.between is not None, "a machine that was measured is one node"
    here = max(machine.ranks_a_node // transfer.stride, 1)
    abreast = 1 if transfer.kind == RING else here
    between = transfer.bytes / abreast / machine.between.bytes + machine.between.seconds
    return max(within, between)


def _elapsed(parts: defaultdict[str, float], machine: Machine, groups: int) -> float:
    """Return the seconds that pass during a part of a step."""
    if not machine.overlaps:
        return math.fsum(parts.values())
    attention = parts[ATTENTION] + parts[ATTENTION_BACKWARD]
    kernels = (
        parts[PRODUCT] + parts[MEMORY] + parts[NEW] + parts[NOISE] + max(attention, parts[RING])
    )
    computed, sent = max(kernels, parts[LAUNCHES]), parts[WEIGHTS]
    return max(computed, sent) + min(computed, sent) / groups + parts[SUMS]
