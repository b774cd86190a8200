"""Operations that stand for one CUDA kernel each, where the CPU's way takes several.

They are for counting on fake tensors alone: they have shapes, and no values.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("torchtitan_dp_counts::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("torchtitan_dp_counts::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad_y: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for fake tensors")


@_rms_norm_backward.register_fake
def _(grad_y: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((0,)) if weight is None else torch.empty_like(weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:  # type: ignore[override]
        y, scale = _rms_norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        grad_x, grad_weight = _rms_norm_backward(grad_y, x, scale, weight)
        return grad_x, None if weight is None else grad_weight


def rms_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm` as CUDA has it: a kernel forward, and one backward."""
    result: Tensor = _RMSNorm.apply(x, weight)
    return result


@torch.library.custom_op("torchtitan_dp_counts::noise", mutates_args=("flat",))
def _noise(flat: Tensor) -> None:
    raise NotImplementedError("for fake tensors")


@_noise.register_fake
def _(flat: Tensor) -> None:
    return None


def noise(flat: Tensor, **_: Any) -> None:
    """`privacy.noise.add_gaussian_noise_`: drawn and added in one kernel."""
    _noise(flat)
