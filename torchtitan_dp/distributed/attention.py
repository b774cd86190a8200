"""Ring attention over the context-parallel mesh; on one rank, fp32 attention in little memory.

The ring is PyTorch's own (`torch.distributed.tensor.experimental`), on CUDA and CPU alike. PyTorch
registers no CPU kernel for it. Flash attention on CPU returns `(out, logsumexp)`, which is all that
the ring's merge needs, so TorchTitan's context-parallel path runs unchanged on gloo once that
kernel is registered. CUDA's memory-efficient kernels, the only ones for fp32, pad logsumexp to 32
rows, which the merge does not expect: the padding is cut off here and added again for backward.

Every private name of PyTorch's context parallelism that this package uses is in this file;
`tests/distributed/test_attention.py` fails when a new version moves one.

Without a ring: flash and cuDNN take 16 bits only, so TorchTitan's list leaves fp32 to the math
kernel, which keeps T x T scores for each head: 34 GB for 32 heads at T = 16,384. The
memory-efficient kernel has no grouped queries, so keys and values are repeated for it, which costs
as much as one key head for each query head.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as public_names
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

LoadBalancer = Literal["headtail"] | None
RotateMethod = Literal["allgather", "alltoall"]

_SEQ_DIM = 2  # of q, k, v: (batch, heads, sequence, head_dim)
_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_efficient_op = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward_op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
_ALIGNED_ROWS = 32  # the memory-efficient kernels' kAlignLSE: backward loads so many rows at once

# The kernels that PyTorch can put on a ring. The math fallback is not among them: on a
# sequence-sharded DTensor it would apply the causal mask to rearranged positions.
_RING_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]

_CUDNN_FOR_RINGS = (9, 5, 1)

# Math is for the head sizes that the other kernel does not take.
_BACKENDS_WITHOUT_RING = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def configure_ring(
    device_type: str, *, load_balancer: LoadBalancer, rotate_method: RotateMethod
) -> None:
    """Configure how PyTorch's ring distributes and rotates sequences, for this process.

    Args:
        device_type: "cpu" or an accelerator's.
        load_balancer: "headtail" assigns chunks r and 2n-1-r to rank r of n; None assigns
            contiguous chunks. The ring's causal mask depends on it.
        rotate_method: "allgather" gathers all keys and values at once (fewer, larger messages);
            "alltoall" passes them around, holding one other rank's at a time (long context).
            TorchTitan 0.2.2 reads this setting and does not apply it.
    """
    ring._cp_options.enable_load_balance = load_balancer == "headtail"
    public_names.set_rotate_method(rotate_method)
    _register_kernels(device_type)


def apply_ring_attention(attention_modules: list[nn.Module], cp_mesh: DeviceMesh) -> None:
    """Run each module's scaled-dot-product attention as a ring over `cp_mesh`.

    Args:
        attention_modules: TorchTitan `ScaledDotProductAttentionWrapper`s; inputs q, k, v of shape
            (B, heads, T / cp, head_dim), each rank's own part of the sequence.
        cp_mesh: one-dimensional mesh of the ranks that share a sample.
    """
    apply_cp_to_attention_module(attention_modules, cp_mesh, "sdpa")
    for module in attention_modules:
        module.sdpa_backends = _backends()  # type: ignore[assignment]


def _backends() -> list[SDPBackend]:
    """List the kernels for the ring, the preferred first.

    cuDNN before 9.5.1 fails in the ring's backward when queries and keys differ in number. PyTorch
    asserts this by the version that it was compiled with, whichever it runs with; flash attention
    comes first there.
    """
    if any(version < _CUDNN_FOR_RINGS for version in _cudnn_versions()):
        return [backend for backend in _RING_BACKENDS if backend != SDPBackend.CUDNN_ATTENTION]
    return _RING_BACKENDS


def _cudnn_versions() -> list[tuple[int, int, int]]:
    """List the cuDNN versions of PyTorch's build and of this machine; none without cuDNN."""
    if not torch.backends.cudnn.is_available():
        return []
    cudnn = torch._C._cudnn  # type: ignore[attr-defined]
    return [cudnn.getCompileVersion(), cudnn.getRuntimeVersion()]


