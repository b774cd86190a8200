"""Weights kept gathered within a step: gathered once, of the same bits, and never those of before.

Steps of four samples are taken as in training, with noise: a first one, one that draws nobody after
a forward pass without a backward pass (as validation's is), and a last.
"""

from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.privacy.banded import StepNoise

MICROBATCH = ("--privacy.gradient_method=microbatch",)
GRAD_SAMPLE = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
BF16 = "--training.mixed_precision_param=bfloat16"
FULL = "--activation_checkpoint.mode=full"
RESHARD = "--parallelism.fsdp_reshard_after_forward"
WAYS = {
    "microbatch": ((1, 1, 1), (*MICROBATCH, BF16), {}),
    "grad_sample": ((1, 1, 1), (*GRAD_SAMPLE, BF16), {}),
    "offload, tied": (
        (1, 1, 2),
        (*GRAD_SAMPLE, FULL, "--activation_checkpoint.offload_inputs"),
        {"tie_word_embeddings": True},
    ),
    "always": ((1, 1, 2), (*MICROBATCH, BF16, f"{RESHARD}=always"), {}),
    "never": ((1, 2, 1), (*MICROBATCH, BF16, f"{RESHARD}=never"), {}),
    "dp_shard 2, cp 2": ((1, 2, 2), (*MICROBATCH, BF16, FULL), {}),
    "dp_replicate 2, cp 2": ((2, 1, 2), (*GRAD_SAMPLE, BF16), {}),
}


class Inner(torch.optim.SGD):
    """Looks, at each update, at the memory of what was gathered and at what the model holds."""

    def __init__(self, built):
        super().__init__(built.parameters.values(), lr=0.1)
        self.model, self.gathered, self.freed = built.model, [], []

    def step(self, closure=None):
        self.freed.append(all(x.untyped_storage().nbytes() == 0 for x in self.gathered))
        self.freed.append(all(isinstance(x, DTensor) for x in self.model.parameters()))
        return super().step(closure)


def steps(degrees, overrides, changes, reshard=False):
    """The weights and losses of three steps, how many groups' weights each microbatch of the first
    made whole, and what was found at each update; `reshard` frees all that is gathered before each
    step, without the package."""
    args = build.llama(**changes)
    with mock.patch("torchtitan_dp.models.parallelize.IN_ONE_GROUP", 0):
        built = build.build(degrees, *overrides, args=args)
    inner, seen = Inner(built), []
    optimizer = built.step.optimizer(inner, noise_multiplier=0.1, expected_batch_size=4)
    tokens_NT, labels_NT = build.data(samples=4)
    losses, counts, made_whole = built.losses, [], FSDPParamGroup._to_unsharded

    def noted(*args):
        counts.append(0)
        loss_B = losses(*args)
        seen.append(loss_B.detach().clone())
        return loss_B

    def count(group):
        counts[-1] += 1
        made_whole(group)

    built.losses = noted
    with mock.patch.object(FSDPParamGroup, "_to_unsharded", count):
        for step in range(3):
            for module in built.model.modules() if reshard else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
            if step == 1:
                with torch.no_grad():
                    losses(tokens_NT[:2], labels_NT[:2])
            else:
                built.accumulate(tokens_NT, labels_NT)
            held = [x for x in built.model.parameters() if not isinstance(x, DTensor)]
            inner.gathered = held if step != 1 else []
            optimizer.step(built.step.clipped_sum.take(), StepNoise(bytes([step]) * 32))
            built.step.clipped_sum.reset()
            if step == 0:
                of_first = counts[:]
    weights = [p.to_local().clone() for p in built.parameters.values()]
    return [*weights, *seen], of_first, inner.freed, len(inner.gathered)


def with_and_without(degrees, overrides, changes):
    """Of steps with the key and without: whether they are the same, and the rest of `steps`."""
    kept = steps(degrees, (*overrides, "--parallelism.keep_weights_gathered"), changes)
    stock = steps(degrees, overrides, changes, reshard=True)
    same = len(kept[0]) == len(stock[0]) and all(map(torch.equal, kept[0], stock[0]))
    return same, kept[1:], stock[1:]


@pytest.mark.thorough_cases("always", "never", "dp_*")
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_gathered_once_a_step_and_change_no_bit(way):
    degrees, overrides, changes = WAYS[way]
    ranks = degrees[0] * degrees[1] * degrees[2]
    # Of two blocks; embeddings and head are one group if they are tied.
    groups, parameters = (3, 20) if changes else (4, 21)
    for same, kept, stock in on_ranks(ranks, with_and_without, degrees, overrides, changes):
        assert same
        made_whole, freed, held = kept
        assert made_whole == [groups] + [0] * (len(made_whole) - 1)
        assert held == parameters
        assert all(freed)
        made_whole, freed, held = stock
        assert min(made_whole) >= groups
        assert held == 0
        assert all(freed)


def without_reshards(degrees):
    plain, resharded = (steps(degrees, MICROBATCH, {}, reshard)[0] for reshard in (False, True))
    return all(map(torch.equal, plain, resharded))


@pytest.mark.parametrize("cp", [1, 2])
def test_what_validation_gathered_is_not_used_after_an_update(cp):
    """Without the key too: FSDP2 keeps the head after forward, and a step that draws nobody has no
    backward pass to free it."""
    assert on_ranks(cp, without_reshards, (1, 1, cp)) == [True] * cp
