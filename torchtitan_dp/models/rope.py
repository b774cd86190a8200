"""Scaled rotary embeddings (RoPE), for samples beyond the window that a model was trained on.

A scaling gives inverse frequencies, and a factor of the table's cosines and sines, which queries
and keys are both multiplied by. They are those of `transformers`, in its order of operations: at a
million positions, frequencies that differ by one rounding are angles that differ by up to 0.06.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.config import JobConfig


def _positions_per_radian(theta: float, head_size: int) -> Tensor:
    """Return the positions in a radian, for each pair of a head's values."""
    return theta ** (torch.arange(0, head_size, 2).float() / head_size)


@dataclass(frozen=True)
class LinearScaling:
    """All positions divided by a factor (Chen et al. 2023, arXiv 2306.15595); 1 is plain RoPE."""

    factor: float = 1.0

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def inverse_frequencies(self, theta: float, head_size: int) -> Tensor:
        """Return the angle of a position of 1, for each pair of a head's values."""
        return 1.0 / _positions_per_radian(theta, head_size) / self.factor

    def window(self, given: int) -> int:
        """Return the window after scaling, of a model whose own is `given`."""
        return round(self.factor * given)

    def settings(self) -> dict[str, Any]:
        """Return the value of `rope_scaling` in a `config.json`."""
        if self.factor == 1:
            return {"rope_type": "default"}
        return {"rope_type": "linear", "factor": self.factor}


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): long wavelengths scaled, short ones kept."""

    factor: float
    original: int
    """The window before scaling."""
    beta_fast: float = 32.0
    """Pairs that turn at least so often in the original window are not scaled."""
    beta_slow: float = 1.0
    """Pairs that turn at most so often are scaled by `factor`; those between, in part."""
    given_attention_factor: float | None = None
    truncate: bool = True
    """Whether both bounds are rounded to whole pairs."""

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines; by default the paper's sqrt(1 / t)."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        return mscale(self.factor)

    def inverse_frequencies(self, theta: float, head_size: int) -> Tensor:
        """Return the angle of a position of 1, for each pair of a head's values."""
        turns = self.beta_fast, self.beta_slow
        first, last = (self._pair(number, theta, head_size) for number in turns)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_size - 1)
        width = (last - first) or 0.001
        scaled = torch.clamp((torch.arange(head_size // 2).float() - first) / width, 0, 1)
        kept = 1 - scaled
        positions = _positions_per_radian(theta, head_size)
        return 1.0 / (self.factor * positions) * (1 - kept) + 1.0 / positions * kept

    def _pair(self, turns: float, theta: float, head_size: int) -> float:
        """Return the (fractional) pair that turns so often in the original window."""
        wavelength = self.original / (turns * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(theta))

    def window(self, given: int) -> int:
        """Return the window after scaling; that before is `original`, not `given`."""
        return round(self.factor * self.original)

    def settings(self) -> dict[str, Any]:
        """Return the value of `rope_scaling` in a `config.json`."""
        factor = self.given_attention_factor
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            **({} if factor is None else {"attention_factor": factor}),
        }


Scaling = LinearScaling | Yarn


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines: 0.1 ln(factor) + 1, of a weighted logarithm."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaled_angles(args: Any) -> tuple[Tensor, float]:
    """Return the angles of a model's table, fp32 (position, pair), by the scaling in `args.rope`,
    and the factor of their cosines and sines."""
    positions = torch.arange(args.max_seq_len)
    with torch.device("cpu"):  # as `transformers`: a GPU's powers may round differently
        frequencies = args.rope.inverse_frequencies(args.rope_theta, args.head_size)
    angles = torch.outer(positions, frequencies.to(positions.device))
    return angles, args.rope.attention_factor


def scaling_of(config: JobConfig) -> Scaling | None:
    """Return the scaling of `[rope]`; None if the model's own stays."""
    rope = config.rope
    if rope.type is None:
        return None
    if rope.type == "default":
        return LinearScaling()
    assert rope.factor is not None
    if rope.type == "linear":
        return LinearScaling(rope.factor)
    assert rope.original_max_position_embeddings is not None
    yarn = Yarn(rope.factor, rope.original_max_position_embeddings)
    betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    given: dict[str, Any] = {name: beta for name, beta in betas.items() if beta is not None}
    return dataclasses.replace(yarn, **given)
