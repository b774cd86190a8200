"""Operations that stand for one CUDA kernel each, where the CPU's way takes several.

For counting on fake tensors alone: they have shapes, and no values. Each reads its inputs and
writes its results once. Where rows and columns are summed over, as in a norm's backward, CUDA may
take two kernels: its inputs count twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty_like


def _operator(signature: str, fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Any:
    """Register an operator that has nothing but shapes."""

    def missing(*_: Any) -> Any:
        raise NotImplementedError("for fake tensors")

    name, _, _ = signature.partition("(")
    made = torch.library.custom_op(
        f"torchtitan_dp_counts::{name}",
        missing,
        mutates_args=mutates,
        schema=signature[len(name) :],
    )
    made.register_fake(fake)
    return made


def _scale(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


_norm = _operator(
    "norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)",
    lambda x, weight: (empty_like(x), _scale(x)),
)
_rms_norm_backward = _operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor scale, Tensor? weight) -> (Tensor, Tensor)",
    lambda grad, x, scale, weight: (
        empty_like(x),
        x.new_empty((0,)) if weight is None else empty_like(weight),
    ),
)
_noise = _operator("noise(Tensor(a!) flat) -> ()", lambda flat: None, ("flat",))


def noise(flat: Tensor, **_: Any) -> None:
    """`privacy.noise.add_gaussian_noise_`: drawn and added in one kernel."""
    _noise(flat)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:  # type: ignore[override]
        y, scale = _norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        grad_x, grad_weight = _rms_norm_backward(grad_y, x, scale, weight)
        return grad_x, None if weight is None else grad_weight


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """`torch.nn.functional.rms_norm` as CUDA has it: a kernel forward, and one backward."""
    return _RMSNorm.apply(x, weight)
