"""Clipping layer by layer equals a one-process loop that clips layer by layer, for every method.

Hazard rows 1, 2, 13, 22, 28 and 49; and that it frees within backward what it has added.
"""

import math

import pytest
import torch

from tests.gradients.loop import check
from tests.processes.ranks import on_ranks

PER_LAYER = "--privacy.clipping=per_layer"
MICROBATCH = ["--privacy.gradient_method=microbatch"]
V2 = ["--privacy.gradient_method=grad_sample", "--training.local_batch_size=2"]
V1 = [*V2, "--privacy.no-shard_grad_samples"]
GHOST = ["--privacy.gradient_method=ghost", "--training.local_batch_size=2"]
TWO = [*GHOST, "--privacy.ghost_passes=two"]
METHODS = {"microbatch": MICROBATCH, "V1": V1, "V2": V2, "ghost": GHOST, "ghost_two": TWO}
MESHES = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (1, 4, 1), (1, 1, 4)]

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def module(name: str) -> str:
    return name.rpartition(".")[0]


def block(name: str) -> str:
    """Attention, feed-forward and the rest, each over all blocks."""
    return next((part for part in ("attention.", "feed_forward.") if part in name), "rest")


BY_BLOCK = ["--privacy.clipping_groups=*.attention.*,*.feed_forward.*,*"]


@pytest.mark.thorough_cases(
    "(1, 1, 4)-*",
    "(1, 2, 1)-*",
    "(1, 2, 2)-ghost",
    "(1, 4, 1)-*",
    "(2, 1, 1)-*",
    "*-V1",
    "*-ghost_two",
)
@every_method
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_every_mesh(degrees, method):
    """5 samples: the last microbatches are padded."""
    check(degrees, *method, PER_LAYER, samples=5, group_of=module)


@pytest.mark.thorough_cases("V1", "ghost_two")
@every_method
def test_tied_weights_and_long_layers(method):
    """The first layer to form gradients of a tied weight is not the last one."""
    changes = {"tie_embeddings": True, "dim": 96, "vocab_size": 101}
    check((1, 1, 2), *method, PER_LAYER, samples=5, group_of=module, **changes)


@pytest.mark.thorough_cases("(1, 2, 2)-ghost", "*-V1", "*-ghost_two")
@every_method
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_groups_that_the_user_names(degrees, method):
    check(degrees, *method, PER_LAYER, *BY_BLOCK, samples=5, group_of=block)


@pytest.mark.thorough_cases("*-V1", "*-ghost_two", "*-microbatch", "selective-*")
@every_method
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing(mode, method):
    option = "--activation_checkpoint.selective_ac_option=1"
    checkpointing = (f"--activation_checkpoint.mode={mode}", option)
    check((1, 1, 2), *method, PER_LAYER, *checkpointing, group_of=module)


def test_compiled_regions():
    compiled = ("--compile.enable", "--compile.backend=aot_eager")
    check((1, 1, 2), *V2, PER_LAYER, *compiled, samples=5, group_of=module)


def differs(degrees, method):
    from tests import build

    tokens_NT, labels_NT = build.data(samples=4)
    flat, _ = build.build(degrees, *method).clipped_sum(tokens_NT, labels_NT)
    by_layer, _ = build.build(degrees, *method, PER_LAYER).clipped_sum(tokens_NT, labels_NT)
    return build.relative_error(by_layer, flat)


@pytest.mark.thorough_cases("V1", "ghost_two")
@every_method
def test_it_is_not_flat(method):
    """So that the loop above could tell."""
    assert on_ranks(1, differs, (1, 1, 1), method)[0] > 0.1


def large_in_every_layer(degrees, method):
    """The norm of what one sample adds whose loss is a million times as large."""
    from tests import build

    tokens_NT, labels_NT = build.data(samples=1)
    built = build.build(degrees, *method, PER_LAYER, max_grad_norm=0.5)
    loss_B = 1e6 * built.losses(
        tokens_NT[[0] * built.batch_size], labels_NT[[0] * built.batch_size]
    )
    valid_B = torch.arange(built.batch_size) == 0
    clip = built.gradients.accumulate_clipped(loss_B, valid_B)
    total = built.gradients.clipped_sum.take()
    square = torch.stack([part.double().square().sum() for part in total.values()]).sum()
    torch.distributed.all_reduce(square)
    return square.sqrt().item(), [tensor.tolist() for tensor in clip]


@pytest.mark.thorough_cases("*-V1", "*-ghost_two")
@every_method
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_row02_the_whole_gradient_is_bound_by_C(degrees, method):
    for norm, (_, rejected_B, norm_B, exceeds_B) in on_ranks(
        math.prod(degrees), large_in_every_layer, degrees, method
    ):
        assert 0.499 < norm <= 0.5
        assert rejected_B == [False] + [True] * (len(rejected_B) - 1)
        assert exceeds_B[0]
        assert norm_B[0] > 1e3


def most_held(degrees):
    """The most values of per-sample gradients that V2 holds when it adds a group, and all."""
    from tests import build

    tokens_NT, labels_NT = build.data(samples=2)
    built = build.build(degrees, *V2, PER_LAYER)
    gradients, held = built.gradients, []
    add_group = gradients.clipped_sum.add_group

    def watched(group, parts, valid_B):
        nbytes = [storage.nbytes() for storage in gradients.held()]
        held.append(sum(map(torch.Tensor.numel, parts.values())) + sum(nbytes) // 4)
        return add_group(group, parts, valid_B)

    gradients.clipped_sum.add_group = watched
    built.clipped_sum(tokens_NT, labels_NT)
    size = sum(
        parameter.to_local().numel() for parameter in gradients.clipped_sum.parameters.values()
    )
    return max(held), len(tokens_NT) * size


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_no_whole_gradient_is_kept(degrees):
    for held, whole in on_ranks(math.prod(degrees), most_held, degrees):
        assert held < 0.5 * whole, (held, whole)
