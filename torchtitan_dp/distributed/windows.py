"""Attention that the plain ring does not have: windows, sinks, soft caps of scores.

Query i sees keys j with 0 <= i - j < window. A chunk of the sequence (one for each rank, or two
where the load is balanced) needs the `window - 1` tokens before it: ranks send them to each other
at once, and send their gradients back, in fp32. Then tiles of queries attend to the keys that they
reach. Neither what a rank sends nor the work for a query grows with the sequence.

A sink is one more score of each head, without a value. With logsumexp' = logaddexp(logsumexp, sink)
and out' = out * exp(logsumexp - logsumexp'), the kernels' own backward is right, on tiles and on
the ring.

A soft cap has no kernel that runs everywhere (the backward of flex attention needs CUDA): a tile's
scores are all there. Without a window, each rank has the keys of all tokens before its own; hence
`check_softcap`.

A kernel, as `distributed.ring` calls it, attends within a block. Its forward takes queries (B, H,
queries, F), keys and values (B, K, keys, F), `bias` (queries, keys) of their dtype or None,
`is_causal` and `scale`; it returns the output, its logsumexp, and what its backward takes as
`more`. Backward takes tensors by name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.base.collectives import exchange
from torchtitan_dp.base.torch_private import attention_operators
from torchtitan_dp.distributed.attention import attend_unpadded, backward_padded
from torchtitan_dp.distributed.ring import Shard

CAPPED_KEYS = 2**15
"""The most keys of a query with a soft cap of scores."""

_TILE = 256, 1024  # the bounds of a tile's queries, otherwise as many as a window has
_CAPPED_SCORES = 2**21  # of a tile and head: 8 MiB in fp32
_ALIGNED_KEYS = 16  # CUDA's kernel reads so many elements of a mask's row at once


_cpu_op, _cpu_backward_op = attention_operators("cpu")


class Kernel(NamedTuple):
    """Attention within a block."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]


def kernel_of(device: torch.device, softcap: float | None) -> Kernel:
    """Return the kernel for tensors of a device; with a soft cap it works on any."""
    if softcap is not None:
        capped = _Capped(softcap)
        return Kernel(capped.forward, capped.backward)
    return _CUDA if device.type == "cuda" else _CPU


def _cpu(*tensors: Tensor, bias: Tensor | None, **terms: Any) -> tuple[Any, ...]:
    return _cpu_op(*tensors, attn_mask=bias, **terms)


def _cpu_backward(*, bias: Tensor | None, more: list[Tensor], **terms: Any) -> tuple[Any, ...]:
    return _cpu_backward_op(attn_mask=bias, dropout_p=0.0, **terms)


def _cuda(query: Tensor, *key_value: Tensor, bias: Tensor | None, **terms: Any) -> tuple[Any, ...]:
    """Attend by the only kernel that takes a bias and fp32. It has no grouped queries."""
    groups = query.shape[1] // key_value[0].shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in key_value)
    terms |= {"attn_bias": _expanded(bias, query), "compute_log_sumexp": True, "dropout_p": 0.0}
    return attend_unpadded(query, key, value, **terms)


def _cuda_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    more: list[Tensor],
    **terms: Any,
) -> tuple[Any, ...]:
    sizes = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(sizes[1], dim=1) for x in (key, value))
    terms |= {"query": query, "key": key, "value": value, "attn_bias": _expanded(bias, query)}
    terms |= {"philox_seed": more[0], "philox_offset": more[1], "dropout_p": 0.0}
    grads = backward_padded(**terms, grad_input_mask=[True, True, True, False])
    return grads[0], *(x.unflatten(1, sizes).sum(2) for x in grads[1:3])


