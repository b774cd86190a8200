"""What V2 is for: 1/cp of the bytes, two layers whole at a time, reduced while backward goes on.

Counted from the tensors that are alive and read from a profiler's trace, not from formulas.
"""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch

from tests.processes.ranks import let_go, on_ranks

V1 = ("--privacy.gradient_method=grad_sample", "--privacy.no-shard_grad_samples")
V2 = ("--privacy.gradient_method=grad_sample", "--privacy.shard_grad_samples")
SIZES = {"dim": 64, "n_layers": 3, "vocab_size": 264}


def live_bytes() -> int:
    """Bytes of all storages that a live tensor of this process holds."""
    let_go()
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor
    }
    return sum(storages.values())


def bytes_after_backward(degrees, overrides, batch_size):
    """What is alive between backward and clipping that was not before: per-sample gradients."""
    from tests import build
    from torchtitan_dp.gradients.clipped_sum import ClippedSum

    args = dataclasses.replace(build.ARGS, **SIZES)
    mbs = f"--training.local_batch_size={batch_size}"
    built = build.build(degrees, *overrides, mbs, args=args)
    built.accumulate(*build.data(samples=batch_size))
    at_rest, seen = live_bytes(), []
    add = ClippedSum.add

    def watched(self, shards, valid_B):
        seen.append(live_bytes() - at_rest)
        return add(self, shards, valid_B)

    ClippedSum.add = watched
    try:
        built.accumulate(*build.data(samples=batch_size))
    finally:
        ClippedSum.add = add
    parameters = 4 * sum(p.numel() for p in built.parameters.values())
    return seen[0], parameters


def test_v2_keeps_a_share_of_the_bytes():
    """At cp 4, at most 0.30 of V1's (padding of sizes that 4 does not divide included)."""
    v1 = on_ranks(4, bytes_after_backward, (1, 1, 4), V1, 2)
    v2 = on_ranks(4, bytes_after_backward, (1, 1, 4), V2, 2)
    for (whole, parameters), (share, _) in zip(v1, v2, strict=True):
        assert whole == pytest.approx(2 * parameters, rel=0.05)  # it is those that were counted
        assert 0.24 * whole < share < 0.30 * whole


class Awaited:
    """A collective's work that remembers whether it was waited for."""

    def __init__(self, work):
        self.work, self.is_waited_for = work, False

    def wait(self):
        self.is_waited_for = True
        return self.work.wait()


def wholes_alive(degrees, overrides):
    """How many unreduced per-sample gradients are alive, or not waited for, each time that another
    is sent."""
    from tests import build
    from torchtitan_dp.gradients import fsdp, grad_sample

    built = build.build(degrees, *overrides, "--training.local_batch_size=2")
    sent, alive = [], []
    send = grad_sample.reduce_scatter_sum

    def watched(output, whole, group, async_op=False):
        in_flight = sum(not work.is_waited_for for _, work in sent)
        let_go()  # gloo's threads, of what has arrived
        alive.append(max(in_flight, sum(earlier() is not None for earlier, _ in sent)))
        work = send(output, whole, group, async_op)
        if not async_op:
            return work
        sent.append((weakref.ref(whole), Awaited(work)))
        return sent[-1][1]

    grad_sample.reduce_scatter_sum = fsdp.reduce_scatter_sum = watched
    try:
        built.accumulate(*build.data(samples=2))
    finally:
        grad_sample.reduce_scatter_sum = fsdp.reduce_scatter_sum = send
    return alive


def test_v2_holds_two_layers_whole_at_a_time():
    """One that is written, and one that is sent meanwhile: no more than one is alive then."""
    for alive in on_ranks(2, wholes_alive, (1, 1, 2), V2):
        assert len(alive) == 2 * 7 + 2 + 1  # linear layers, embedding and output; the norms
        assert set(alive) == {0, 1}


def trace(degrees, overrides):
    """(name, start, end, whether it is an asynchronous collective), in µs."""
    from tests import build
    from torchtitan_dp.gradients.grad_sample import GradSampleGradients

    args = dataclasses.replace(build.ARGS, dim=256, n_layers=3)
    built = build.build(degrees, *overrides, "--training.local_batch_size=2", args=args)
    built.accumulate(*build.data(samples=2))
    wait = GradSampleGradients._wait

    def labelled(self, running=0):
        if len(self._in_flight) > running:
            with torch.profiler.record_function("wait for reduce_scatter"):
                wait(self, running)

    GradSampleGradients._wait = labelled
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            built.accumulate(*build.data(samples=2))
    finally:
        GradSampleGradients._wait = wait
    return [
        (event.name, event.time_range.start, event.time_range.end, event.is_async)
        for event in sorted(profiler.events(), key=lambda event: event.time_range.start)
    ]


def overlaps(events):
    """Of the linear layers: how many collectives of l end after l-1's backward has begun.

    That they may, since nobody waits for them before, holds for all; whether they do is up to the
    network.
    """
    backwards = [(start, end) for name, start, end, _ in events if name == "_LinearBackward"]
    launches = [start for name, start, _, _ in events if name.startswith("c10d::_reduce_scatter")]
    waits = [start for name, start, _, _ in events if name.startswith("wait for")]
    count = 0
    for (start, end), (next_start, _) in itertools.pairwise(backwards):
        launched = [at for at in launches if start < at < end]
        assert len(launched) == 1, "each layer starts one reduce-scatter, within its backward"
        assert min(at for at in waits if at > launched[0]) > next_start
        # Gloo runs it as another collective, of which the event lasts until it is done.
        work = next(e for e in events if e[3] and e[1] > launched[0] and "gloo" in e[0])
        count += work[2] > next_start
    return count


def test_v2_reduces_a_layer_during_the_backward_of_the_one_before():
    for _ in range(5):
        if all(overlaps(events) > 0 for events in on_ranks(2, trace, (1, 1, 2), V2)):
            return
    raise AssertionError("in none of five traces was a reduce-scatter in flight")
