"""Operations that stand for one CUDA kernel each, where the CPU's way takes several.

For counting on fake tensors alone: they have shapes, and no values. A dispatch mode sees no
compiled function, so that each region of `models.llama3.regions` is one operation forward and one
backward here, which reads each of its inputs and writes each of its results once. That Inductor
makes one kernel of each is tested with its CPU backend (`tests/models/test_regions.py`); on CUDA it
has not been seen. Where rows and columns are summed over, as in a norm's backward, CUDA may take
two kernels: its inputs count twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty_like

from torchtitan_dp.models.llama3.regions import Regions


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
_norm_backward = _operator(
    "norm_backward(Tensor grad, Tensor x, Tensor scale, Tensor weight, Tensor? more) -> Tensor",
    lambda grad, x, scale, weight, more: empty_like(x),
)
_weights_backward = _operator(
    "weights_backward(Tensor grad, Tensor x, Tensor scale, Tensor weight) -> Tensor",
    lambda grad, x, scale, weight: empty_like(weight),
)
_add_and_norm = _operator(
    "add_and_norm(Tensor x, Tensor more, Tensor weight) -> (Tensor, Tensor, Tensor)",
    lambda x, more, weight: (empty_like(x), empty_like(x), _scale(x)),
)
_rotate = _operator(
    "rotate(Tensor q, Tensor k, Tensor angles) -> (Tensor, Tensor)",
    lambda q, k, angles: (empty_like(q), empty_like(k)),
)
_swiglu = _operator("swiglu(Tensor gate, Tensor up) -> Tensor", lambda gate, up: empty_like(gate))
_swiglu_backward = _operator(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda grad, gate, up: (empty_like(gate), empty_like(up)),
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
        h, scale, weight_BD = ctx.saved_tensors
        grad, grad_weight = _norm_gradients(grad_y, h, scale, weight_BD, grad_h)
        return grad, grad, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(angles)
        return _rotate(q, k, angles)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*_rotate(grad_q, grad_k, *ctx.saved_tensors), None)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _swiglu_backward(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


def regions(backend: str) -> Regions:
    """Stand in for `models.llama3.regions.compiled`."""
    return Regions(_Norm.apply, _AddAndNorm.apply, _Rotate.apply, _SwiGLU.apply)
