"""Rotary embeddings (RoPE) by `transformers`, also for samples beyond the window that a model was
trained on.

The formulas are transformers' own, and its order of operations: at a million positions, frequencies
that differ by one rounding are angles that differ by up to 0.06.
"""

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.config import JobConfig

Rope = dict[str, Any]
"""The value of `rope_parameters` in a `config.json`: theta, the scaling's type, and its terms."""


def rope_of(config: JobConfig, given: Rope, window: int) -> tuple[Rope, int]:
    """Return the rotary embeddings and the window of a model with those of `[rope]` in the place of
    its own, which are `given`."""
    terms = {key: v for key, v in dataclasses.asdict(config.rope).items() if v is not None}
    theta, kind = terms.pop("theta", given.get("rope_theta")), terms.pop("type", None)
    if "factor" not in terms:  # the window is where it is trained
        window = max(window, config.training.seq_len)
    if kind is None:
        return {**given, "rope_theta": theta}, window
    kept = {key: v for key, v in given.items() if key == "partial_rotary_factor"}
    rope = {**kept, "rope_type": kind, "rope_theta": theta, **terms}
    return rope, window_of(rope, window)


def window_of(rope: Rope, given: int) -> int:
    """Return the window after scaling, of a model whose own is `given`."""
    original = rope.get("original_max_position_embeddings", given)
    return round(rope.get("factor", 1.0) * original)


def frequencies(rope: Rope, head_size: int) -> tuple[Tensor, float]:
    """Return the angle of a position of 1 for each pair of a head's values, fp32 on the CPU, since
    a GPU's powers may round differently, and the factor of cosines and sines."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape: dict[str, Any] = {"hidden_size": head_size, "num_attention_heads": 1}
    shape["max_position_embeddings"] = window_of(rope, 1)  # transformers warns of another
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(rope)))
    return rotary.inv_freq.detach(), rotary.attention_scaling


def rotary_table(rope: Rope, head_size: int, positions_T: Tensor) -> Tensor:
    """Return the complex table (position, pair), on the device of its positions."""
    frequencies_F, factor = frequencies(rope, head_size)
    angles_TF = torch.outer(positions_T, frequencies_F.to(positions_T.device))
    return torch.polar(torch.full_like(angles_TF, factor), angles_TF)


def rotate(x_BHTF: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x cos + (-x2, x1) sin, where x1 and x2 are the halves of heads, in the dtype of x.
    Where cosines and sines are shorter than a head, its last values stay.

    It makes no tensors of halves, and keeps cosines and sines alone for backward.
    """
    if (more := x_BHTF.shape[-1] - cosine.shape[-1]) > 0:
        cosine = F.pad(cosine, (0, more), value=1.0)
    return cast(Tensor, _Rotation.apply(x_BHTF, cosine, sine))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, *sine.chunk(2, -1), sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        first, second = sine.chunk(2, -1)
        return _turned(grad, cosine, second, first, sign=-1), None, None


def _turned(x: Tensor, cosine: Tensor, of_second: Tensor, of_first: Tensor, sign: int) -> Tensor:
    """Return x cos; its first half less the second of x times a sine, its second half plus the
    first of x times the other sine, or both with the other sign."""
    turned, half = x * cosine, of_first.shape[-1]
    (first, second), (first_turned, second_turned) = (
        y[..., : 2 * half].chunk(2, -1) for y in (x, turned)
    )
    first_turned.addcmul_(second, of_second, value=-sign)
    second_turned.addcmul_(first, of_first, value=sign)
    return turned.to(x.dtype)
