"""RMSNorm for the CPU that keeps its input for backward, as CUDA's fused kernel does.

PyTorch's CPU kernel is made of single operations and keeps several copies of the input.
"""

from typing import Any, cast

import torch
import torch.nn as nn


class LeanRMSNorm(nn.RMSNorm):
    """Computes `nn.RMSNorm` by `rms_norm`; `use_lean_norms` gives modules this class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def use_lean_norms(model: nn.Module) -> None:
    """Turn every `nn.RMSNorm` of `model` into a `LeanRMSNorm`, in place.

    As `fully_shard` does, this gives the module a class that adds to its own: names, parameters
    and `isinstance` stay. Call it before `torch.compile` and FSDP2.
    """
    for module in model.modules():
        if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
            module.__class__ = LeanRMSNorm


def rms_norm(
    x: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Compute `torch.nn.functional.rms_norm` over the last dimension, in fp32 or wider.

    Args:
        x: (…, D), of any floating dtype, which the result has too.
        weight: (D,).
    """
    assert normalized_shape == x.shape[-1:], "over the last dimension only"
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    return cast(torch.Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, scale, weight)
        normed = wide * scale
        return (normed if weight is None else normed.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        normed = _wide(x) * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            over_tokens = tuple(range(x.dim() - 1))
            grad_weight = (normed * grad_y).sum(over_tokens).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        grad_normed = _wide(grad_y) if weight is None else _wide(grad_y) * weight
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = (grad_normed - normed.mul_(along)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
