"""Rotary embeddings (RoPE): those of `[rope]`, also for samples beyond the window that a model was
trained on, and a function that turns queries and keys."""

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


def rotate(x_BHTF: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x cos + (-x2, x1) sin, where x1 and x2 are the halves of heads, in the dtype of x. Of
    sines that are shorter than a head, its last values have only the cosines.

    It makes no tensors of halves, and keeps cosines and sines alone for backward. In compiled code
    it is the formula, which is fused there.
    """
    if torch.compiler.is_compiling():
        turned = x_BHTF[..., : sine.shape[-1]]
        first, second = turned.chunk(2, -1)
        turned = torch.cat([-second, first], -1) * sine
        turned = F.pad(turned, (0, x_BHTF.shape[-1] - sine.shape[-1]))
        return (x_BHTF * cosine + turned).to(x_BHTF.dtype)
    return cast(Tensor, _Rotation.apply(x_BHTF, cosine, sine))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cosine, sine)
        first, second = sine.chunk(2, -1)
        return _turned(x, cosine, first, second, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        first, second = sine.chunk(2, -1)
        return _turned(grad, cosine, second, first, sign=-1), None, None


def _turned(x: Tensor, cosine: Tensor, of_second: Tensor, of_first: Tensor, *, sign: int) -> Tensor:
    """Return x cos; its first half less the second of x times a sine, its second half plus the
    first of x times the other sine, or both with the other sign."""
    turned, half = x * cosine, of_first.shape[-1]
    (first, second), (first_turned, second_turned) = (
        y[..., : 2 * half].chunk(2, -1) for y in (x, turned)
    )
    first_turned.addcmul_(second, of_second, value=-sign)
    second_turned.addcmul_(first, of_first, value=sign)
    return turned.to(x.dtype)
