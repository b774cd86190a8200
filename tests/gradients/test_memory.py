"""What the methods are for: how much of per-sample gradients is held, and when they are reduced.

Counted from the tensors that are alive and read from a profiler's trace, not from formulas.
"""

import gc
import itertools
import math
import weakref
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity

from tests.processes import late
from tests.processes.ranks import let_go, on_ranks
from torchtitan_dp.selfcheck.reference import relative_error

V2 = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
V1 = (*V2, "--privacy.no-shard_grad_samples")
GHOST = ("--privacy.gradient_method=ghost", "--training.local_batch_size=3")
TWO = (*GHOST, "--privacy.ghost_passes=two")
TIED = {"tie_word_embeddings": True}
WIDE = {"hidden_size": 96, "vocab_size": 101}  # whose matrices' norms are ghosts


def built_for(degrees, overrides, changes=()):
    from tests import build

    return build.build(degrees, *overrides, args=build.llama(**dict(changes)))


def accumulate(built, samples=2):
    from tests import build

    return built.accumulate(*build.data(samples))


def clipped_sum(built, samples):
    accumulate(built, samples)
    return built.total()


# grad_sample.


def live_bytes() -> int:
    """Bytes of all storages that a live tensor of this process holds."""
    let_go()
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_after_backward(degrees, overrides):
    """What is alive between backward and clipping that was not before: per-sample gradients."""
    built = built_for(
        degrees, overrides, {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 264}
    )
    accumulate(built)
    at_rest, seen, clipped_sum = live_bytes(), [], built.gradients.clipped_sum
    add = clipped_sum.add

    def watched(shards, valid_B):
        seen.append(live_bytes() - at_rest)
        return add(shards, valid_B)

    clipped_sum.add = watched
    accumulate(built)
    return seen[0], 4 * sum(p.numel() for p in built.parameters.values())


def test_v2_keeps_a_share_of_the_bytes():
    """At cp 4, at most 0.30 of V1's (padding of sizes that 4 does not divide included)."""
    v1, v2 = (on_ranks(4, bytes_after_backward, (1, 1, 4), way) for way in (V1, V2))
    for (whole, parameters), (share, _) in zip(v1, v2, strict=True):
        assert whole == pytest.approx(2 * parameters, rel=0.05)  # it is those that were counted
        assert 0.24 * whole < share < 0.30 * whole


def at_each_reduction(changes):
    """For each asynchronous sum over cp: how many samples it has, how many unreduced gradients of
    earlier ones are alive, and how many sums run by then; and the clipped sum's error."""
    from torchtitan_dp.collectives import Pending

    built = built_for((1, 1, 2), (*V2, "--training.local_batch_size=3"), changes)
    found, sent, send = [], [], Pending.reduce_scatter

    def watched(self, part, whole, group):
        let_go()  # gloo's threads, of what has arrived
        alive = sum(earlier() is not None for earlier in sent)
        found.append((part.stop - part.start, alive, len(built.gradients._in_flight)))
        sent.append(weakref.ref(whole))
        send(self, part, whole, group)

    with mock.patch.object(Pending, "reduce_scatter", watched):
        expected = clipped_sum(built, 3)
        together, found = found, []
        built.gradients._transient_bytes = 1
        total = clipped_sum(built, 3)
    assert len(built.gradients._in_flight) == 0
    return together, found, relative_error(total, expected)


@pytest.mark.parametrize("changes", [{}, TIED], ids=["untied", "tied"])
def test_v2_holds_two_layers_whole_at_a_time(changes):
    """One is written while another is sent; a large one's samples go one at a time."""
    for together, apart, error in on_ranks(2, at_each_reduction, changes):
        for samples, found in ((3, together), (1, apart)):
            at_once, alive, running = (set(each) for each in zip(*found, strict=True))
            assert at_once == {samples}
            assert alive == {0, 1}
            assert max(running) <= 2
            assert len(found) == (2 * 7 + 2) * 3 / samples  # matrices
        assert error < 1e-6


