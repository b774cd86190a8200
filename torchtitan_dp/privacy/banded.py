"""Noise that is correlated over steps: banded matrix factorization (BandMF), with Toeplitz bands.

Step t of a chain adds w_t = ‖c‖ (C⁻¹ z)_t to its clipped sum, where z_1, z_2, … are independent
N(0, (σC)² I), and C is lower triangular with the column c = (c_0, …, c_{b-1}), c_0 = 1, along its
diagonal (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", section 4 and
appendix A). `coefficients` finds the column. C⁻¹ is not banded, but C is:
w_t = ‖c‖ z_t - c_1 w_{t-1} - … - c_{b-1} w_{t-b+1}. So a chain keeps the last b - 1 noises, in
fp32, of each rank's shards, and a step draws one.

Guarantee (proof: docs/proofs.md, "Correlated noise"):
    - n steps in a row are dominated by ⌈n / b⌉ Poisson-subsampled Gaussian mechanisms of noise
      multiplier σ and rate b q, if each unit is drawn with that rate at every b-th step and never
      otherwise (`sampling.groups_of`). C⁻¹ is never cut off.
    - Kept noise follows from z alone: no gradient is ever added to it. A step that failed leaves a
      chain that adds nothing more.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_dp.privacy.keys import KeyStream, RootKey, Secret

_AT_ONCE = 2**14  # values that stay in a core's cache while earlier noise is added to them


_Kept = tuple[Sequence[float], dict[str, tuple[int, list[Tensor]]]]
"""A chain's column, and its earlier noise: for each parameter, its newest row and the last b - 1,
newest first; fp32, of this rank's flat shards."""


class StepNoise(Secret):
    """The noise of one step, to be added once to each parameter's shard."""

    __slots__ = ("__kept", "__row", "key")

    def __init__(self, key: bytes, row: int = 0, kept: _Kept | None = None) -> None:
        """Take the step's own 32 bytes, its row in its chain, from 0, and the chain's earlier
        noise; None for independent noise."""
        self.key, self.__row, self.__kept = key, row, kept

    @property
    def is_correlated(self) -> bool:
        """Whether it takes back noise of earlier steps."""
        return self.__kept is not None

    def add_to(self, flat: Tensor, name: str, draw: Callable[[Tensor], None]) -> None:
        """Add the step's noise in place to one parameter's shard (n,), and keep it for later steps.
        `draw` adds ‖c‖ z_t, by `key`, in place to a tensor of that shape. RuntimeError: the
        parameter lacks noise of the step before, which has failed."""
        if self.__kept is None:
            draw(flat)
            return
        column, noise = self.__kept
        if self.__row == 0:  # written at once, so that a rehearsal finds a lack of memory
            noise[name] = -1, [torch.empty_like(flat).zero_() for _ in column[1:]]
        row, kept = noise.pop(name, (-1, []))  # back when it is complete
        if row != self.__row - 1:
            raise RuntimeError(f"{name} lacks the noise of a failed step: its chain ends there")
        own = kept.pop()
        size = _AT_ONCE if flat.device.type == "cpu" else max(len(flat), 1)
        for part, *parts in zip(*(shard.split(size) for shard in (own, *kept)), strict=True):
            part.mul_(-column[-1])
            for c, earlier in zip(column[1:-1], parts, strict=True):
                part.add_(earlier, alpha=-c)
        draw(own)
        noise[name] = self.__row, [own, *kept]
        flat.add_(own)


class NoiseChain(Secret):
    """The noise of one chain: from a start, or a load, on."""

    __slots__ = ("__kept", "__last", "__row", "__stream")

    def __init__(self, stream: KeyStream, column: Sequence[float]) -> None:
        """Take a stream of a root key that no other chain has, and c (`coefficients.INDEPENDENT`
        for independent noise)."""
        self.__stream, self.__row = stream, 0
        self.__kept: _Kept | None = (column, {}) if len(column) > 1 else None
        self.__last: int | None = None

    @classmethod
    def rehearsal(cls, column: Sequence[float]) -> "NoiseChain":
        """Return a chain of a public key, whose noise must reach no weights."""
        return cls(RootKey(bytes(32)).stream("noise"), column)

    def take(self, step: int) -> StepNoise:
        """Return the noise that `step` adds. RuntimeError: it was taken already, or does not follow
        the one before, so that a unit's draws might be fewer than b rows apart."""
        key = self.__stream.take(step)
        last, self.__last = self.__last, step
        if self.__kept is None:
            return StepNoise(key)
        if last is not None and step != last + 1:
            raise RuntimeError(f"step {step} of a chain of correlated noise follows step {last}")
        row, self.__row = self.__row, self.__row + 1
        return StepNoise(key, row, self.__kept)
