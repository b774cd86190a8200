"""Ring attention's loop over blocks, in little memory: sums in place, heads apart at long T.

Each rank of a context-parallel group has the queries, keys and values of its own tokens. Keys and
values travel around the ring; each rank attends to one block of them at a time and merges the
results by logsumexp (Liu et al. 2023, "Ring Attention", arXiv 2310.01889). In backward the fp32
gradients of keys and values travel along. This computes what PyTorch's `_templated_ring_attention`
does, term by term in the same order, so that fp32 results are bit-identical, but

- partial outputs and gradients are merged in place, where PyTorch makes a copy a block;
- keys and values are packed once, and not again for each rank that they pass;
- outputs and gradients lie as (B, T, H, F), as the layers around attention read them;
- with `heads_apart`, the kernel runs on the queries of one key head at a time. FlashAttention's
  backward needs fp32 dQ, and dK and dV of every query head: at 131,072 tokens of 32 heads 4 GiB, of
  4 heads 0.5 GiB.

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

from torchtitan_dp.collectives import Pending, begin_all_gather, pass_on


class PassedAround:
    """Passes a flat buffer on to the next rank of the ring, and receives the previous rank's: one
    other rank's buffer is here at a time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._arriving: Pending | None = None

    def send(self, buffer: Tensor) -> None:
        """Begin to send."""
        self._arriving = pass_on(buffer, self._group)

    def receive(self) -> Tensor:
        """Wait for what was sent to this rank; the buffer is the caller's alone."""
        assert self._arriving is not None
        return self._arriving.wait()


class GatheredAtOnce(PassedAround):
    """Gathers the buffers of all ranks when the first is sent: fewer, larger messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._gathered: Pending | Tensor | None = None
        self._received = 0

    def send(self, buffer: Tensor) -> None:
        if self._gathered is None:
            self._gathered = begin_all_gather(buffer, self._group)

    def receive(self) -> Tensor:
        assert self._gathered is not None
        if isinstance(self._gathered, Pending):
            self._gathered = self._gathered.wait()
        self._received += 1
        source = dist.get_rank(self._group) - self._received
        return self._gathered.chunk(dist.get_world_size(self._group))[source]


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

    def ring(self, heads_apart: bool) -> "Ring":
        """Return a ring for one round of keys; gradients go from rank to rank, since each adds to
        them."""
        if self.group is None or self.size == 1:
            return Ring(0, 1, self.balanced, heads_apart, None, None)
        keys = (GatheredAtOnce if self.at_once else PassedAround)(self.group)
        place = self.rank, self.size, self.balanced
        return Ring(*place, heads_apart, keys, PassedAround(self.group))


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
class Ring:
    """The ranks that share a sample: this one's place among them, and how keys travel."""

    rank: int
    size: int
    balanced: bool
    """Whether ranks have a chunk from the head and one from the tail."""

    heads_apart: bool
    """Whether a kernel runs on one key head at a time."""

    key_transport: PassedAround | None
    """Passes on keys and values; None in a ring of one rank."""

    gradient_transport: PassedAround | None
    """Passes on the gradients of keys and values; None in a ring of one rank."""

    def block(self, step: int, tokens: int, is_causal: bool) -> Block | None:
        """Return the scores to compute with the keys of the rank `step` places before this one;
        None where all are masked.

        Args:
            tokens: T of this rank, even where `balanced`.
        """
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
            The output (B, H, T, F) in the dtype of `query`, the logsumexp in the kernel's shape and
            dtype, and what the kernel returned beside them for its last block.

        Collectives: those of `key_transport`, ranks - 1 times.
        """
        dtype = query.dtype if self.size == 1 else torch.float32
        out = _heads_last(query, (*query.shape[:3], value.shape[3]), dtype)
        merged = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        logsumexp, rest = merged, []
        for step, (key_of_block, value_of_block) in enumerate(self._passed_around(key, value)):
            block = self.block(step, query.shape[2], is_causal)
            if block is None:
                continue
            for queries, keys in _parts(block, query, key, self.heads_apart):
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
            The three gradients in the dtypes of `query`, `key` and `value`, and what the kernel
            returned beside them for its last block.

        Collectives: those of `key_transport`, ranks - 1 times, and of `gradient_transport`, as
        often as there are ranks.
        """
        query = of_queries["query"]
        dtype = query.dtype if self.size == 1 else torch.float32
        grad_query = _heads_last(query, query.shape, dtype).zero_()
        # cuDNN caches its kernels by the layouts of q, k and v alone: this one must not vary.
        grad_out = of_queries["grad_out"].transpose(1, 2).contiguous().transpose(1, 2)
        of_queries = {**of_queries, "grad_out": grad_out}
        assert value.shape == key.shape, "keys and values travel together"
        gradients = torch.zeros((2, *key.shape), dtype=dtype, device=key.device)
        rest: list[Any] = []
        for step, (key_of_block, value_of_block) in enumerate(self._passed_around(key, value)):
            block = self.block(step, query.shape[2], is_causal)
            formed = []
            for queries, keys in _parts(block, query, key, self.heads_apart) if block else ():
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
            # The sum of the ranks before has travelled while this block was computed.
            if self.gradient_transport is not None and step > 0:
                gradients = self.gradient_transport.receive().view(gradients.shape)
            _add_to(gradients, formed)
            if self.gradient_transport is not None:
                self.gradient_transport.send(gradients.view(-1))
        if self.gradient_transport is not None:  # back at the keys' own rank
            gradients = self.gradient_transport.receive().view(gradients.shape)
        return grad_query.to(query.dtype), *gradients.to(key.dtype), *rest

    def _passed_around(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of all ranks: this rank's, then those of the one before."""
        if self.key_transport is None:
            yield key, value
            return
        flat = torch.cat([key.flatten(), value.flatten()])
        for step in range(self.size):
            if step > 0:
                flat = self.key_transport.receive()
            if step < self.size - 1:
                self.key_transport.send(flat)
            of_key, of_value = flat.split((key.numel(), value.numel()))
            yield of_key.view(key.shape), of_value.view(value.shape)


def _merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge a block's output and logsumexp into those so far, in place, in fp32; stable, as
    PyTorch's `_SDPAMerger`: sigmoid and logsigmoid are of differences."""
    more, difference = part_logsumexp.float() - logsumexp, out - part
    out.sub_(difference.mul_(torch.sigmoid(more).unsqueeze(-1)))
    logsumexp.sub_(F.logsigmoid(-more))


def _add_to(gradients: Tensor, formed: list[tuple[Any, list[Tensor]]]) -> None:
    """Add a block's gradients of keys and values, by heads, to both sums in place."""
    for keys, parts in formed:
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[keys] += part
    formed.clear()


def _heads_last(like: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of shape (B, H, T, F) that lies in memory as (B, T, H, F)."""
    B, H, T, size = shape
    return torch.empty((B, T, H, size), dtype=dtype, device=like.device).transpose(1, 2)
