"""A parameter's copy for every sample, where code that is compiled uses the parameter itself.

Compiled code may not hold a parameter: backward would sum its gradient over samples. With a copy
for each sample, autograd itself forms per-sample gradients. This suits vectors (norm weights): a
matrix would be held once a sample.

Guarantee:
    Row b of the gradient that a layer passes to its sink is that of row b of the copies, unchanged.
    It is sample b's own gradient if row b is used for sample b alone.
"""

from typing import Any, cast

import torch
import torch.nn as nn

from torchtitan_dp.gradients.layers import PerSampleLayer
from torchtitan_dp.gradients.operands import Existing


def sample_copies(layer: nn.Module, attribute: str, batch_size: int) -> torch.Tensor:
    """Return a parameter of `layer` once for each sample: `(batch_size, *shape)`, fp32.

    Args:
        layer: converted by `per_sample_layers`, or frozen.
        attribute: the parameter's name in the layer.
    """
    parameter = getattr(layer, attribute)
    if isinstance(layer, PerSampleLayer):
        copies = _SampleCopies.apply(layer, attribute, batch_size, parameter)
        return cast(torch.Tensor, copies)
    assert not parameter.requires_grad, f"{type(layer).__name__} was not turned"
    return _copies(parameter, batch_size)


def _copies(parameter: torch.Tensor, batch_size: int) -> torch.Tensor:
    return parameter.float().repeat(batch_size, *(1 for _ in parameter.shape))


class _SampleCopies(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        layer: PerSampleLayer,
        attribute: str,
        batch_size: int,
        parameter: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer, ctx.name = layer, layer.parameter_names[attribute]
        return _copies(parameter, batch_size)

    @staticmethod
    def backward(ctx: Any, grad_copies: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        # It runs if the parameter is trained, and only then: no other input has a gradient.
        ctx.layer.sink.form_grad_samples(ctx.name, len(grad_copies), Existing(grad_copies))
        return None, None, None, None
