"""Ring attention's loop over blocks, in little memory: sums in place, heads apart at long T.

Each rank of a context-parallel group has the queries, keys and values of its own tokens. Keys and
values travel around the ring; each rank attends to one block of them at a time and merges the
results by logsumexp (Liu et al. 2023, "Ring Attention", arXiv 2310.01889). In backward the fp32
gradients of keys and values travel along. fp32 results are PyTorch's `_templated_ring_attention`'s
bit by bit, but partial outputs and gradients are merged in place, keys and values are packed once,
outputs and gradients lie as (B, T, H, F), and from `heads_apart_from` tokens on, the kernel runs on
the queries of one key head at a time: FlashAttention's backward needs fp32 dQ, and dK and dV of
every query head, at 131,072 tokens of 32 heads 4 GiB, of 4 heads 0.5 GiB.

A ring of one rank is attention without a ring, with heads apart. A sequence is dealt out
contiguously, or "head-tail" (rank r of n has chunks r and 2n - 1 - r), as by TorchTitan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.base.collectives import begin_all_gather, pass_on

HEADS_APART_FROM = 2**16
"""Tokens a rank, from which kernels run on one key head at a time: so many fill a device with few
heads, and a kernel's workspace for all heads is among the largest tensors of a block."""

Kernel = Callable[..., tuple[Any, ...]]  # attention within one block, forward or backward


class Block(NamedTuple):
    """A rectangle of attention's scores."""

    queries: slice
    keys: slice
    is_causal: bool


_Index = tuple[slice, slice, slice]  # of (B, H, T): a part of a tensor


