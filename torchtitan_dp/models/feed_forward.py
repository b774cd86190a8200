"""A block's feed-forward in tiles of tokens: its hidden activations are never all there.

At long T most of a recomputed block is its feed-forward: w1 n, w3 n, silu(w1 n) and the product are
each 3.5 times as wide as the residual stream of an 8B Llama. Here norm, feed-forward and residual
add are one function that saves its input alone. Backward computes a tile again, then its gradients;
those of weights and of LoRA's factors are summed over tiles in fp32 (`gradients.products`). Frozen
weights have none. Tiling by tokens is ALST's "sequence tiling" (Bekman et al. 2025, arXiv
2506.13996).

No product is computed once more than with full activation checkpointing. The function is two nodes
of the graph: `_Inputs`, which saves, and `_Output`, which computes and saves nothing. Checkpointing
recomputes a block only up to the last tensor that it saves ("early stop"), so it never computes
`_Output` again, and the tiles of w1 and w3 are computed a second time by `_Inputs.backward` alone.

Guarantee:
    The gradients are those of one sample: several are refused where a parameter is trained, since
    they would be merged before they are clipped.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.gradients.products import add_product_
from torchtitan_dp.models.lora import LoRALinear
from torchtitan_dp.models.rms_norm import LeanRMSNorm, rms_norm

LAYERS = ("w1", "w3", "w2")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    silu_grad: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
    return silu_grad, grad * F.silu(gate)


@dataclass(frozen=True)
class Tiling:
    """The size of tiles, and the functions that run within one."""

    tokens: int
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = swiglu_backward

    @classmethod
    def compiled(cls, tokens: int, backend: str) -> "Tiling":
        """Compile what lies between the products; `backend` is `torch.compile`'s."""
        compile_: Any = functools.partial(torch.compile, backend=backend, fullgraph=True)
        return cls(tokens, compile_(swiglu), compile_(swiglu_backward))

    def tiles(self, tokens: int) -> Iterator[slice]:
        """Cut a rank's tokens into tiles, of which the last may be shorter."""
        for start in range(0, tokens, self.tokens):
            yield slice(start, min(start + self.tokens, tokens))


class TiledBlock(nn.Module):
    """The class that `use_tiles` adds to a block's own: attention, then `feed_forward_in_tiles`."""

    attention_norm: nn.Module
    attention: nn.Module
    ffn_norm: nn.RMSNorm
    feed_forward: nn.Module
    tiling: Tiling

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Tensor,
        attention_masks: None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the block; arguments as TorchTitan's."""
        attended_BTD = self.attention(
            self.attention_norm(x_BTD), rotary, attention_masks, positions
        )
        h_BTD = x_BTD + attended_BTD
        del attended_BTD
        return feed_forward_in_tiles(h_BTD, self.ffn_norm, self.feed_forward, self.tiling)


def use_tiles(blocks: nn.Module, tiling: Tiling) -> None:
    """Turn dense blocks, of any family of TorchTitan's form, into `TiledBlock`s, in place.

    As `fully_shard` does, this gives modules a class that adds to their own: names, parameters and
    `isinstance` stay. Call it before activation checkpointing and FSDP2.
    """
    for block in blocks.children():
        assert not getattr(block, "moe_enabled", False), "experts have another feed-forward"
        kind = type(block)
        block.__class__ = type(f"Tiled{kind.__name__}", (TiledBlock, kind), {})
        cast(TiledBlock, block).tiling = tiling


def feed_forward_in_tiles(
    h_BTD: Tensor, norm: nn.RMSNorm, feed_forward: nn.Module, tiling: Tiling
) -> Tensor:
    """Compute h + w2(silu(w1 n) * w3 n), with n = norm(h), tile by tile.

    Args:
        h_BTD: with B = 1 where a parameter is trained.
        feed_forward: with `w1`, `w2`, `w3`, which may have LoRA's factors.
    """
    layers = [getattr(feed_forward, name) for name in LAYERS]
    parameters: list[Tensor] = [norm.weight]
    for layer in layers:
        parameters.append(layer.weight)
        if isinstance(layer, LoRALinear):
            parameters += [layer.lora_a.weight, layer.lora_b.weight]
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    assert len(h_BTD) == 1 or not trains, "samples would be merged before they are clipped"
    scalings = [layer.scaling if isinstance(layer, LoRALinear) else None for layer in layers]
    assert norm.eps is not None
    body = _Body(tiling, isinstance(norm, LeanRMSNorm), norm.eps, tuple(scalings))
    kept_BTD = _Inputs.apply(h_BTD, body, *parameters)
    return cast(Tensor, _Output.apply(kept_BTD, body, [p.detach() for p in parameters]))


