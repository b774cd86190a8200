"""A Llama's block in tiles: queries, keys and values too, rotated as they are made.

Norm, projections and rotary embeddings are one function that saves its input alone, which full
activation checkpointing keeps anyway. TorchTitan's would keep the norm of all tokens for backward,
and rotates fp32 copies of all queries and keys. Nothing is computed twice but the norm: the
gradient of a rotation is the rotation back.

Guarantee:
    As `models.feed_forward`: several samples are refused where a parameter is trained.
"""

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torchtitan.models.llama3.model.model import TransformerBlock, apply_rotary_emb

from torchtitan_dp.gradients.operands import tiles
from torchtitan_dp.models.feed_forward import Tiling, feed_forward_in_tiles
from torchtitan_dp.models.tiles import NormedLayers, add_class, new_sums, norm_of_tile, rounded


class TiledLlamaBlock(nn.Module):
    """The class that `use_tiles` mixes into a Llama's block: all of its parts but attention itself
    are in tiles."""

    tiling: Tiling

    def forward(
        self, x_BTD: Tensor, rotary: Tensor, attention_masks: None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the block; arguments as TorchTitan's, with B = 1 where a parameter is trained."""
        assert attention_masks is None, "attention is causal"
        assert positions is None, "rotary embeddings are those of this rank's tokens"
        own = cast(TransformerBlock, self)
        attention, feed_forward = own.attention, own.feed_forward
        assert attention.attn_type == "sdpa", "other attentions take other arguments"
        projections = [attention.wq, attention.wk, attention.wv]
        layers, parameters = NormedLayers.of(own.attention_norm, projections, len(x_BTD))
        sizes = attention.head_dim, self.tiling.tokens
        heads = _Heads.apply(x_BTD, rotary[: x_BTD.shape[1]], layers, *sizes, *parameters)
        q, k, v = (x_BTHF.transpose(1, 2) for x_BTHF in heads)
        out_BHTF = attention.inner_attention(q, k, v, enable_gqa=attention.enable_gqa)
        h_BTD = x_BTD + attention.wo(out_BHTF.transpose(1, 2).flatten(2))
        in_order = [feed_forward.w1, feed_forward.w3, feed_forward.w2]
        return feed_forward_in_tiles(h_BTD, own.ffn_norm, in_order, self.tiling)


def use_tiles(blocks: nn.Module, tiling: Tiling) -> None:
    """Turn a Llama's blocks into `TiledLlamaBlock`s, in place, before activation checkpointing and
    FSDP2."""
    for block in blocks.children():
        add_class(block, TiledLlamaBlock)
        cast(TiledLlamaBlock, block).tiling = tiling


class _Heads(torch.autograd.Function):
    """Computes rotated queries and keys, and values, of norm(x), (B, T, heads, F) each; rotary
    embeddings are complex (T, F / 2), and `tokens` are in a tile."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_BTD: Tensor,
        rotary_TF: Tensor,
        layers: NormedLayers,
        head_dim: int,
        tokens: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.tokens = layers, tokens
        ctx.save_for_backward(x_BTD, rotary_TF, *parameters)
        B, T, _ = x_BTD.shape
        linear = layers.linear(parameters)
        made = [x_BTD.new_empty((B, T, len(one.weight_PD) // head_dim, head_dim)) for one in linear]
        for tile in tiles(T, tokens):
            n_ND = layers.norm(x_BTD[:, tile], parameters).flatten(0, 1)
            parts = [one(n_ND).view_as(out[:, tile]) for one, out in zip(linear, made, strict=True)]
            parts[:2] = apply_rotary_emb(*parts[:2], rotary_TF[tile])
            for out, part in zip(made, parts, strict=True):
                out[:, tile] = part
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_BTD, rotary_TF, *parameters = (saved.detach() for saved in ctx.saved_tensors)
        sums = new_sums(parameters, ctx.needs_input_grad[5:])
        linear, by_layer = ctx.layers.linear(parameters), ctx.layers.by_layer(sums)
        grad_x_BTD = torch.empty_like(x_BTD)
        for tile in tiles(x_BTD.shape[1], ctx.tokens):
            n_BTD, norm_backward = norm_of_tile(ctx.layers, x_BTD[:, tile], parameters, sums)
            n_ND, grad_n_ND = n_BTD.flatten(0, 1), None
            parts = [grad_BTHF[:, tile] for grad_BTHF in grads]
            parts[:2] = apply_rotary_emb(*parts[:2], rotary_TF[tile].conj())
            for one, part, its_sums in zip(linear, parts, by_layer, strict=True):
                part_NP = part.reshape(len(n_ND), -1)
                grad_n_ND = one.backward(n_ND, part_NP, grad_n_ND, its_sums)
            assert grad_n_ND is not None
            grad_x_BTD[:, tile] = norm_backward(grad_n_ND.view_as(n_BTD))
        return grad_x_BTD, None, None, None, None, *rounded(sums, parameters)