def trace():
    """(name, start, end, whether it is an asynchronous collective), in µs."""
    from torchtitan_dp.collectives import Pending

    built = built_for((1, 1, 2), V2, {"hidden_size": 256, "num_hidden_layers": 3})
    accumulate(built)
    wait = Pending.wait_for_first

    def labelled(self):
        if not self._running or isinstance(self._running[0][0], torch.Tensor):  # the ring's
            wait(self)
        else:
            with torch.profiler.record_function("wait for reduce_scatter"):
                wait(self)

    with (
        mock.patch.object(Pending, "wait_for_first", labelled),
        late.prompt(),
        torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        accumulate(built)
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
        if all(overlaps(events) > 0 for events in on_ranks(2, trace)):
            return
    raise AssertionError("in none of five traces was a reduce-scatter in flight")


def most_held(degrees):
    """The most values of per-sample gradients that V2 holds when it adds a group, and all."""
    built = built_for(degrees, (*V2, "--privacy.clipping=per_layer"))
    gradients, held = built.gradients, []
    add_group = gradients.clipped_sum.add_group

    def watched(group, parts, valid_B):
        shards = [pending.storage for layers in gradients._shards.values() for pending, _ in layers]
        wholes = [whole.untyped_storage() for whole in gradients._wholes.values()]
        nbytes = sum(storage.nbytes() for storage in shards + wholes)
        held.append(sum(map(torch.Tensor.numel, parts.values())) + nbytes // 4)
        return add_group(group, parts, valid_B)

    gradients.clipped_sum.add_group = watched
    accumulate(built)
    return max(held), 2 * sum(p.to_local().numel() for p in built.parameters.values())


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_no_whole_gradient_is_kept_where_layers_are_clipped_apart(degrees):
    for held, whole in on_ranks(math.prod(degrees), most_held, degrees):
        assert held < 0.5 * whole, (held, whole)


# ghost.


def gradients_at_a_time(overrides, changes):
    """The most samples whose gradients of one layer are written at once, what is held, and the
    clipped sum's error."""
    built = built_for((1, 1, 1), overrides, changes)
    gradients, expected = built.gradients, clipped_sum(built, 3)
    gradients._transient_bytes = 1
    sizes, held = [0], [0]
    write, take = gradients._write, gradients.form_grad_samples

    def watched(name, writes, samples):
        if len(gradients._layouts[name].shape) == 2:
            sizes.append(samples.stop - samples.start)
        return write(name, writes, samples)

    def taken(*arguments):
        take(*arguments)
        held.append(sum(map(len, gradients._phase.writes.values())))

    gradients._write, gradients.form_grad_samples = watched, taken
    for layer in built.model.modules():
        if hasattr(layer, "parameter_names"):
            layer.sink = gradients
    error = relative_error(clipped_sum(built, 3), expected)
    return max(sizes), max(held), error < 1e-6


@pytest.mark.parametrize(
    "overrides, changes, most",
    [(GHOST, WIDE, 16), (TWO, WIDE, 0), (TWO, WIDE | TIED, 1), (TWO, {}, 0)],
    ids=["one", "two", "two, tied", "two, narrow"],
)
def test_ghost_writes_large_layers_a_sample_at_a_time_and_two_passes_hold_nothing(
    overrides, changes, most
):
    """But the first of a tied weight's two layers."""
    assert on_ranks(1, gradients_at_a_time, overrides, changes) == [(1, most, True)]


def flops(overrides, changes):
    """Of one microbatch of two samples."""
    from scripts.benchmarking.counting import Counts

    built = built_for((1, 1, 1), (*overrides, "--training.local_batch_size=2"), changes)
    with Counts() as counts:
        accumulate(built)
    return sum(counts.flops.values())


def test_nothing_is_computed_twice_in_one_pass():
    """Beside ghost norms: where there is none, it takes what per-sample gradients take."""
    plain, one, two = (on_ranks(1, flops, way, {})[0] for way in (V2, GHOST, TWO))
    assert one == plain
    assert two > 1.5 * plain
    plain, one = (on_ranks(1, flops, way, WIDE)[0] for way in (V2, GHOST))
    # (T, T) products of P and of D: of a square's pairs, five eighths are computed.
    assert plain < one < 1.5 * plain
