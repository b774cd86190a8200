"""Ring attention over the context-parallel mesh; on one rank, fp32 attention in little memory.

PyTorch chooses the kernel, on CUDA and CPU alike, and under TorchTitan's context parallelism calls
the function that is registered for it: here, `distributed.ring` with that kernel. CUDA's
memory-efficient kernels, the only ones for fp32, pad logsumexp to 32 rows, which is cut off here
and added again for backward. From `Shard.heads_apart_from` tokens, a sequence that one rank has
alone is a ring of one, too.

Without a ring TorchTitan's list leaves fp32 to the math kernel, which keeps T x T scores for each
head. The memory-efficient kernel has no grouped queries, so keys and values are repeated for it.
"""

import dataclasses
import functools
import os
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_dp.base.torch_private import (
    AttentionKernel,
    argument_names,
    attention_operators,
    context_parallel_handlers,
)
from torchtitan_dp.distributed.devices import capability, cudnn_versions
from torchtitan_dp.distributed.ring import Shard

_SEQ_DIM = 2  # of q, k, v: (batch, heads, sequence, head_dim)
_efficient_op, _efficient_backward_op = attention_operators("efficient")
_Args = tuple[Any, ...]
_ALIGNED_ROWS = 32  # the memory-efficient kernels' kAlignLSE: backward loads so many rows at once

# The kernels that PyTorch can put on a ring. The math fallback is not among them: on a
# sequence-sharded DTensor it would apply the causal mask to rearranged positions.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

# Earlier versions fail or read out of bounds where keys do not fill a tile; PyTorch's own default
# requires this one (https://github.com/pytorch/pytorch/issues/169849).
_SAFE_CUDNN = (9, 15, 1)
_CUDNN_CAPABILITIES = (9, 10)  # Hopper and Blackwell: elsewhere PyTorch prefers flash attention

# Where this is set, cuDNN's kernels lay logsumexp out in another order.
_OTHER_LAYOUT = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"

# Math is for the head sizes that the other kernel does not take.
_BACKENDS_WITHOUT_RING = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def configure_ring(shard: Shard) -> None:
    """Attend by our ring under context parallelism, from now on in this process: over the mesh of
    each call, on the terms of `shard`. Of itself TorchTitan 0.2.2 ignores how keys are to travel.
    """
    handlers = context_parallel_handlers()
    for kernel in get_args(AttentionKernel):
        ways = zip(attention_operators(kernel), (_ring_forward, _ring_backward), strict=True)
        for operator, handler in ways:
            handlers[operator] = functools.partial(handler, shard)


def apply_ring_attention(modules: list[nn.Module], cp_mesh: DeviceMesh, *, cudnn: bool) -> None:
    """Run the scaled-dot-product attention of TorchTitan's wrappers as a ring over `cp_mesh`, with
    q, k, v (B, heads, T / cp, head_dim); `cudnn`: whether cuDNN may attend
    (`models.parallelize.takes_cudnn`)."""
    apply_cp_to_attention_module(modules, cp_mesh, "sdpa")
    for module in modules:
        module.sdpa_backends = _safe(_BACKENDS, cudnn)  # type: ignore[assignment]


def mesh_of_this_rank(device_type: str, name: str) -> DeviceMesh:
    """Return a one-dimensional mesh of this rank alone. Collective over the world."""
    every_rank_alone = (dist.get_world_size(), 1)
    return init_device_mesh(device_type, every_rank_alone, mesh_dim_names=("rank", name))[name]


def _safe(backends: list[SDPBackend], cudnn: bool = True) -> list[SDPBackend]:
    """Leave cuDNN out of a list of kernels where its results cannot be trusted: a NaN in its
    backward would reject a sample in silence.

    A list with priorities overrides the conditions under which PyTorch itself would choose cuDNN,
    so they are repeated here. Without a device the list stays, so that a prediction does not depend
    on the build.
    """
    compute = capability()
    trusted = (
        cudnn
        and all(version >= _SAFE_CUDNN for version in cudnn_versions())
        and (compute is None or compute[0] in _CUDNN_CAPABILITIES)
        and os.environ.get(_OTHER_LAYOUT, "0") == "0"
    )
    return [one for one in backends if trusted or one != SDPBackend.CUDNN_ATTENTION]


