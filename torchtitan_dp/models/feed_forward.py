"""A block's feed-forward in tiles of tokens: its hidden activations are never all there.

At long T most of a recomputed block is its feed-forward: gate, up, their activation and product are
each 3.5 times as wide as the residual stream of an 8B Llama. Here it is a function that saves its
input alone, and computes some thousand tokens at a time; backward computes a tile again, then its
gradients. Those of weights and LoRA's factors are summed over tiles in fp32. Tiling by tokens is
ALST's "sequence tiling" (Bekman et al. 2025, arXiv 2506.13996).

The function is two nodes of the graph: `_Inputs`, which saves, and `_Output`, which computes and
saves nothing. Checkpointing recomputes a block only up to the last tensor that it saves
(`activation_checkpoint.early_stop`), so that no product is computed more often than with full
activation checkpointing.

Guarantee:
    The gradients are those of one sample: several are refused where a parameter is trained, since
    they would be merged before they are clipped.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.gradients.operands import add_product_, tiles
from torchtitan_dp.models.lora import LoRALinear

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
        """Add the gradients of weight and factors to `sums`; return x's, added to `into_ND`."""
        weight_PD, *factors = self.parameters
        into_ND = grad_NP @ weight_PD if into_ND is None else into_ND.addmm_(grad_NP, weight_PD)
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


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    silu_grad: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
    return silu_grad, grad * F.silu(gate)


@dataclass(frozen=True)
class Tiling:
    """The size of tiles, and the functions between the products of one."""

    tokens: int
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = swiglu_backward

    @classmethod
    def compiled(cls, tokens: int, backend: str) -> "Tiling":
        """Compile the functions; `backend` is `torch.compile`'s."""
        compile_: Any = functools.partial(torch.compile, backend=backend, fullgraph=True)
        return cls(tokens, compile_(swiglu), compile_(swiglu_backward))

    def of(self, activation: Callable[[Tensor], Tensor]) -> "Tiling":
        """Return the tiling with another activation in the place of silu."""
        if isinstance(activation, nn.SiLU):
            return self

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            return activation(gate) * up

        def backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
                of_gate, of_up = torch.autograd.grad(gated(*leaves), leaves, grad)
            return of_gate, of_up

        return dataclasses.replace(self, swiglu=gated, swiglu_backward=backward)


class TiledMLP(nn.Module):
    """The class that `use_tiles` mixes into a gated feed-forward of transformers."""

    tiling: Tiling
    in_order = ("gate_proj", "up_proj", "down_proj")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # one graph would hold every tile
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return down(act(gate x) * up x); of tokens without a sample, as its own class does. The
        layers may have LoRA's factors; B is 1 where a parameter is trained."""
        if x_BTD.dim() != 3:
            return super().forward(x_BTD)
        parameters: list[Tensor] = []
        scalings = []
        for layer in (getattr(self, name) for name in self.in_order):
            has_factors = isinstance(layer, LoRALinear)
            factors = [layer.lora_a.weight, layer.lora_b.weight] if has_factors else []
            parameters += [layer.weight, *factors]
            scalings.append(layer.scaling if has_factors else None)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        assert len(x_BTD) == 1 or not trains, "samples would be merged before they are clipped"
        body = _Body(self.tiling, tuple(scalings))
        kept_BTD = _Inputs.apply(x_BTD, body, *parameters)
        return _Output.apply(kept_BTD, body, [p.detach() for p in parameters])


def use_tiles(module: nn.Module, tiling: Tiling) -> None:
    """Have a gated feed-forward compute in tiles, in place; names and `isinstance` stay."""
    own = type(module)
    module.__class__ = type(own.__name__, (TiledMLP, own), {})
    cast(TiledMLP, module).tiling = tiling.of(cast(Any, module).act_fn)


@dataclass(frozen=True)
class _Body:
    """The computation of all tiles, apart from the parameters."""

    tiling: Tiling
    scalings: tuple[float | None, ...]  # of each layer's factors; None without

    def by_layer(self, values: Sequence[Any]) -> list[list[Any]]:
        """Split one value a parameter by layer: weight, or weight and factors."""
        rest = iter(values)
        return [[next(rest) for _ in range(1 if s is None else 3)] for s in self.scalings]

    def layers(self, parameters: Sequence[Tensor]) -> list[Linear]:
        """Return the layers with their parameters."""
        return list(map(Linear, self.by_layer(parameters), self.scalings))

    def forward(self, x_ND: Tensor, parameters: list[Tensor], out_ND: Tensor) -> None:
        """Compute the output, into `out_ND`."""
        gate, up, down = self.layers(parameters)
        for tokens in tiles(len(x_ND), self.tiling.tokens):
            tile_ND = x_ND[tokens]
            out_ND[tokens] = down(self.tiling.swiglu(gate(tile_ND), up(tile_ND)))

    def backward(self, x_ND: Tensor, weights: list[Tensor], grad_ND: Tensor, sums: Sums) -> Tensor:
        """Add the gradients of parameters to `sums`, and return that of x."""
        gate, up, down = self.layers(weights)
        of_gate, of_up, of_down = self.by_layer(sums)
        grad_x_ND = torch.empty_like(x_ND)
        for tokens in tiles(len(x_ND), self.tiling.tokens):
            tile_ND = x_ND[tokens]
            gated, upped = gate(tile_ND), up(tile_ND)
            trains = any(one is not None for one in of_down)  # else it does not read its input
            product = self.tiling.swiglu(gated, upped) if trains else gated
            grad_product = down.backward(product, grad_ND[tokens], None, of_down)
            grad_gated, grad_upped = self.tiling.swiglu_backward(gated, upped, grad_product)
            del gated, upped, product, grad_product
            grad_tile_ND = gate.backward(tile_ND, grad_gated, None, of_gate)
            grad_x_ND[tokens] = up.backward(tile_ND, grad_upped, grad_tile_ND, of_up)
        return grad_x_ND


class _Inputs(torch.autograd.Function):
    """Saves the input and the parameters; its backward computes all gradients of `_Body`."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, body: _Body, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.body = body
        ctx.save_for_backward(x_BTD, *parameters)
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_BTD, *parameters = (saved.detach() for saved in ctx.saved_tensors)
        sums = [
            torch.zeros_like(parameter, dtype=torch.float32) if needed else None
            for parameter, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True)
        ]
        flat = x_BTD.flatten(0, 1), parameters, grad_BTD.reshape(-1, x_BTD.shape[-1])
        grad_x_BTD = ctx.body.backward(*flat, sums).view(x_BTD.shape)
        for place, parameter in enumerate(parameters):  # each fp32 sum goes as it is rounded
            if (total := sums[place]) is not None:
                sums[place] = total.to(parameter.dtype)
        return grad_x_BTD, None, *sums


class _Output(torch.autograd.Function):
    """Computes the output, saves nothing, and passes its gradient on to `_Inputs`."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, body: _Body, parameters: list[Tensor]) -> Tensor:  # type: ignore[override]
        out_BTD = torch.empty_like(x_BTD)  # no view is returned: FSDP2 hooks the output
        body.forward(x_BTD.flatten(0, 1), parameters, out_BTD.flatten(0, 1))
        return out_BTD

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad_BTD, None, None
