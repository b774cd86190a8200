"""Compilation of the regions between the layers of a Llama's blocks.

Layers with per-sample gradients start collectives within backward, so they run eagerly, and a block
around them cannot be compiled whole (nor with graph breaks at its layers: TorchTitan calls `w3`
between silu and product, which would then lie in two graphs). Here a block calls its layers one
after another, and between them functions of tensors alone, each compiled into one graph: norms,
also with the residual add before them; rotary embeddings; SwiGLU. Activation checkpointing, FSDP2
and offloading see an unchanged block.

Guarantee:
    No compiled function has a parameter or a sum over samples: row b of its results depends on row
    b of its arguments. Norm weights come as one copy per sample (`sample_copies`), so that autograd
    itself forms per-sample gradients: backward would sum a parameter's over samples. Row b of the
    gradient that a layer passes to its sink is that of row b of the copies, unchanged.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torchtitan.models.llama3.model.model import TransformerBlock

from torchtitan_dp.gradients.layers import PerSampleLayer
from torchtitan_dp.gradients.operands import Existing
from torchtitan_dp.models.feed_forward import swiglu


def norm(x_BTD: Tensor, weight_BD: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm in fp32, each sample by its own weight; the result has the dtype of x."""
    wide_BTD = x_BTD.float()
    scale_BT1 = torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + eps)
    return (wide_BTD * scale_BT1 * weight_BD[:, None]).to(x_BTD.dtype)


def add_and_norm(
    x_BTD: Tensor, more_BTD: Tensor, weight_BD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + more, and `norm` of it."""
    sum_BTD = x_BTD + more_BTD
    return sum_BTD, norm(sum_BTD, weight_BD, eps)


def rotate(q_BTHF: Tensor, k_BTHF: Tensor, angles_TF2: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of neighbours in heads of size F as complex numbers, in fp32; `angles_TF2` is
    fp32 (T, F / 2, 2), the cosine and sine of each position and pair."""
    return _turned(q_BTHF, angles_TF2), _turned(k_BTHF, angles_TF2)


def _turned(x_BTHF: Tensor, angles_TF2: Tensor) -> Tensor:
    cosine_T1F, sine_T1F = angles_TF2[:, None].unbind(-1)
    real, imaginary = x_BTHF.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (real * cosine_T1F - imaginary * sine_T1F, real * sine_T1F + imaginary * cosine_T1F)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_BTHF.dtype)


@dataclass(frozen=True)
class Regions:
    """The functions that a block calls between its layers."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_and_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]


def compiled(backend: str) -> Regions:
    """Compile each region into one graph; a second length makes it dynamic."""
    compile_: Any = functools.partial(torch.compile, backend=backend, fullgraph=True)
    return Regions(compile_(norm), compile_(add_and_norm), compile_(rotate), compile_(swiglu))


class RegionBlock(TransformerBlock):
    """A block that calls `regions` between its layers; `use_regions` gives blocks this class."""

    regions: Regions

    def forward(  # type: ignore[no-untyped-def, override]
        self, x: Tensor, freqs_cis: Tensor, attention_masks: None, positions: Tensor | None = None
    ) -> Tensor:
        """As TorchTitan's: x is (B, T, D), freqs_cis complex (T or more, F / 2)."""
        assert attention_masks is None, "attention is causal"
        attention, feed_forward, regions = self.attention, self.feed_forward, self.regions
        B, T, _ = x.shape
        freqs_cis = freqs_cis[:T] if positions is None else freqs_cis[positions[0]]
        normed = regions.norm(x, *sample_copies(self.attention_norm, B))
        q, k, v = (
            layer(normed).view(B, T, -1, attention.head_dim)
            for layer in (attention.wq, attention.wk, attention.wv)
        )
        q, k = regions.rotate(q, k, torch.view_as_real(freqs_cis))
        attended = attention.inner_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=attention.enable_gqa
        )
        more = attention.wo(attended.transpose(1, 2).reshape(B, T, -1))
        h, normed = regions.add_and_norm(x, more, *sample_copies(self.ffn_norm, B))
        gated = regions.swiglu(feed_forward.w1(normed), feed_forward.w3(normed))
        return h + cast(Tensor, feed_forward.w2(gated))


def use_regions(blocks: nn.Module, regions: Regions) -> None:
    """Turn the blocks of a Llama into `RegionBlock`s that call `regions`, in place.

    As `fully_shard` does, this gives modules a class that adds to their own. Call it after
    `per_sample_layers`, before activation checkpointing and FSDP2.
    """
    for block in blocks.children():
        assert type(block) is TransformerBlock, "configurations of other models are refused"
        block.__class__ = RegionBlock
        converted = cast(RegionBlock, block)
        assert converted.attention.attn_type == "sdpa", "other attentions take other arguments"
        converted.regions = regions


def sample_copies(norm: nn.RMSNorm, batch_size: int) -> tuple[Tensor, float]:
    """Return the weight of a norm, per-sample or frozen, once for each sample, fp32 (B, D), and its
    epsilon."""
    assert norm.eps is not None
    if isinstance(norm, PerSampleLayer):
        return cast(Tensor, _SampleCopies.apply(norm, batch_size, norm.weight)), norm.eps
    assert not norm.weight.requires_grad, f"{type(norm).__name__} was not converted"
    return norm.weight.float().repeat(batch_size, 1), norm.eps


class _SampleCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: PerSampleLayer, batch_size: int, weight_D: Tensor) -> Tensor:  # type: ignore[override]
        ctx.norm = norm
        return weight_D.float().repeat(batch_size, 1)

    @staticmethod
    def backward(ctx: Any, grad_copies_BD: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        # It runs if the weight is trained, and only then: no other input has a gradient.
        name, norm = ctx.norm.parameter_names["weight"], ctx.norm
        norm.sink.form_grad_samples(name, len(grad_copies_BD), Existing(grad_copies_BD))
        return None, None, None
