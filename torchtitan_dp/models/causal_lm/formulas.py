"""Our modules in the place of transformers' own of the same formula, which is found by values.

Families write the same norm and the same feed-forward each in a file of its own. Ours keep less for
backward: an RMSNorm its input alone, a gated feed-forward in tiles (`models.feed_forward`) its
input alone. CUDA's fused kernel keeps no more of a norm; PyTorch's CPU kernel is made of single
operations and keeps several copies of the input, so that `LeanRMSNorm` takes its place.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

from torchtitan_dp.models.feed_forward import TiledMLP


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
    """Turn each `nn.RMSNorm` with a weight and an epsilon into a `LeanRMSNorm`, in place, before
    `per_sample_layers`, `torch.compile` and FSDP2."""
    for module in model.modules():
        plain = type(module) is nn.RMSNorm and len(module.normalized_shape) == 1
        if plain and module.weight is not None and module.eps is not None:
            module.__class__ = LeanRMSNorm


def rms_norm(x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    """Compute `F.rms_norm` of x, (…, D) of any floating dtype, in fp32 or wider; weight (D,)."""
    assert normalized_shape == x.shape[-1:], "over the last dimension only"
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        # Nothing is done in place, and no cast that does nothing: torch 2.11 compiles a function
        # that returns the result of either to one whose gradients are wrong.
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide * scale * weight
        ctx.save_for_backward(x, scale, weight)
        return normed if normed.dtype == x.dtype else normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        x_needed, weight_needed, _ = ctx.needs_input_grad
        normed, wide_grad_y = _wide(x) * scale, _wide(grad_y)
        products, grad_x = normed * wide_grad_y, None
        if x_needed:
            along = (products @ weight.to(products.dtype) / len(weight))[..., None]
            grad_normed = wide_grad_y * weight
            grad_x = grad_normed.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype)
        grad_weight = products.flatten(0, -2).sum(0).to(weight.dtype) if weight_needed else None
        return grad_x, grad_weight, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_NORMS = ((nn.RMSNorm, 0.0), (OffsetRMSNorm, 1.0))
"""Our norms, and what they add to the weight."""


def use_our_norms(model: nn.Module) -> None:
    """Put one of `_NORMS` with the same weight in the place of each module that computes it."""
    for parent in list(model.modules()):
        for name, theirs in list(parent.named_children()):
            for kind, offset in _NORMS:
                if _is_norm(theirs, offset):
                    weight: Any = theirs.weight
                    eps: Any = _eps(theirs)
                    ours = kind(len(weight), eps=eps, device="meta")
                    ours.weight = weight
                    setattr(parent, name, ours)


def gated_feed_forwards(model: nn.Module) -> list[nn.Module]:
    """List the modules that compute down(act(gate(x)) * up(x))."""
    return [module for module in model.modules() if _is_gated(module)]


def _is_norm(theirs: Any, offset: float) -> bool:
    """Return whether a module is an RMSNorm times its weight plus `offset`."""
    shapes = {name: parameter.dim() for name, parameter in theirs.named_parameters()}
    if shapes != {"weight": 1} or (eps := _eps(theirs)) is None:
        return False
    x_ND, weight_D = _values(1, 6, 8), _values(2, 8)
    x_ND *= torch.logspace(-4, 2, 6, device="cpu")[:, None]  # the first are of the size of eps
    # Not `F.rms_norm`, which a fake step computes otherwise.
    expected = x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + eps) * (weight_D + offset)
    return _computes(theirs, {"weight": weight_D}, x_ND, expected)


def _eps(norm: nn.Module) -> float | None:
    """Return what a norm adds to a mean square; None if it has no such number."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def _is_gated(module: nn.Module) -> bool:
    names = [f"{name}.weight" for name in TiledMLP.in_order]
    shapes = {name: parameter.dim() for name, parameter in module.named_parameters()}
    if shapes != dict.fromkeys(names, 2):
        return False
    gate, up, down = _values(1, 6, 8), _values(2, 6, 8), _values(3, 8, 6)
    x_BTD = _values(4, 1, 3, 8)
    expected = module.act_fn(x_BTD @ gate.T) * (x_BTD @ up.T) @ down.T  # type: ignore[operator]
    return _computes(module, dict(zip(names, (gate, up, down), strict=True)), x_BTD, expected)


def _computes(theirs: nn.Module, weights: dict[str, Tensor], x: Tensor, expected: Tensor) -> bool:
    """Return whether a module with these weights in the place of its own has this result."""
    try:
        found = functional_call(theirs, weights, x)
    except (TypeError, AttributeError, RuntimeError):  # it takes more than a tensor, or another
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
