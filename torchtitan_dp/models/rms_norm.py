"""RMSNorm for the CPU that keeps its input for backward, as CUDA's fused kernel does.

PyTorch's CPU kernel is made of single operations and keeps several copies of the input.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor


class LeanRMSNorm(nn.RMSNorm):
    """An `nn.RMSNorm` that is computed by `rms_norm`; `use_lean_norms` converts modules to it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class OffsetRMSNorm(nn.Module):
    """An RMSNorm times 1 + weight, (D,), as Gemma's."""

    def __init__(self, size: int, eps: float, device: str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the norm of (…, D) in fp32, in the dtype of `x`."""
        return rms_norm(x, x.shape[-1:], 1.0 + self.weight.float(), self.eps)


def use_lean_norms(model: nn.Module) -> None:
    """Turn each `nn.RMSNorm` with a weight and an epsilon into a `LeanRMSNorm`, in place.

    As `fully_shard` does, this gives the module a class that adds to its own: names, parameters
    and `isinstance` stay. Call it before `per_sample_layers`, `torch.compile` and FSDP2.
    """
    for module in model.modules():
        plain = type(module) is nn.RMSNorm and len(module.normalized_shape) == 1
        if plain and module.weight is not None and module.eps is not None:
            module.__class__ = LeanRMSNorm


def rms_norm(x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    """Compute `torch.nn.functional.rms_norm` of x, (…, D) of any floating dtype, in fp32 or wider,
    with a weight (D,)."""
    assert normalized_shape == x.shape[-1:], "over the last dimension only"
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        y, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        x_needed, weight_needed, _ = ctx.needs_input_grad
        grad_x, products = _gradients(x, scale, weight, grad_y, x_needed)
        grad_weight = products.flatten(0, -2).sum(0).to(weight.dtype) if weight_needed else None
        return grad_x, grad_weight, None


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm in the dtype of `x`, and 1 / rms(x), (…, 1), in fp32 or wider.

    Nothing is done in place, and no cast that does nothing: torch 2.11 compiles a function that
    returns the result of either to one whose gradients are wrong.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale * weight
    return normed if normed.dtype == x.dtype else normed.to(x.dtype), scale


def _gradients(
    x: Tensor, scale: Tensor, weight: Tensor, grad_y: Tensor, x_needed: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of `x`, if needed, and each token's part of the weight's gradient."""
    normed, wide_grad_y = _wide(x) * scale, _wide(grad_y)
    products = normed * wide_grad_y
    if not x_needed:
        return None, products
    along = (products @ weight.to(products.dtype) / len(weight))[..., None]
    grad_normed = wide_grad_y * weight
    return grad_normed.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype), products


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
