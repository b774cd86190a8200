"""Modules of transformers whose formula is one of ours, found by their values.

Families write the same norm and the same feed-forward each in a file of its own. Ours keep less for
backward: an RMSNorm its input alone, a gated feed-forward in tiles its input alone.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

from torchtitan_dp.models.feed_forward import TiledMLP
from torchtitan_dp.models.rms_norm import OffsetRMSNorm

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
    weights = dict(zip(names, (gate, up, down), strict=True))
    return _computes(module, weights, x_BTD, expected)


def _computes(theirs: nn.Module, weights: dict[str, Tensor], x: Tensor, expected: Tensor) -> bool:
    """Return whether a module with these weights in the place of its own has this result."""
    try:
        found = functional_call(theirs, weights, x)
    except (TypeError, AttributeError, RuntimeError):  # it takes more than a tensor, or another
        return False
    return _close(found, expected)


def _close(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
