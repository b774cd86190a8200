"""What the methods are for: how much of per-sample gradients is held, and when they are reduced;
counted from tensors that are alive and a profiler's trace, not from formulas."""

import math
import weakref
from unittest import mock

import pytest
import torch

from tests import build
from tests.processes.ranks import let_go, on_ranks
from torchtitan_dp.base.collectives import Pending
from torchtitan_dp.selfcheck.reference import relative_error

V2 = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
GHOST = ("--privacy.gradient_method=ghost", "--training.local_batch_size=3")
TWO = (*GHOST, "--privacy.ghost_passes=two")
TIED = {"tie_word_embeddings": True}
WIDE = {"hidden_size": 96, "vocab_size": 101}  # whose matrices' norms are ghosts


def built_for(degrees, overrides, changes=()):
    return build.build(degrees, *overrides, args=build.llama(**dict(changes)))


def accumulate(built, samples=2):
    return built.accumulate(*build.data(samples))


def clipped_sum(built, samples):
    accumulate(built, samples)
    return built.total()


# grad_sample.


def at_each_reduction(changes):
    """For each asynchronous sum over cp: how many samples it has, how many unreduced gradients of
    earlier ones are alive, and how many sums run by then; and the clipped sum's error."""
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
    """The most samples of a layer's gradients written at once, what is held, and the error."""
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