def _register_kernels(device_type: str) -> None:
    """Register our ring kernels with PyTorch's context-parallel dispatcher."""
    handlers = {_efficient_op: _efficient_forward, _efficient_backward_op: _efficient_backward}
    if device_type == "cpu":
        handlers |= {_forward_op: _ring_forward, _backward_op: _ring_backward}
    ring.custom_ops.update(handlers)  # type: ignore[arg-type]


def _local(values: Sequence[Any], *names: str) -> dict[str, Any]:
    """Name each tensor, as its local part where it is a DTensor."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return dict(zip(names, local, strict=True))


def _on_ring(local_tensors: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(tensor, mesh, [Shard(_SEQ_DIM)], run_check=False)
        for tensor in local_tensors
    )


def _ring_forward(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    dropout_p = args[3] if len(args) > 3 else 0.0
    is_causal = args[4] if len(args) > 4 else False
    assert kwargs.get("attn_mask") is None, "the ring masks by position only"
    results = ring._templated_ring_attention(
        args[0].device_mesh.get_group(),
        _SEQ_DIM,
        _forward_op,  # type: ignore[arg-type]
        **_local(args[:3], "query", "key", "value"),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _on_ring(results, args[0].device_mesh)


def _ring_backward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    *tensors, dropout_p, is_causal = args
    results = ring._templated_ring_attention_backward(
        args[1].device_mesh.get_group(),
        _SEQ_DIM,
        _backward_op,  # type: ignore[arg-type]
        grad_out_name="grad_out",
        **_local(tensors, "grad_out", "query", "key", "value", "out", "logsumexp"),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _on_ring(results, args[1].device_mesh)


def _efficient_forward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    dropout_p = args[5] if len(args) > 5 else 0.0
    is_causal = args[6] if len(args) > 6 else False
    assert args[3] is None, "the ring masks by position only"
    out, logsumexp, *seed_and_offset = ring._templated_ring_attention(
        args[0].device_mesh.get_group(),
        _SEQ_DIM,
        _attend_unpadded,
        **_local(args[:3], "query", "key", "value"),
        is_causal=is_causal,
        attn_bias=None,
        compute_log_sumexp=True,  # the merge needs it, whether or not a gradient does
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return (*_on_ring((out, logsumexp), args[0].device_mesh), *seed_and_offset)


def _efficient_backward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    tensors, attn_bias = (*args[:4], *args[5:9]), args[4]
    names = "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset"
    assert attn_bias is None, "the ring masks by position only"
    *gradients, grad_bias = ring._templated_ring_attention_backward(
        args[1].device_mesh.get_group(),
        _SEQ_DIM,
        _backward_padded,  # type: ignore[arg-type]
        grad_out_name="grad_out_",
        **_local(tensors, *names),
        is_causal=args[11] if len(args) > 11 else False,
        attn_bias=None,
        dropout_p=args[9],
        grad_input_mask=args[10],
        scale=kwargs.get("scale"),
    )
    return (*_on_ring(tuple(gradients), args[1].device_mesh), grad_bias)


def _attend_unpadded(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Attend to one block by the memory-efficient kernel, and cut the padding off logsumexp."""
    out, logsumexp, *rest = _efficient_op(query, *args, **kwargs)
    return out, logsumexp[..., : query.shape[_SEQ_DIM]], *rest


def _backward_padded(*, logsumexp: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Compute one block's gradients, with logsumexp padded as by the forward kernel.

    Padded rows have an infinite logsumexp, so that their probabilities are 0.
    """
    missing = -logsumexp.shape[_SEQ_DIM] % _ALIGNED_ROWS
    if missing and torch.version.hip is None:  # ROCm's kernels pad nothing
        logsumexp = F.pad(logsumexp, (0, missing), value=torch.inf)
    gradients: tuple[torch.Tensor, ...] = _efficient_backward_op(
        logsumexp=logsumexp.contiguous(), **kwargs
    )
    return gradients


def use_efficient_attention(model: nn.Module) -> None:
    """Replace TorchTitan's attention modules in place; 16-bit attention stays as it was."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is ScaledDotProductAttentionWrapper:
                setattr(module, name, _EfficientAttention())


class _EfficientAttention(ScaledDotProductAttentionWrapper):
    """TorchTitan's wrapper with another fp32 kernel; q, k, v of shape (B, heads, T, head_dim)."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> torch.Tensor:
        if q.dtype != torch.float32:
            return super().forward(q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(_BACKENDS_WITHOUT_RING, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal)
