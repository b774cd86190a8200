"""Each sample's gradient is that of transformers' eager model in fp64, one sample at a time."""

import numpy as np
import pytest

from tests.build import data, reference_gradients, relative_error
from tests.models.causal_lm.families import FAMILIES, T, arguments, eager, small
from tests.processes.ranks import on_ranks

BOUND = 1e-5
FULL = "--activation_checkpoint.mode=full"
CHUNKS = "--training.loss_chunk_tokens=7"
CONTIGUOUS = "--parallelism.context_parallel_load_balancer=None"
MESHES = {"one": (1, 1, 1), "cp 2": (1, 1, 2), "dp_shard 2 x cp 2": (1, 2, 2)}


def worst_error(degrees, overrides, name, tokens, lora, changes):
    """The largest relative error of a sample's gradient, unclipped."""
    args = arguments(name, tokens, lora, **changes)
    tokens_NT, labels_NT = data(3, args=args)
    expected = reference_gradients(eager(args), tokens_NT, labels_NT)
    ours, worst = small(args, degrees, *overrides), 0.0
    for sample, gradient in enumerate(expected):
        found, _ = ours.clipped_sum(tokens_NT, labels_NT, drawn=np.array([sample]))
        worst = max(worst, relative_error(found, gradient))
    return worst


def check(name, mesh, *overrides, tokens=T, lora=None, **changes):
    degrees = MESHES[mesh]
    case = degrees, overrides, name, tokens, lora, changes
    assert max(on_ranks(int(np.prod(degrees)), worst_error, *case)) < BOUND


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name, mesh):
    check(name, mesh)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_and_in_chunks_on_contiguous_shards(name):
    check(name, "cp 2", FULL, CHUNKS, CONTIGUOUS)
