"""What V2 is for: 1/cp of the bytes, two layers whole at a time, reduced while backward goes on.

Counted from the tensors that are alive and read from a profiler's trace, not from formulas.
"""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity

from tests.processes import late
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


def wholes_alive(degrees, overrides):
    """How many unreduced per-sample gradients are alive each time that another is sent: a `Pending`
    frees each when it is waited for."""
    from tests import build
    from torchtitan_dp.collectives import Pending

    built = build.build(degrees, *overrides, "--training.local_batch_size=2")
    sent, alive = [], []
    send = Pending.reduce_scatter

    def watched(self, part, whole, group):
        let_go()  # gloo's threads, of what has arrived
        alive.append(sum(earlier() is not None for earlier in sent))
        sent.append(weakref.ref(whole))
        send(self, part, whole, group)

    Pending.reduce_scatter = watched
    try:
        built.accumulate(*build.data(samples=2))
    finally:
        Pending.reduce_scatter = send
    return alive


def test_v2_holds_two_layers_whole_at_a_time():
    """One that is written, and one that is sent meanwhile: no more than one is alive then."""
    for alive in on_ranks(2, wholes_alive, (1, 1, 2), V2):
        assert len(alive) == 2 * 7 + 2  # linear layers, embedding and output
        assert set(alive) == {0, 1}


def trace(degrees, overrides):
    """(name, start, end, whether it is an asynchronous collective), in µs."""
    from tests import build
    from torchtitan_dp.collectives import Pending

    args = dataclasses.replace(build.ARGS, dim=256, n_layers=3)
    built = build.build(degrees, *overrides, "--training.local_batch_size=2", args=args)
    built.accumulate(*build.data(samples=2))
    wait = Pending.wait_for_first

    def labelled(self):
        if not self._running or isinstance(self._running[0][0], torch.Tensor):  # the ring's
            wait(self)
        else:
            with torch.profiler.record_function("wait for reduce_scatter"):
                wait(self)

    Pending.wait_for_first = labelled
    try:
        with late.prompt(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            built.accumulate(*build.data(samples=2))
    finally:
        Pending.wait_for_first = wait
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
