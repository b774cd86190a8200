"""Memory of a sample's gradient: no stream uses it beside another, none frees it too early."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from tests import build
from tests.processes.ranks import on_ranks
from tests.streams import watched
from torchtitan_dp.gradients.clipped_sum import ClippedSum


def microbatches(degrees):
    """Accumulate three, each of one sample; yields after each."""
    built = build.build(degrees)
    for one in zip(*(x.split(1) for x in build.data(samples=3)), strict=True):
        built.gradients.accumulate_clipped(built.losses(*one), torch.ones(1, dtype=torch.bool))
        yield


def races(degrees):
    """What three microbatches leave open, FSDP2's streams being recorded."""
    with watched("gradients/fsdp.py") as watch:
        list(microbatches(degrees))
    return watch.found


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2)], ids=str)
def test_streams_leave_nothing_open(degrees):
    for found in on_ranks(degrees[0] * degrees[1] * degrees[2], races, degrees):
        assert found == []


def shards_alive(degrees):
    """How many earlier gradients are alive when one is added, and how many after it, by turns."""
    found, references, add = [], [], ClippedSum.add

    def count():
        gc.collect()
        return sum(reference() is not None for reference in references)

    def adds(self, shards, valid_B):
        references.extend(weakref.ref(shard.untyped_storage()) for shard in shards)
        found.append(count() - len(shards))
        return add(self, shards, valid_B)

    with mock.patch.object(ClippedSum, "add", adds):
        for _ in microbatches(degrees):
            found.append(count())
    return found


@pytest.mark.parametrize("degrees", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_no_more_than_one_samples_gradient_is_alive(degrees):
    for found in on_ranks(degrees[1] * degrees[2], shards_alive, degrees):
        assert found == [0] * 6
