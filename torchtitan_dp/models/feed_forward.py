"""A block's feed-forward in tiles of tokens: its hidden activations are never all there.

At long T most of a recomputed block is its feed-forward: w1 n, w3 n, silu(w1 n) and the product are
each 3.5 times as wide as the residual stream of an 8B Llama. Here norm, feed-forward and residual
add are one function that saves its input alone; backward computes a tile again, then its gradients.

No product is computed more often than with full activation checkpointing. The function is two nodes
of the graph: `_Inputs`, which saves, and `_Output`, which computes and saves nothing. Checkpointing
recomputes a block only up to the last tensor that it saves (`activation_checkpoint.early_stop`), so
it never computes `_Output` again, and the tiles of w1 and w3 are computed a second time by
`_Inputs.backward` alone.

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

from torchtitan_dp.gradients.operands import tiles
from torchtitan_dp.models.tiles import NormedLayers, Sums, new_sums, norm_of_tile, rounded


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
    """The class that tiles mix into a gated feed-forward of transformers."""

    tiling: Tiling
    in_order = ("gate_proj", "up_proj", "down_proj")

    def forward(self, n_BTD: Tensor) -> Tensor:
        """Return the feed-forward; of tokens without a sample, as its own class does."""
        if n_BTD.dim() != 3:
            return cast(Tensor, super().forward(n_BTD))
        layers = [getattr(self, name) for name in self.in_order]
        return feed_forward_in_tiles(n_BTD, None, layers, self.tiling)


def feed_forward_in_tiles(
    h_BTD: Tensor, norm: nn.RMSNorm | None, in_order: Sequence[nn.Module], tiling: Tiling
) -> Tensor:
    """Compute h + w2(silu(w1 n) * w3 n), with n = norm(h), tile by tile; without a norm, w2(silu(w1
    h) * w3 h).

    The layers `in_order`, w1, w3, w2, may have LoRA's factors; B is 1 where a parameter is trained.
    """
    layers, parameters = NormedLayers.of(norm, in_order, len(h_BTD))
    body = _Body(tiling, layers)
    kept_BTD = _Inputs.apply(h_BTD, body, *parameters)
    return cast(Tensor, _Output.apply(kept_BTD, body, [p.detach() for p in parameters]))


@dataclass(frozen=True)
class _Body:
    """The computation of all tiles, apart from the parameters."""

    tiling: Tiling
    layers: NormedLayers

    def forward(self, h_ND: Tensor, parameters: list[Tensor], out_ND: Tensor) -> None:
        """Compute the output, into `out_ND`."""
        w1, w3, w2 = self.layers.linear(parameters)
        for tokens in tiles(len(h_ND), self.tiling.tokens):
            n_ND = self.layers.norm(h_ND[tokens], parameters)
            y_ND = w2(self.tiling.swiglu(w1(n_ND), w3(n_ND)))
            out_ND[tokens] = y_ND.add_(h_ND[tokens]) if self.layers.has_norm else y_ND

    def backward(
        self, h_ND: Tensor, parameters: list[Tensor], grad_ND: Tensor, sums: Sums
    ) -> Tensor:
        """Add the gradients of parameters to `sums`, and return that of h."""
        w1, w3, w2 = self.layers.linear(parameters)
        sums_1, sums_3, sums_2 = self.layers.by_layer(sums)
        grad_h_ND = torch.empty_like(h_ND)
        for tokens in tiles(len(h_ND), self.tiling.tokens):
            n_ND, norm_backward = norm_of_tile(self.layers, h_ND[tokens], parameters, sums)
            gate, up = w1(n_ND), w3(n_ND)
            trains = any(one is not None for one in sums_2)  # else w2 does not read its input
            product = self.tiling.swiglu(gate, up) if trains else gate
            grad_product = w2.backward(product, grad_ND[tokens], None, sums_2)
            grad_gate, grad_up = self.tiling.swiglu_backward(gate, up, grad_product)
            del gate, up, product, grad_product
            grad_n_ND = w1.backward(n_ND, grad_gate, None, sums_1)
            grad_n_ND = w3.backward(n_ND, grad_up, grad_n_ND, sums_3)
            grad_h_ND[tokens] = norm_backward(grad_n_ND)
            if self.layers.has_norm:
                grad_h_ND[tokens] += grad_ND[tokens]
        return grad_h_ND


class _Inputs(torch.autograd.Function):
    """Saves the input and the parameters; its backward computes all gradients of `_Body`."""

    @staticmethod
    def forward(ctx: Any, h_BTD: Tensor, body: _Body, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.body = body
        ctx.save_for_backward(h_BTD, *parameters)
        return h_BTD.view_as(h_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_BTD, *parameters = (saved.detach() for saved in ctx.saved_tensors)
        sums = new_sums(parameters, ctx.needs_input_grad[2:])
        flat = h_BTD.flatten(0, 1), parameters, grad_BTD.reshape(-1, h_BTD.shape[-1])
        grad_h_BTD = ctx.body.backward(*flat, sums).view(h_BTD.shape)
        return grad_h_BTD, None, *rounded(sums, parameters)


class _Output(torch.autograd.Function):
    """Computes the output, saves nothing, and passes its gradient on to `_Inputs`."""

    @staticmethod
    def forward(ctx: Any, h_BTD: Tensor, body: _Body, parameters: list[Tensor]) -> Tensor:  # type: ignore[override]
        out_BTD = torch.empty_like(h_BTD)  # no view is returned: FSDP2 hooks the output
        body.forward(h_BTD.flatten(0, 1), parameters, out_BTD.flatten(0, 1))
        return out_BTD

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad_BTD, None, None
