"""Linear layers as functions of their parameters, whose gradients are summed in fp32; and those
that keep the input of the norm before them in the place of its output.

At long T a recomputed block keeps its norms' outputs until backward has passed attention, for its
projections' gradients alone. `keep_norm_inputs` has projections compute them again, of an input
that the norm keeps anyway.

Guarantee:
    The gradients are those of one sample: several are refused where a parameter is trained, since
    they would be merged before they are clipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.gradients.operands import add_product_
from torchtitan_dp.models.lora import LoRALinear
from torchtitan_dp.models.rms_norm import OffsetRMSNorm
from torchtitan_dp.torch_private import version_of

Sums = list[Tensor | None]
"""The fp32 sums of gradients of some parameters, each None where it is not trained."""


@dataclass(frozen=True)
class Linear:
    """x W^T, plus scaling (x A^T) B^T where there are factors of LoRA."""

    parameters: Sequence[Tensor]  # W (P, D); with factors also A (r, D), B (P, r)
    scaling: float | None  # None without factors

    def __call__(self, x_ND: Tensor) -> Tensor:
        weight_PD, *factors = self.parameters
        y_NP = x_ND @ weight_PD.T
        if self.scaling is not None:
            a_RD, b_PR = factors
            y_NP.addmm_(x_ND @ a_RD.T, b_PR.T, alpha=self.scaling)
        return y_NP

    def backward(self, x_ND: Tensor, grad_NP: Tensor, into_ND: Tensor | None, sums: Sums) -> Tensor:
        """Add the gradients of weight and factors to `sums`, and that of x to `into_ND`, which is
        returned."""
        weight_PD, *factors = self.parameters
        if into_ND is None:
            into_ND = grad_NP @ weight_PD
        else:
            into_ND.addmm_(grad_NP, weight_PD)
        of_weight, *of_factors = sums
        if of_weight is not None:
            add_product_(of_weight, grad_NP.T, x_ND)
        if self.scaling is not None:
            a_RD, b_PR = factors
            grad_NR = (grad_NP @ b_PR).mul_(self.scaling)
            into_ND.addmm_(grad_NR, a_RD)
            of_a, of_b = of_factors
            if of_a is not None:
                add_product_(of_a, grad_NR.T, x_ND)
            if of_b is not None:
                add_product_(of_b, grad_NP.T, (x_ND @ a_RD.T).mul_(self.scaling))
        return into_ND


def parameters_of(layer: Any, samples: int) -> tuple[list[Tensor], float | None]:
    """Return a layer's parameters and the scaling of its factors, as `Linear` takes them, for an
    input of so many samples: 1 where a parameter is trained."""
    factors = [layer.lora_a.weight, layer.lora_b.weight] if isinstance(layer, LoRALinear) else []
    parameters: list[Tensor] = [layer.weight, *factors]
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    assert samples == 1 or not trains, "samples would be merged before they are clipped"
    return parameters, layer.scaling if factors else None


def keep_norm_inputs(blocks: nn.Module) -> None:
    """Have each linear layer without a bias that takes a norm's output keep the norm's input, in
    place. Call it before activation checkpointing and FSDP2."""
    for module in list(blocks.modules()):
        if isinstance(module, nn.RMSNorm | OffsetRMSNorm):
            add_class(module, _NamesItsInput)
        elif type(module) in (nn.Linear, LoRALinear) and module.bias is None:
            add_class(module, _OfNorm)


def add_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module a class that adds `kind` to its own, as `fully_shard` does: names, parameters
    and `isinstance` stay."""
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {})


class _NamesItsInput(nn.Module):
    """The class that is mixed into a norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm, with an attribute `normed`: the norm's function, its input, and the
        version of what it returned."""
        y: Any = super().forward(x)
        y.normed = super().forward, x.detach(), version_of(y)
        return cast(Tensor, y)


class _OfNorm(nn.Module):
    """The class that is mixed into a linear layer."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute (…, P) of (…, D)."""
        norm, input_BTD, version = getattr(x_BTD, "normed", (None, None, None))
        unchanged = norm is not None and version_of(x_BTD) == version  # in place
        if not unchanged or x_BTD.dim() != 3 or not torch.is_grad_enabled():
            return cast(Tensor, super().forward(x_BTD))
        parameters, scaling = parameters_of(self, len(x_BTD))
        return cast(Tensor, _Product.apply(x_BTD, input_BTD, norm, scaling, *parameters))


class _Product(torch.autograd.Function):
    """Computes a layer of a norm's output, and saves the norm's input."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_BTD: Tensor, input_BTD: Tensor, norm: Any, scaling: Any, *parameters: Tensor
    ) -> Tensor:
        ctx.norm, ctx.scaling = norm, scaling
        ctx.save_for_backward(input_BTD, *parameters)
        return Linear(parameters, scaling)(x_BTD.flatten(0, 1)).view(*x_BTD.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, grad_BTP: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input_BTD, *parameters = (saved.detach() for saved in ctx.saved_tensors)
        sums = new_sums(parameters, ctx.needs_input_grad[4:])
        x_ND, grad_NP = ctx.norm(input_BTD).flatten(0, 1), grad_BTP.flatten(0, 1)
        grad_ND = Linear(parameters, ctx.scaling).backward(x_ND, grad_NP, None, sums)
        return grad_ND.view_as(input_BTD), None, None, None, *rounded(sums, parameters)


def new_sums(parameters: Sequence[Tensor], needed: Sequence[bool]) -> Sums:
    """Return zeros, fp32, for each parameter that is trained."""
    return [
        torch.zeros_like(parameter, dtype=torch.float32) if one else None
        for parameter, one in zip(parameters, needed, strict=True)
    ]


def rounded(sums: Sums, parameters: Sequence[Tensor]) -> Sums:
    """Round the sums to their parameters' dtypes, one after another, and drop the fp32 ones."""
    for place, (one, parameter) in enumerate(zip(sums, parameters, strict=True)):
        sums[place] = None if one is None else one.to(parameter.dtype)
    return sums
