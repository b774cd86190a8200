"""Modules of transformers whose formula is one of ours, found by their values.

Families write the same norm, the same feed-forward and the same rotary embeddings each in a file
of its own. Ours keep less for backward: an RMSNorm its input alone, a gated feed-forward in tiles
its input alone; and rotary embeddings pass over fewer bytes.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from torchtitan_dp.models.causal_lm.transformers_private import rotation_of, with_rotation
from torchtitan_dp.models.feed_forward import TiledMLP
from torchtitan_dp.models.rms_norm import OffsetRMSNorm
from torchtitan_dp.models.rope import rotate

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


def use_our_rotation(model: nn.Module) -> None:
    """Have attention turn queries and keys by `rotate`, in place, where it computes the same."""
    by_class = {kind: _with_our_rotation(kind) for kind in {type(m) for m in model.modules()}}
    for module in model.modules():
        module.__class__ = by_class[type(module)]


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys; arguments as those of transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def apply_partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn the first values of heads where cosines are shorter than these; else as
    `apply_rotary`."""
    cos = F.pad(cos, (0, q.shape[-1] - cos.shape[-1]), value=1.0)
    return apply_rotary(q, k, cos, sin, unsqueeze_dim)


_Rotation = Callable[..., tuple[Tensor, Tensor]]


def _with_our_rotation(kind: type) -> type:
    """Return a class of modules that calls the one of our rotations that computes the same as its
    own; the class itself without."""
    if (theirs := rotation_of(kind)) is not None:
        for ours in (apply_rotary, apply_partial_rotary):
            if _rotates_as(theirs, ours):
                return with_rotation(kind, ours)
    return kind


def _rotates_as(theirs: _Rotation, ours: _Rotation) -> bool:
    """Return whether a function has the arguments and the results of one of ours, for heads before
    tokens and after them, and fails where it does."""
    if [*inspect.signature(theirs).parameters] != [*inspect.signature(ours).parameters]:
        return False
    q, k = _values(1, 2, 4, 3, 8), _values(2, 2, 2, 3, 8)
    for size, dim in itertools.product((8, 4), (1, 2)):  # of whole heads, and of their first half
        inputs = q, k, _values(3, 2, 3, size), _values(4, 2, 3, size)
        if dim == 2:
            inputs = q.transpose(1, 2), k.transpose(1, 2), *inputs[2:]
        found, expected = (_results(function, *inputs, dim) for function in (theirs, ours))
        if len(found) != len(expected) or not all(map(_close, found, expected)):
            return False
    return True


def _results(function: _Rotation, *inputs: Any) -> tuple[Tensor, ...]:
    """Return a function's results; none if it refuses its inputs."""
    try:
        return function(*inputs)
    except Exception:  # of sizes, in any family's way
        return ()


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
