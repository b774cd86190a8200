"""A block's compiled regions as operators that move what a fused kernel moves, for counting.

A dispatch mode sees no compiled function: under one, `torch.compile` runs the function as it is. So
for counting on fake tensors each region of `models.llama3.regions` is replaced by one operator
forward and one backward, which reads each of its inputs and writes each of its results once. That
Inductor makes one kernel of each is tested with its CPU backend (`tests/models/test_regions.py`);
on CUDA it has not been seen. Where rows and columns are summed over, as in a norm's backward, CUDA
may take two kernels: its inputs count twice.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.models.llama3.regions import Regions


@torch.library.custom_op("torchtitan_dp_counts::norm_region", mutates_args=())
def _norm(x: Tensor, weight_BD: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::norm_region_backward", mutates_args=())
def _norm_backward(
    grad_y: Tensor, x: Tensor, scale: Tensor, weight_BD: Tensor, more: Tensor | None
) -> Tensor:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::norm_weights_backward", mutates_args=())
def _weights_backward(grad_y: Tensor, x: Tensor, scale: Tensor, weight_BD: Tensor) -> Tensor:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::add_and_norm_region", mutates_args=())
def _add_and_norm(x: Tensor, more: Tensor, weight_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::rotate_region", mutates_args=())
def _rotate(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::swiglu_region", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    raise NotImplementedError("for fake tensors")


@torch.library.custom_op("torchtitan_dp_counts::swiglu_region_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


def _scale(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@_norm.register_fake
def _(x: Tensor, weight_BD: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _scale(x)


@_norm_backward.register_fake
def _(grad_y: Any, x: Tensor, scale: Any, weight_BD: Any, more: Any) -> Tensor:
    return torch.empty_like(x)


@_weights_backward.register_fake
def _(grad_y: Tensor, x: Tensor, scale: Tensor, weight_BD: Tensor) -> Tensor:
    return torch.empty_like(weight_BD)


@_add_and_norm.register_fake
def _(x: Tensor, more: Tensor, weight_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), _scale(x)


@_rotate.register_fake
def _(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_BD: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        y, scale = _norm(x, weight_BD)
        ctx.save_for_backward(x, scale, weight_BD)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_norm_gradients(grad_y, *ctx.saved_tensors), None)


def _norm_gradients(
    grad_y: Tensor, x: Tensor, scale: Tensor, weight_BD: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input, with `more` added, and of its weights."""
    grad_x = _norm_backward(grad_y, x, scale, weight_BD, more)
    return grad_x, _weights_backward(grad_y, x, scale, weight_BD)


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, more: Tensor, weight_BD: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        h, y, scale = _add_and_norm(x, more, weight_BD)
        ctx.save_for_backward(h, scale, weight_BD)
        return h, y

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, grad_weight = _norm_gradients(grad_y, *ctx.saved_tensors, grad_h)
        return grad, grad, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(angles)
        return _rotate(q, k, angles)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_rotate(grad_q, grad_k, *ctx.saved_tensors), None)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _swiglu_backward(grad, *ctx.saved_tensors)


def regions(backend: str) -> Regions:
    """Stand in for `models.llama3.regions.compiled`."""
    return Regions(_Norm.apply, _AddAndNorm.apply, _Rotate.apply, _SwiGLU.apply)
