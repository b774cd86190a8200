"""Attention within a block, by what PyTorch has on each device, or with a soft cap of scores.

A kernel's forward takes queries (B, H, queries, F), keys and values (B, K, keys, F), `bias`
(queries, keys) of their dtype to add to the scores, or None, `is_causal` and `scale`. It returns
the output, its logsumexp, and what its backward takes as `more`. Backward takes tensors by name.
This is what `distributed.ring` calls a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_dp.distributed.attention import attend_unpadded, backward_padded
from torchtitan_dp.torch_private import attention_operators

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
    found: tuple[Any, ...] = _cpu_op(*tensors, attn_mask=bias, **terms)
    return found


def _cpu_backward(*, bias: Tensor | None, more: list[Tensor], **terms: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _cpu_backward_op(attn_mask=bias, dropout_p=0.0, **terms)
    return found


def _cuda(
    query: Tensor, *keys_values: Tensor, bias: Tensor | None, **terms: Any
) -> tuple[Any, ...]:
    """Attend by the memory-efficient kernel, the only one that takes a bias and fp32. It has no
    grouped queries."""
    groups = query.shape[1] // keys_values[0].shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in keys_values)
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
        assert not is_causal, "the bias masks"
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
