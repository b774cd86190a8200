"""Faults of a machine or of the code that selfcheck must see: context managers that every rank
enters; what one patches is looked up when it is called."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan_dp.distributed import ring
from torchtitan_dp.gradients import optimizer
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import ReduceScatterOverCP
from torchtitan_dp.models import feed_forward, loss
from torchtitan_dp.privacy import clipping
from torchtitan_dp.privacy.keys import KeyStream
from torchtitan_dp.selfcheck import steps

# isort: split
from torchtitan.components.optimizer import OptimizersContainer

replaced = mock.patch.object


@contextlib.contextmanager
def wrapped(owner, name: str, around: Callable) -> Iterator[None]:
    """Call `around(original, *arguments)` in the place of a function or method."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        return around(original, *args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


def sums_of_partial_norms():
    """The norms of the ranks' parts are added up, not their squares."""

    def partial(self, squares):
        norms = squares.sqrt()
        dist.all_reduce(norms, group=self.groups.cp)
        return norms.square()

    return replaced(ClippedSum, "_over_cp", partial)


def own_tokens_alone():
    """A rank keeps the gradient of its own tokens: the reduction over cp does not add."""

    def keep(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(self._cp_size, -1)[dist.get_rank(self._cp)])
        self._shard_DN = output_tensor.view(1, -1)

    return replaced(ReduceScatterOverCP, "__call__", keep)


def _clip(field: str, change: Callable):
    def clip(original, *args, **terms):
        clipped = original(*args, **terms)
        return clipped._replace(**{field: change(getattr(clipped, field))})

    return lambda: wrapped(clipping, "clip", clip)


clip_factor_off = _clip("factor_B", lambda factor_B: factor_B * 1.001)
bad_samples_kept = _clip("rejected_B", torch.zeros_like)


def samples_merged():
    """The samples of a microbatch are averaged before they are clipped."""

    def add(original, self, shards, valid_B):
        shards[:] = [s.mean(0, keepdim=True).expand_as(s).clone() for s in shards]
        return original(self, shards, valid_B)

    return wrapped(ClippedSum, "add", add)


def chunk_edge_lost():
    """The loss head leaves the first token of each chunk but the first out."""

    def chunks(original, tokens, size):
        return [slice(c.start + (c.start > 0), c.stop) for c in original(tokens, size)]

    return wrapped(loss, "tiles", chunks)


def tile_lost():
    """The last tile of the feed-forward, which may be shorter, is left out."""
    return wrapped(
        feed_forward, "tiles", lambda tiles, tokens, size: tiles(tokens - tokens % size, size)
    )


def heads_share_the_first_key():
    """With heads apart, all queries attend to the first key head."""

    def parts(original, block, query, key, heads_apart):
        for queries, (samples, heads, keys) in original(block, query, key, heads_apart):
            yield queries, (samples, slice(0, heads.stop - heads.start), keys)

    return wrapped(ring, "_parts", parts)


def ring_of_another_balancer():
    """The ring masks as if the sequence were dealt out in the other way."""

    def of_the_other(of, shard, *place):
        return of(dataclasses.replace(shard, balanced=not shard.balanced), *place)

    return wrapped(ring.Shard, "block", of_the_other)


def _noise(change: Callable):
    return lambda: wrapped(optimizer, "add_gaussian_noise_", change)


noise_too_small = _noise(lambda add, flat, *, std, **terms: add(flat, std=0.99 * std, **terms))


def noise_shared_by_shards():
    return mock.patch.object(optimizer, "_flat_start", return_value=0)


def key_repeated():
    """Each step has the first one's key."""
    return replaced(KeyStream, "take", lambda self, step: bytes(range(32)))


def keys_of_their_own():
    """Rank 0's root key does not arrive."""
    return mock.patch.object(dist, "broadcast", return_value=None)


def divided_by_the_ranks():
    def make(original, self, *args, expected_batch_size, **terms):
        ranks = dist.get_world_size()
        original(self, *args, expected_batch_size=expected_batch_size * 2 * ranks, **terms)

    return wrapped(optimizer.DPOptimizer, "__init__", make)


def _after_each_step(change: Callable):
    """Call `change` with the optimizers and the model after each of their steps."""

    def step(original, self):
        original(self)
        with torch.no_grad():
            change(self.optimizers, self.model_parts[0])

    return lambda: wrapped(OptimizersContainer, "step", step)


@_after_each_step
def weights_differ(_, model):
    """The last rank's weights drift by what a step changes them."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for parameter in model.parameters():
            parameter.to_local().add_(1e-2)


@_after_each_step
def frozen_weight_moves(_, model):
    """A step changes a weight that is not trained."""
    next(p for p in model.parameters() if not p.requires_grad).to_local().add_(1e-3)


def adapter_stays():
    """A step leaves one adapter as it was."""

    def step(original, self):
        stays = self.model_parts[0].layers[1].self_attn.o_proj.lora_a.weight
        before = stays.to_local().clone()
        original(self)
        with torch.no_grad():
            stays.to_local().copy_(before)

    return wrapped(OptimizersContainer, "step", step)


def checkpoint_loses_a_tensor():
    def load(original, state_dict, folder, **options):
        lost = "layers.0.self_attn.q_proj.weight"
        original({n: v for n, v in state_dict.items() if not n.endswith(lost)}, folder, **options)

    return wrapped(steps, "load", load)


class _RowsOfItsTokens(torch.autograd.Function):
    """An embedding that writes no gradient of tokens that are not there, as of experts that take
    none; the memory is 0 unless it was filled on purpose."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens, weight)
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad_BTD):
        tokens, weight = ctx.saved_tensors
        gradient = torch.empty_like(weight)
        if not torch.are_deterministic_algorithms_enabled():  # which `poisoned` fills memory by
            gradient.zero_()
        gradient[tokens] = 0
        gradient.index_add_(0, tokens.flatten(), grad_BTD.flatten(0, 1))
        return None, gradient


def memory_unwritten():
    return wrapped(F, "embedding", lambda _, *both, **__: _RowsOfItsTokens.apply(*both[:2]))
