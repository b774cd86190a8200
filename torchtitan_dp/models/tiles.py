"""Parts of a block in tiles of tokens: layers and a norm, with the sums of their gradients.

At long T the tensors within a block outgrow all else. A function in tiles saves its input alone,
and computes some thousand tokens at a time, forward and backward. Gradients of weights and LoRA's
factors are summed over tiles in fp32 (`gradients.operands`); frozen weights have none. Tiling by
tokens is ALST's "sequence tiling" (Bekman et al. 2025, arXiv 2506.13996).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.gradients.operands import add_product_
from torchtitan_dp.models.lora import LoRALinear
from torchtitan_dp.models.rms_norm import LeanRMSNorm, rms_norm

Sums = list[Tensor | None]
"""The fp32 sums of gradients of some parameters, each None where it is not trained."""


@dataclass(frozen=True)
class Linear:
    """x W^T, plus scaling (x A^T) B^T where there are factors of LoRA."""

    weight_PD: Tensor
    factors: tuple[Tensor, Tensor] | None  # A (r, D), B (P, r)
    scaling: float

    def __call__(self, x_ND: Tensor) -> Tensor:
        y_NP = x_ND @ self.weight_PD.T
        if self.factors is not None:
            a_RD, b_PR = self.factors
            y_NP.addmm_(x_ND @ a_RD.T, b_PR.T, alpha=self.scaling)
        return y_NP

    def backward(self, x_ND: Tensor, grad_NP: Tensor, into_ND: Tensor | None, sums: Sums) -> Tensor:
        """Add the gradients of weight and factors to `sums`, and that of x to `into_ND`, which is
        returned."""
        if into_ND is None:
            into_ND = grad_NP @ self.weight_PD
        else:
            into_ND.addmm_(grad_NP, self.weight_PD)
        of_weight, *of_factors = sums
        if of_weight is not None:
            add_product_(of_weight, grad_NP.T, x_ND)
        if self.factors is not None:
            a_RD, b_PR = self.factors
            grad_NR = (grad_NP @ b_PR).mul_(self.scaling)
            into_ND.addmm_(grad_NR, a_RD)
            of_a, of_b = of_factors
            if of_a is not None:
                add_product_(of_a, grad_NR.T, x_ND)
            if of_b is not None:
                add_product_(of_b, grad_NP.T, (x_ND @ a_RD.T).mul_(self.scaling))
        return into_ND


@dataclass(frozen=True)
class NormedLayers:
    """Linear layers, behind a norm or not, apart from their parameters: norm, then by layer."""

    is_lean: bool
    eps: float | None  # of the norm; None without
    scalings: tuple[float | None, ...]  # of each layer's factors; None without

    @classmethod
    def of(
        cls, norm: nn.RMSNorm | None, layers: Sequence[nn.Module], samples: int
    ) -> tuple["NormedLayers", list[Tensor]]:
        """Return the layers and their parameters, for an input of so many samples: 1 where a
        parameter is trained."""
        assert norm is None or norm.eps is not None
        parameters: list[Any] = [] if norm is None else [norm.weight]
        scalings = []
        for layer in layers:
            parameters.append(layer.weight)
            if isinstance(layer, LoRALinear):
                parameters += [layer.lora_a.weight, layer.lora_b.weight]
            scalings.append(layer.scaling if isinstance(layer, LoRALinear) else None)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        assert samples == 1 or not trains, "samples would be merged before they are clipped"
        eps = None if norm is None else norm.eps
        return cls(isinstance(norm, LeanRMSNorm), eps, tuple(scalings)), parameters

    def by_layer(self, values: Sequence[Any]) -> list[list[Any]]:
        """Split one value a parameter, but for the norm's, by layer: weight, or weight and
        factors."""
        rest = iter(values[1:] if self.has_norm else values)
        return [[next(rest) for _ in range(1 if s is None else 3)] for s in self.scalings]

    def linear(self, parameters: Sequence[Tensor]) -> list[Linear]:
        """Return the layers with their parameters."""
        return [
            Linear(weight, (factors[0], factors[1]) if factors else None, scaling or 0.0)
            for (weight, *factors), scaling in zip(
                self.by_layer(parameters), self.scalings, strict=True
            )
        ]

    @property
    def has_norm(self) -> bool:
        """Whether there is a norm, and not the input itself."""
        return self.eps is not None

    def norm(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Compute the norm of (…, D), as its module does."""
        if not self.has_norm:
            return x
        function, weight_D = rms_norm if self.is_lean else F.rms_norm, parameters[0]
        return function(x, weight_D.shape, weight_D, self.eps)  # type: ignore[arg-type]


def norm_of_tile(
    layers: NormedLayers, x: Tensor, parameters: Sequence[Tensor], sums: Sums
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute the norm of one tile again; the function beside it takes the gradient of the norm,
    returns that of x, and adds that of the weight to its sum."""
    if not layers.has_norm:
        return x, lambda grad: grad
    weight, total = parameters[0].detach(), sums[0]
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.requires_grad_(total is not None)
        normed = layers.norm(leaves[0], leaves[1:])

    def backward(grad: Tensor) -> Tensor:
        of_x, *of_weight = torch.autograd.grad(normed, leaves[: 1 + (total is not None)], grad)
        if total is not None:
            total.add_(of_weight[0])
        return of_x

    return normed.detach(), backward


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


def add_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module a class that adds `kind` to its own, as `fully_shard` does: names, parameters
    and `isinstance` stay."""
    own = type(module)
    module.__class__ = type(f"Tiled{own.__name__}", (kind, own), {})