def _expanded(bias: Tensor | None, query: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


_CPU, _CUDA = Kernel(_cpu, _cpu_backward), Kernel(_cuda, _cuda_backward)


@dataclass(frozen=True)
class _Capped:
    """Attention with scores cap * tanh(scores / cap), which are all there, in fp32 at least, and
    computed again in backward. Queries that share a key head are rows of one product."""

    cap: float

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **terms: Any
    ) -> tuple[Any, ...]:
        """Return the output and its logsumexp."""
        scores, _ = self._scores(query, key, **terms)
        logsumexp = scores.logsumexp(-1)
        out = (scores - logsumexp.unsqueeze(-1)).exp_() @ value.to(scores.dtype)
        sizes = query.shape[1] // key.shape[1], query.shape[2]
        out, logsumexp = (x.unflatten(2, sizes).flatten(1, 2) for x in (out, logsumexp))
        return out.to(query.dtype), logsumexp

    def backward(
        self,
        *,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
        more: list[Tensor],
        **terms: Any,
    ) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values."""
        scores, slope = self._scores(query, key, **terms)
        key, value = key.to(scores.dtype), value.to(scores.dtype)
        q, grad, sums, of_rows = (
            _by_key_heads(x, key).to(scores.dtype)
            for x in (query, grad_out, row_sums(grad_out, out), logsumexp)
        )
        weights = scores.sub_(of_rows.unsqueeze(-1)).exp_()
        grad_value = weights.mT @ grad
        of_scores = (grad @ value.mT).sub_(sums.unsqueeze(-1)).mul_(weights).mul_(slope)
        grad_query = (of_scores @ key).unflatten(2, (-1, query.shape[2])).flatten(1, 2)
        return grad_query, of_scores.mT @ q, grad_value

    def _scores(
        self, query: Tensor, key: Tensor, *, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return scores (B, K, H / K * queries, keys), and their slopes by q @ k."""
        dtype = sum_dtype(query)
        q = _by_key_heads(query, key).to(dtype)
        bounded = (q @ key.to(dtype).mT).mul_(scale / self.cap).tanh_()
        masked = torch.add(bias.repeat(query.shape[1] // key.shape[1], 1), bounded, alpha=self.cap)
        return masked, bounded.square_().neg_().add_(1).mul_(scale)


def _by_key_heads(x: Tensor, key: Tensor) -> Tensor:
    """Turn (B, H, queries, …) into (B, K, H / K * queries, …)."""
    return x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def row_sums(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return the products of outputs with their gradients, summed (B, H, T)."""
    return (grad_out * out.to(sum_dtype(out))).sum(-1)


def sum_dtype(of: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64."""
    return torch.promote_types(of.dtype, torch.float32)


def check_softcap(tokens: int, window: int | None) -> None:
    """Refuse a soft cap of scores in sequences of so many tokens, if queries see too many."""
    keys = tokens if window is None else min(window, tokens)
    if keys > CAPPED_KEYS:
        raise ValueError(f"soft caps have no kernel: at most {CAPPED_KEYS:,} keys, not {keys:,}")


def attend(
    q_BHTF: Tensor,
    k_BKTF: Tensor,
    v_BKTF: Tensor,
    *,
    shard: Shard,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return causal attention (B, H, T, F) of this rank's tokens.

    Args:
        q_BHTF, k_BKTF, v_BKTF: of this rank's tokens, equally many on all ranks.
        window: the tokens that a query sees, its own among them; None for all.
        softcap: replaces scores by softcap * tanh(scores / softcap).
        sinks_H: one more score of each head, without a value.

    Collectives: over the shard's group, in forward and in backward.
    """
    size, T = shard.size, q_BHTF.shape[2]
    kernel = kernel_of(q_BHTF.device, softcap)
    way: _Whole | _Windowed
    if softcap is None and (window is None or window >= size * T):
        way = _Whole(kernel, shard, {"is_causal": True, "bias": None, "scale": scale})
    else:
        window = size * T if window is None else min(window, size * T)
        tile = min(max(window, _TILE[0]), _TILE[1])
        if softcap is not None:
            check_softcap(size * T, window)
            tile = min(tile, _CAPPED_SCORES // window)
        if size == 1:  # one rank's two chunks are the whole
            shard = Shard()
        way = _Windowed(kernel, scale, tile, shard, window, T // (1 + shard.balanced))
    return _Attention.apply(q_BHTF, k_BKTF, v_BKTF, sinks_H, way)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, way: "_Whole | _Windowed"
    ) -> Tensor:
        keys_values = way.reached(k, v)
        out, logsumexp, *more = way.attend(q, keys_values)
        if sinks_H is not None:
            with_sink = torch.logaddexp(logsumexp, sinks_H[:, None].to(logsumexp.dtype))
            out.mul_((logsumexp - with_sink).exp_().unsqueeze(-1))
            logsumexp = with_sink
        ctx.way, ctx.parts = way, len(keys_values)
        ctx.save_for_backward(q, out, logsumexp, sinks_H, *keys_values, *more)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, out, logsumexp, sinks_H, *rest = ctx.saved_tensors
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)  # as the ring has it
        grad_sinks = None
        if sinks_H is not None:
            of_sink = (sinks_H[:, None].to(logsumexp.dtype) - logsumexp).exp_()
            grad_sinks = -(of_sink * row_sums(grad_out, out)).sum((0, 2)).to(sinks_H.dtype)
        of_queries = {"query": q, "out": out, "logsumexp": logsumexp, "grad_out": grad_out}
        keys_values, more = rest[: ctx.parts], rest[ctx.parts :]
        return *ctx.way.attend_backward(of_queries, keys_values, more), grad_sinks, None


class _Whole(NamedTuple):
    """Attention to all tokens before, on a ring."""

    kernel: Kernel
    shard: Shard
    terms: dict[str, Any]  # of the kernel

    def reached(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return what backward needs of keys and values."""
        return [k, v]

    def attend(self, q: Tensor, keys_values: list[Tensor]) -> tuple[Any, ...]:
        """Return the output, its logsumexp, and more that backward needs."""
        return self.shard.attend(self.kernel.forward, q, *keys_values, **self.terms)

    def attend_backward(
        self, of_queries: dict[str, Tensor], keys_values: list[Tensor], more: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        terms = {**self.terms, "more": more}
        backward = self.kernel.backward
        return self.shard.attend_backward(backward, of_queries, *keys_values, **terms)[:3]


class _Windowed(NamedTuple):
    """Attention to the tokens of a window, in tiles of queries; and how the tokens before a chunk,
    which it reaches, travel."""

    kernel: Kernel
    scale: float
    tile: int
    shard: Shard
    window: int
    tokens: int  # T of a chunk

    def reached(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return the keys and values (2, B, K, before and own, F) that each chunk reaches.

        Collective: over the group.
        """
        own, numbers = torch.stack((k, v)), self.shard.chunks(self.shard.rank)
        chunks = zip(numbers, own.split(self.tokens, dim=-2), strict=True)
        reached = [F.pad(chunk, (0, 0, self._before(number), 0)) for number, chunk in chunks]
        self._exchange(own, reached)
        return reached

    def attend(self, q: Tensor, keys_values: list[Tensor]) -> tuple[Any, ...]:
        """Return the output, its logsumexp, and more that backward needs."""
        out, more = torch.empty_like(q), []
        logsumexp = torch.empty(q.shape[:3], dtype=sum_dtype(q), device=q.device)
        for chunk, queries, keys, bias in self._tiles(q, keys_values):
            here = q[:, :, queries], *keys_values[chunk][..., keys, :]
            how: dict[str, Any] = {"is_causal": False, "bias": bias, "scale": self.scale}
            out[:, :, queries], logsumexp[:, :, queries], *more = self.kernel.forward(*here, **how)
        return out, logsumexp, *more

    def attend_backward(
        self, of_queries: dict[str, Tensor], keys_values: list[Tensor], more: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values. Collective: over the group."""
        q = of_queries["query"]
        grad_query = torch.empty_like(q)
        # Tiles and ranks add to a key's gradient.
        sums = [torch.zeros_like(part, dtype=sum_dtype(part)) for part in keys_values]
        for chunk, queries, keys, bias in self._tiles(q, keys_values):
            here = {name: tensor[:, :, queries] for name, tensor in of_queries.items()}
            here["logsumexp"] = here["logsumexp"].contiguous()  # kernels assume its strides
            here["key"], here["value"] = keys_values[chunk][..., keys, :]
            terms = {"is_causal": False, "bias": bias, "scale": self.scale, "more": more}
            grad_query[:, :, queries], *of_keys = self.kernel.backward(**here, **terms)
            for total, part in zip(sums[chunk][..., keys, :], of_keys[:2], strict=True):
                total += part
        own = torch.cat([total[..., -self.tokens :, :] for total in sums], dim=-2)
        self._exchange(own, sums, back=True)
        return grad_query, *own.to(q.dtype)

    def _tiles(
        self, q: Tensor, keys_values: Sequence[Tensor]
    ) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Yield each tile's chunk, queries, keys among those that it reaches, and bias."""
        tokens, window, bias = self.tokens, self.window, q.new_empty((0, 0))
        for chunk, part in enumerate(keys_values):
            before = part.shape[-2] - tokens
            for tile in tiles(tokens, self.tile):
                start, end = max(0, before + tile.start - window + 1), before + tile.stop
                shape = tile.stop - tile.start, end - start
                if bias.shape != shape:  # it is the same for most tiles
                    bias = _band(*shape, window, q)
                first = chunk * tokens
                yield chunk, slice(first + tile.start, first + tile.stop), slice(start, end), bias

    def _before(self, number: int) -> int:
        return min(self.window - 1, number * self.tokens)

    def _routes(self, source: int, target: int) -> Iterator[tuple[slice, int, slice]]:
        """Yield what a rank's chunks reach of a source's: which of the source's tokens, the place
        of the chunk, and which of the tokens before it these are."""
        for chunk, number in enumerate(self.shard.chunks(target)):
            first = number * self.tokens - self._before(number)
            for place, other in enumerate(self.shard.chunks(source)):
                start, end = max(first, other * self.tokens), (other + 1) * self.tokens
                if other < number and start < end:
                    shift = (place - other) * self.tokens
                    rows = slice(start + shift, end + shift)
                    yield rows, chunk, slice(start - first, end - first)

    def _exchange(self, own: Tensor, reached: list[Tensor], *, back: bool = False) -> None:
        """Copy what chunks reach of `own` into `reached`; with `back`, add it to `own`."""
        if self.shard.group is None or self.window == 1:
            return
        rank, ranks = self.shard.rank, range(self.shard.size)
        here = [[own[..., rows, :] for rows, _, _ in self._routes(rank, to)] for to in ranks]
        there = [
            [reached[chunk][..., before, :] for _, chunk, before in self._routes(of, rank)]
            for of in ranks
        ]
        sent, wanted = (there, here) if back else (here, there)
        to_each, from_each = ([sum(x.numel() for x in xs) for xs in way] for way in (sent, wanted))
        flat_sent, flat_wanted = ([x for xs in way for x in xs] for way in (sent, wanted))
        empty = (flat_sent or flat_wanted)[0].new_empty(0)  # the last chunk is reached by none
        buffer = torch.cat([empty, *(x.flatten() for x in flat_sent)])
        arrived = exchange(buffer, to_each, from_each, self.shard.group).wait()
        parts = arrived.split([x.numel() for x in flat_wanted])
        for x, part in zip(flat_wanted, parts, strict=True):
            (x.add_ if back else x.copy_)(part.view(x.shape))


def tiles(tokens: int, size: int) -> Iterator[slice]:
    """Cut a chunk into tiles, of which the last may be shorter."""
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _band(queries: int, keys: int, window: int, like: Tensor) -> Tensor:
    """Return a bias, 0 for keys that a query sees, else -inf; the last query is at the last key."""
    at_keys = torch.arange(keys + -keys % _ALIGNED_KEYS, device=like.device)
    distance = torch.arange(keys - queries, keys, device=like.device)[:, None] - at_keys
    bias = torch.zeros_like(distance, dtype=like.dtype)
    return bias.masked_fill_((distance < 0) | (distance >= window), -torch.inf)[:, :keys]