def _parts(
    block: Block, query: Tensor, key: Tensor, heads_apart: bool
) -> Iterator[tuple[_Index, _Index]]:
    """Yield where the queries and the keys of a block lie, by the heads that share keys."""
    heads, key_heads = query.shape[1], key.shape[1]
    at_once = 1 if heads_apart else key_heads
    shared = heads // key_heads
    for start in range(0, key_heads, at_once):
        end, all_B = start + at_once, slice(None)
        queries = all_B, slice(start * shared, end * shared), block.queries
        yield queries, (all_B, slice(start, end), block.keys)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a sample's sequence, and how keys travel to it."""

    group: dist.ProcessGroup | None = None
    """The ranks that share it; None for the whole sequence."""

    balanced: bool = False
    """Whether rank r of n has chunks r and 2n - 1 - r; otherwise it has chunk r of n."""

    at_once: bool = False
    """Whether a ring gathers all keys and values at once (fewer, larger messages); otherwise it
    passes them around, holding one other rank's at a time (long context)."""

    heads_apart_from: int = HEADS_APART_FROM
    """The fewest tokens of a rank at which a kernel runs on one key head at a time."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks that share the sequence."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def chunks(self, rank: int) -> list[int]:
        """Return the places of a rank's chunks in the sequence."""
        return [rank, 2 * self.size - 1 - rank] if self.balanced else [rank]

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor of all tokens."""
        number = self.size * (2 if self.balanced else 1)
        assert whole.shape[dim] % number == 0, "chunks are equally long"
        chunks = whole.chunk(number, dim)
        return torch.cat([chunks[place] for place in self.chunks(self.rank)], dim)

    def block(self, step: int, tokens: int, is_causal: bool) -> Block | None:
        """Return the scores to compute with the keys of the rank `step` places before this one,
        where each has `tokens`; None where all are masked."""
        whole, half = slice(0, tokens), tokens // 2
        if step == 0 or not is_causal:
            return Block(whole, whole, is_causal)
        before = step <= self.rank  # the keys' rank is earlier in the order of ranks
        if not self.balanced:
            return Block(whole, whole, False) if before else None
        # Every query sees the head of an earlier rank; of a later one the tail's queries see all.
        if before:
            return Block(whole, slice(0, half), False)
        return Block(slice(half, tokens), whole, False)

    def attend(
        self,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        **terms: Any,
    ) -> tuple[Any, ...]:
        """Attend to the keys of all ranks.

        Args:
            kernel: takes (query, key, value) of a block, `is_causal` and `terms`; returns the
                output, its logsumexp (B, H, T) or (B, H, T, 1), and more.
            query, key, value: (B, H or fewer, T, F) of this rank's tokens.

        Returns:
            The output (B, H, T, F), the logsumexp, and the kernel's further results of its last
            block.

        Collectives, over the group: keys and values are passed on, ranks - 1 times, or gathered.
        """
        apart = query.shape[2] >= self.heads_apart_from
        dtype = query.dtype if self.size == 1 else torch.float32
        out = _heads_last(query, (*query.shape[:3], value.shape[3]), dtype)
        merged = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        logsumexp, rest = merged, []
        for step, (key_of_block, value_of_block) in enumerate(self._passed_around(key, value)):
            block = self.block(step, query.shape[2], is_causal)
            if block is None:
                continue
            for queries, keys in _parts(block, query, key, apart):
                part, logsumexp, *rest = kernel(
                    query[queries],
                    key_of_block[keys],
                    value_of_block[keys],
                    is_causal=block.is_causal,
                    **terms,
                )
                flat = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
                if step == 0:
                    out[queries], merged[queries] = part, flat
                else:
                    _merge(out[queries], merged[queries], part, flat)
        if logsumexp.dim() == 4:  # cuDNN's
            merged = merged.unsqueeze(-1)
        return out.to(query.dtype), merged.to(logsumexp.dtype), *rest

    def attend_backward(
        self,
        kernel: Kernel,
        of_queries: dict[str, Tensor],
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        **terms: Any,
    ) -> tuple[Any, ...]:
        """Compute the gradients of `attend`'s query, key and value.

        Args:
            kernel: takes a block's tensors by name, `is_causal` and `terms`; returns the three
                gradients, and more.
            of_queries: `query`, and `attend`'s `out` and `logsumexp`, and `grad_out`.

        Returns:
            The three gradients, and the kernel's further results of its last block.

        Collectives, over the group: those of `attend`, and gradients are passed on, as often as
        there are ranks, since each adds to them.
        """
        query, travelling = of_queries["query"], None
        apart = query.shape[2] >= self.heads_apart_from
        dtype = query.dtype if self.size == 1 else torch.float32
        grad_query = _heads_last(query, query.shape, dtype).zero_()
        # cuDNN caches its kernels by the layouts of q, k and v alone: this one must not vary.
        grad_out = of_queries["grad_out"].transpose(1, 2).contiguous().transpose(1, 2)
        of_queries = {**of_queries, "grad_out": grad_out}
        gradients = torch.zeros((2, *key.shape), dtype=dtype, device=key.device)
        rest: list[Any] = []
        for step, (key_of_block, value_of_block) in enumerate(self._passed_around(key, value)):
            block = self.block(step, query.shape[2], is_causal)
            formed = []
            for queries, keys in _parts(block, query, key, apart) if block else ():
                assert block is not None
                here = {name: tensor[queries] for name, tensor in of_queries.items()}
                here["logsumexp"] = here["logsumexp"].contiguous()  # kernels assume its strides
                of_query, *of_keys_values = kernel(
                    **here,
                    key=key_of_block[keys],
                    value=value_of_block[keys],
                    is_causal=block.is_causal,
                    **terms,
                )
                grad_query[queries] += of_query
                formed.append((keys, of_keys_values[:2]))
                rest = of_keys_values[2:]
                del here, of_query, of_keys_values
            if travelling is not None:  # sent by the rank before while this block was computed
                gradients = travelling.wait().view(gradients.shape)
            for keys, parts in formed:
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient[keys] += part
            formed.clear()
            if self.size > 1:
                assert self.group is not None
                travelling = pass_on(gradients.view(-1), self.group)
        if travelling is not None:  # back at the keys' own rank
            gradients = travelling.wait().view(gradients.shape)
        return grad_query.to(query.dtype), *gradients.to(key.dtype), *rest

    def _passed_around(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of all ranks: this rank's, then those of the one before."""
        if self.size == 1:
            yield key, value
            return
        for flat in self._from_all_ranks(torch.cat([key.flatten(), value.flatten()])):
            of_key, of_value = flat.split((key.numel(), value.numel()))
            yield of_key.view(key.shape), of_value.view(value.shape)

    def _from_all_ranks(self, own: Tensor) -> Iterator[Tensor]:
        """Yield the flat buffers of all ranks: this rank's, then those of the ones before it."""
        assert self.group is not None
        if self.at_once:
            gathered = begin_all_gather(own, self.group)
            yield own
            del own
            parts = gathered.wait().chunk(self.size)
            yield from (parts[self.rank - step] for step in range(1, self.size))
            return
        for _ in range(1, self.size):
            arriving = pass_on(own, self.group)
            yield own
            own = arriving.wait()
        yield own


def _merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge a block's output and logsumexp into those so far, in place, in fp32; stable, as
    PyTorch's `_SDPAMerger`: sigmoid and logsigmoid are of differences."""
    more, difference = part_logsumexp.float() - logsumexp, out - part
    out.sub_(difference.mul_(torch.sigmoid(more).unsqueeze(-1)))
    logsumexp.sub_(F.logsigmoid(-more))


def _heads_last(like: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of shape (B, H, T, F) that lies in memory as (B, T, H, F)."""
    B, H, T, size = shape
    return torch.empty((B, T, H, size), dtype=dtype, device=like.device).transpose(1, 2)