@dataclass(frozen=True)
class _Linear:
    """x W^T, plus scaling (x A^T) B^T where there are factors."""

    weight_PD: Tensor
    factors: tuple[Tensor, Tensor] | None  # A (r, D), B (P, r)
    scaling: float

    def __call__(self, x_ND: Tensor) -> Tensor:
        y_NP = x_ND @ self.weight_PD.T
        if self.factors is not None:
            a_RD, b_PR = self.factors
            y_NP.addmm_(x_ND @ a_RD.T, b_PR.T, alpha=self.scaling)
        return y_NP

    def backward(
        self, x_ND: Tensor, grad_NP: Tensor, into_ND: Tensor | None, sums: list[Tensor | None]
    ) -> Tensor:
        """Add the gradients of weight and factors to `sums` (fp32, those that are trained), and
        that of x to `into_ND`, in place; return it."""
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
class _Body:
    """The computation within a tile, apart from its parameters."""

    tiling: Tiling
    is_lean: bool
    eps: float
    scalings: tuple[float | None, ...]  # of the factors of each of LAYERS; None without

    def layers(self, parameters: list[Any]) -> list[list[Any]]:
        """Split the parameters behind the norm's by layer: weight, or weight and factors."""
        rest = iter(parameters[1:])
        return [[next(rest) for _ in range(1 if s is None else 3)] for s in self.scalings]

    def linear(self, parameters: list[Tensor]) -> list[_Linear]:
        """Return the layers with their parameters."""
        return [
            _Linear(weight, (factors[0], factors[1]) if factors else None, scaling or 0.0)
            for (weight, *factors), scaling in zip(
                self.layers(parameters), self.scalings, strict=True
            )
        ]

    def normed(self, h_ND: Tensor, weight_D: Tensor) -> Tensor:
        """Compute the norm, as its module does."""
        function = rms_norm if self.is_lean else F.rms_norm
        return function(h_ND, weight_D.shape, weight_D, self.eps)  # type: ignore[arg-type]

    def forward(self, h_ND: Tensor, parameters: list[Tensor], out_ND: Tensor) -> None:
        """Compute all tiles, into `out_ND`."""
        w1, w3, w2 = self.linear(parameters)
        for tokens in self.tiling.tiles(len(h_ND)):
            n_ND = self.normed(h_ND[tokens], parameters[0])
            y_ND = w2(self.tiling.swiglu(w1(n_ND), w3(n_ND)))
            torch.add(h_ND[tokens], y_ND, out=out_ND[tokens])

    def backward(
        self, h_ND: Tensor, parameters: list[Tensor], grad_ND: Tensor, sums: list[Tensor | None]
    ) -> Tensor:
        """Compute all tiles again; add the gradients of trained parameters to `sums`, fp32, and
        return that of h."""
        (w1, w3, w2), (sums_1, sums_3, sums_2) = self.linear(parameters), self.layers(sums)
        grad_h_ND = torch.empty_like(h_ND)
        for tokens in self.tiling.tiles(len(h_ND)):
            grad_out_ND = grad_ND[tokens]
            with torch.enable_grad():
                leaves = h_ND[tokens].detach(), parameters[0].detach()
                leaves[0].requires_grad_()
                leaves[1].requires_grad_(sums[0] is not None)
                n_graph = self.normed(*leaves)
            n_ND = n_graph.detach()
            gate, up = w1(n_ND), w3(n_ND)
            product = self.tiling.swiglu(gate, up) if _any(sums_2) else gate
            grad_product = w2.backward(product, grad_out_ND, None, sums_2)
            grad_gate, grad_up = self.tiling.swiglu_backward(gate, up, grad_product)
            del gate, up, product, grad_product
            grad_n_ND = w1.backward(n_ND, grad_gate, None, sums_1)
            grad_n_ND = w3.backward(n_ND, grad_up, grad_n_ND, sums_3)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            of_h, *of_norm = torch.autograd.grad(n_graph, wanted, grad_n_ND)
            torch.add(grad_out_ND, of_h, out=grad_h_ND[tokens])
            if sums[0] is not None:
                sums[0] += of_norm[0]
        return grad_h_ND


def _any(sums: list[Tensor | None]) -> bool:
    return any(one is not None for one in sums)


class _Inputs(torch.autograd.Function):
    """Saves the input and the parameters; its backward is that of the whole."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, h_BTD: Tensor, body: _Body, *parameters: Tensor
    ) -> Tensor:
        ctx.body = body
        ctx.save_for_backward(h_BTD, *parameters)
        return h_BTD.view_as(h_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_BTD, *parameters = ctx.saved_tensors
        parameters = [parameter.detach() for parameter in parameters]
        sums = [
            torch.zeros_like(parameter, dtype=torch.float32) if needed else None
            for parameter, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True)
        ]
        flat = h_BTD.flatten(0, 1), parameters, grad_BTD.reshape(-1, h_BTD.shape[-1])
        grad_h_BTD = ctx.body.backward(*flat, sums).view(h_BTD.shape)
        for place, (one, parameter) in enumerate(zip(sums, parameters, strict=True)):
            sums[place] = None if one is None else one.to(parameter.dtype)  # frees the fp32 sum
        return grad_h_BTD, None, *sums


class _Output(torch.autograd.Function):
    """Computes the output, saves nothing, and passes its gradient on to `_Inputs`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, h_BTD: Tensor, body: _Body, parameters: list[Tensor]
    ) -> Tensor:
        out_BTD = torch.empty_like(h_BTD)  # no view is returned: FSDP2 hooks the output
        body.forward(h_BTD.flatten(0, 1), parameters, out_BTD.flatten(0, 1))
        return out_BTD

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad_BTD, None, None
