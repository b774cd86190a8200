"""Weights kept gathered within a step: gathered once, of the same bits, and never those of before.

Steps of four samples are taken as in training, with noise: a first one, one that draws nobody after
a forward pass without a backward pass (as validation's is), and a last.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks

KEEP = "--parallelism.keep_weights_gathered"
MICROBATCH = ("--privacy.gradient_method=microbatch",)
GRAD_SAMPLE = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
BF16 = "--training.mixed_precision_param=bfloat16"
TIED = {"tie_embeddings": True}
WAYS = {
    "microbatch": ((1, 1, 1), (*MICROBATCH, BF16), {}),
    "microbatch, cp 2": ((1, 1, 2), MICROBATCH, {}),
    "microbatch, cp 2, always": (
        (1, 1, 2),
        (*MICROBATCH, BF16, "--parallelism.fsdp_reshard_after_forward=always"),
        {},
    ),
    "microbatch, dp_shard 2, never": (
        (1, 2, 1),
        (*MICROBATCH, BF16, "--parallelism.fsdp_reshard_after_forward=never"),
        {},
    ),
    "microbatch, dp_shard 2, cp 2": (
        (1, 2, 2),
        (*MICROBATCH, BF16, "--activation_checkpoint.mode=full"),
        {},
    ),
    "microbatch, dp_replicate 2, cp 2, tied": ((2, 1, 2), (*MICROBATCH, BF16), TIED),
    "grad_sample": ((1, 1, 1), (*GRAD_SAMPLE, BF16), {}),
    "grad_sample, tied": ((1, 1, 2), (*GRAD_SAMPLE, BF16), TIED),
    "grad_sample, offload": (
        (1, 1, 2),
        (
            *GRAD_SAMPLE,
            "--activation_checkpoint.mode=full",
            "--activation_checkpoint.offload_inputs",
        ),
        {},
    ),
    "grad_sample, dp_shard 2, selective": (
        (1, 2, 1),
        (*GRAD_SAMPLE, BF16, "--activation_checkpoint.mode=selective"),
        {},
    ),
    "grad_sample, dp_shard 2, cp 2": ((1, 2, 2), GRAD_SAMPLE, {}),
}


class Inner(torch.optim.SGD):
    """Looks, at each update, at the memory of what was gathered and at what the model holds."""

    def __init__(self, built):
        super().__init__(built.parameters.values(), lr=0.1)
        self.model, self.gathered, self.freed = built.model, [], []

    def step(self, closure=None):
        self.freed.append(sum(x.untyped_storage().nbytes() for x in self.gathered) == 0)
        self.freed.append(is_sharded(self.model))
        return super().step(closure)


def is_sharded(model):
    return all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())


def steps(degrees, overrides, changes):
    """The weights and losses of three steps, how often the second and later microbatches' weights
    were gathered (the first step's alone), and what was found at each update."""
    from tests import build

    args = dataclasses.replace(build.ARGS, **changes)
    built = build.build(degrees, *overrides, args=args)
    inner = Inner(built)
    optimizer = built.step.optimizer(inner, noise_multiplier=0.1, expected_batch_size=4)
    tokens_NT, labels_NT = build.data(samples=4)
    gathers, seen = [], []
    real, losses = dist.all_gather_into_tensor, built.losses

    def gather(*args, **kwargs):
        gathers[-1] += 1
        return real(*args, **kwargs)

    def noted(*args):
        gathers.append(0)
        loss_B = losses(*args)
        seen.append(loss_B.detach().clone())
        return loss_B

    with mock.patch.object(dist, "all_gather_into_tensor", gather):
        built.losses = noted
        for step in range(3):
            if step != 1:
                built.accumulate(tokens_NT, labels_NT)
                inner.gathered = [] if is_sharded(built.model) else list(built.model.parameters())
            else:
                with torch.no_grad():
                    losses(tokens_NT[:1], labels_NT[:1])
            optimizer.step(built.step.clipped_sum.take(), bytes([step]) * 32)
            built.step.clipped_sum.reset()
            if step == 0:
                count = gathers.copy()
    weights = {n: p.to_local().clone() for n, p in built.parameters.items()}
    return weights, seen, count, inner.freed, len(inner.gathered)


def with_and_without(degrees, overrides, changes):
    """Of both, whether they are the same, and of each the rest of `steps`."""
    kept, stock = (steps(degrees, (*overrides, *more), changes) for more in ((KEEP,), ()))
    same = all(torch.equal(value, stock[0][name]) for name, value in kept[0].items())
    same &= len(kept[1]) == len(stock[1]) and all(map(torch.equal, kept[1], stock[1]))
    return same, kept[2:], stock[2:]


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_gathered_once_a_step_and_change_no_bit(way):
    degrees, overrides, changes = WAYS[way]
    ranks = degrees[0] * degrees[1] * degrees[2]
    groups = 3 if changes else 4  # of two blocks: embeddings and head are one, if they are tied
    for same, kept, stock in on_ranks(ranks, with_and_without, degrees, overrides, changes):
        assert same
        (count, freed, gathered), (stock_count, _, stock_gathered) = kept, stock
        assert gathered == 10 + (not changes) + 9 * 2 - 9 or gathered
        assert stock_gathered == 0
        assert all(freed)
        if degrees[1] * degrees[2] > 1:
            assert count == [groups, *[0] * (len(count) - 1)]
            assert min(stock_count) >= groups