def _ring_forward(shard: Shard, op: Any, args: _Args, kwargs: dict[str, Any]) -> _Args:
    mesh, terms = _named(op, args, kwargs)
    if "compute_log_sumexp" in terms:
        terms["compute_log_sumexp"] = True  # the merge needs it, whether or not a gradient does
    kernel = attend_unpadded if op is _efficient_op else op
    out, logsumexp, *rest = _over(shard, mesh).attend(kernel, **terms)
    return (*_on_ring(mesh, out, logsumexp), *rest)


def _ring_backward(shard: Shard, op: Any, args: _Args, kwargs: dict[str, Any]) -> _Args:
    mesh, terms = _named(op, args, kwargs)
    kernel = backward_padded if op is _efficient_backward_op else functools.partial(_backward, op)
    of_queries = {name: terms.pop(name) for name in ("grad_out", "query", "out", "logsumexp")}
    gradients = _over(shard, mesh).attend_backward(kernel, of_queries, **terms)
    return (*_on_ring(mesh, *gradients[:3]), *gradients[3:])


def _named(op: Any, args: _Args, kwargs: dict[str, Any]) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return the mesh of an operator's DTensors, and its arguments by the schema's names, with
    local parts in the place of DTensors."""
    names = [name.rstrip("_") for name in argument_names(op)]  # one has grad_out_
    named = {"is_causal": False, **dict(zip(names, args, strict=False)), **kwargs}
    for mask in ("attn_bias", "attn_mask"):
        assert named.get(mask) is None, "the ring masks by position only"
    (mesh, *_) = (value.device_mesh for value in args if isinstance(value, DTensor))
    terms = {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in named.items()
    }
    return mesh, terms


def _over(shard: Shard, mesh: DeviceMesh) -> Shard:
    return dataclasses.replace(shard, group=mesh.get_group())


def _on_ring(mesh: DeviceMesh, *local_tensors: Tensor) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(tensor, mesh, [ShardOf(_SEQ_DIM)], run_check=False)
        for tensor in local_tensors
    )


def attend_unpadded(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Attend to one block by the memory-efficient kernel, and cut the padding off logsumexp."""
    out, logsumexp, *rest = _efficient_op(query, *args, **kwargs)
    return out, logsumexp[..., : query.shape[_SEQ_DIM]], *rest


def _backward(op: Any, *, query: Tensor, key: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """Compute one block's gradients: CUDA's kernels take its numbers of queries and keys."""
    if "max_q" in kwargs:
        kwargs |= {"max_q": query.shape[_SEQ_DIM], "max_k": key.shape[_SEQ_DIM]}
    return op(query=query, key=key, **kwargs)


def backward_padded(*, grad_out: Tensor, logsumexp: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """Compute one block's gradients, with logsumexp padded as by the forward kernel: by infinity,
    so that padded rows have probabilities of 0."""
    missing = -logsumexp.shape[_SEQ_DIM] % _ALIGNED_ROWS
    if missing and torch.version.hip is None:  # ROCm's kernels pad nothing
        logsumexp = F.pad(logsumexp, (0, missing), value=torch.inf)
    return _efficient_backward_op(grad_out_=grad_out, logsumexp=logsumexp.contiguous(), **kwargs)


def use_efficient_attention(model: nn.Module) -> None:
    """Replace TorchTitan's attention modules in place; 16-bit attention stays as it was, but
    without cuDNN where that cannot be trusted."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is ScaledDotProductAttentionWrapper:
                replaced = _EfficientAttention()
                replaced.sdpa_backends = _safe(child.sdpa_backends)  # type: ignore[assignment, arg-type]
                setattr(module, name, replaced)


class _EfficientAttention(ScaledDotProductAttentionWrapper):
    """TorchTitan's wrapper with another fp32 kernel; q, k, v of shape (B, heads, T, head_dim)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False, **terms: Any
    ) -> Tensor:
        if q.dtype != torch.float32:
            return super().forward(q, k, v, enable_gqa=enable_gqa, **terms)
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(_BACKENDS_WITHOUT_RING, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **terms})
