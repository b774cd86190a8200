"""Ring attention over the context-parallel mesh: PyTorch's own, on CUDA and on CPU alike.

PyTorch routes scaled-dot-product attention on sequence-sharded DTensors to a ring
(`torch.distributed.tensor.experimental`), but registers no kernel for CPU. Flash attention on CPU
returns `(out, logsumexp)`, all the ring's merge needs, so registering it in the same table makes
TorchTitan's context-parallel path run unchanged on gloo, forward and backward.

CUDA's memory-efficient kernels, the only ones for fp32, pad logsumexp to 32 rows, which the ring's
merge does not know: here their ring cuts it to the rows there are, and pads it again for backward.

Every private name of PyTorch's context parallelism that this package uses is in this file;
`tests/distributed/test_ring_attention.py` shows when a new version moves one.
"""

from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as public_names
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention import SDPBackend
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module

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


def configure_ring(
    device_type: str, *, load_balancer: LoadBalancer, rotate_method: RotateMethod
) -> None:
    """Configure how PyTorch's ring distributes and rotates sequences, for this process.

    Args:
        device_type: "cpu" or an accelerator's.
        load_balancer: "headtail" gives rank r of n the chunks r and 2n-1-r; None gives contiguous
            chunks. The ring must know: it masks by it.
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

    cuDNN before 9.5.1 fails in the ring's backward, where a rank's queries and another's keys
    differ in number, with an assertion of PyTorch's that goes by the version that it was compiled
    with, whichever it runs with: flash attention comes first there.
    """
    if any(version < _CUDNN_FOR_RINGS for version in _cudnn_versions()):
        return [backend for backend in _RING_BACKENDS if backend != SDPBackend.CUDNN_ATTENTION]
    return _RING_BACKENDS


def _cudnn_versions() -> list[tuple[int, int, int]]:
    """List what PyTorch was compiled with, and runs with; nothing for a build without cuDNN."""
    if not torch.backends.cudnn.is_available():
        return []
    cudnn = torch._C._cudnn  # type: ignore[attr-defined]
    return [cudnn.getCompileVersion(), cudnn.getRuntimeVersion()]


def _register_kernels(device_type: str) -> None:
    """Enter our rings in the table that PyTorch's dispatcher is enabled with."""
    handlers = {_efficient_op: _efficient_forward, _efficient_backward_op: _efficient_backward}
    if device_type == "cpu":
        handlers |= {_forward_op: _ring_forward, _backward_op: _ring_backward}
    ring.custom_ops.update(handlers)  # type: ignore[arg-type]


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _on_ring(local_tensors: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(tensor, mesh, [Shard(_SEQ_DIM)], run_check=False)
        for tensor in local_tensors
    )


def _ring_forward(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    query, key, value = args[:3]
    dropout_p = args[3] if len(args) > 3 else 0.0
    is_causal = args[4] if len(args) > 4 else False
    assert kwargs.get("attn_mask") is None, "the ring masks by position only"
    results = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQ_DIM,
        _forward_op,  # type: ignore[arg-type]
        query=_local(query),
        key=_local(key),
        value=_local(value),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _on_ring(results, query.device_mesh)


def _ring_backward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal = args
    results = ring._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        _SEQ_DIM,
        _backward_op,  # type: ignore[arg-type]
        grad_out=_local(grad_out),
        grad_out_name="grad_out",
        query=_local(query),
        key=_local(key),
        value=_local(value),
        out=_local(out),
        logsumexp=_local(logsumexp),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _on_ring(results, query.device_mesh)


def _efficient_forward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    query, key, value, attn_bias, _ = args[:5]
    dropout_p = args[5] if len(args) > 5 else 0.0
    is_causal = args[6] if len(args) > 6 else False
    assert attn_bias is None, "the ring masks by position only"
    out, logsumexp, *seed_and_offset = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQ_DIM,
        _attend_unpadded,
        query=_local(query),
        key=_local(key),
        value=_local(value),
        is_causal=is_causal,
        attn_bias=None,
        compute_log_sumexp=True,  # the merge needs it, whether or not a gradient does
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return (*_on_ring((out, logsumexp), query.device_mesh), *seed_and_offset)


def _efficient_backward(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    grad_out, query, key, value, attn_bias, out, logsumexp = args[:7]
    seed, offset, dropout_p, grad_input_mask = args[7:11]
    assert attn_bias is None, "the ring masks by position only"
    *gradients, grad_bias = ring._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        _SEQ_DIM,
        _backward_padded,  # type: ignore[arg-type]
        grad_out=_local(grad_out),
        grad_out_name="grad_out_",
        query=_local(query),
        key=_local(key),
        value=_local(value),
        out=_local(out),
        logsumexp=_local(logsumexp),
        is_causal=args[11] if len(args) > 11 else False,
        attn_bias=None,
        philox_seed=_local(seed),
        philox_offset=_local(offset),
        dropout_p=dropout_p,
        grad_input_mask=grad_input_mask,
        scale=kwargs.get("scale"),
    )
    return (*_on_ring(tuple(gradients), query.device_mesh), grad_bias)


def _attend_unpadded(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Attend to one block by the memory-efficient kernel; logsumexp of the rows that there are."""
    out, logsumexp, *rest = _efficient_op(query, *args, **kwargs)
    return out, logsumexp[..., : query.shape[_SEQ_DIM]], *rest


def _backward_padded(*, logsumexp: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Take one block's gradients, with logsumexp padded as the forward kernel has padded it.

    The rows that are none have an infinite logsumexp, so that their probabilities are 0.
    """
    missing = -logsumexp.shape[_SEQ_DIM] % _ALIGNED_ROWS
    if missing and torch.version.hip is None:  # ROCm's kernels pad nothing
        logsumexp = F.pad(logsumexp, (0, missing), value=torch.inf)
    gradients: tuple[torch.Tensor, ...] = _efficient_backward_op(
        logsumexp=logsumexp.contiguous(), **kwargs
    )
    return gradients
