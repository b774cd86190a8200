"""How `ghost` finds the norms that it clips by: exactly, or by `randomized_norm`."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from torchtitan_dp.gradients.ghost_norm import Factors, is_cheaper, squared_norms


class NormFinder(Protocol):
    """A finder of squared norms of matrices' gradients from their factors: exact, or estimated by
    `randomized_norm`."""

    def cap(self, name: str) -> float:
        """Return how large a parameter's added gradient may be, relative to its found norm."""

    def start_step(self, key: bytes) -> None:
        """Set the key of a step's randomness."""

    def start_microbatch(self, positions: Sequence[int] | None) -> None:
        """Set the units of the coming microbatch, by positions if they are known."""

    def is_cheaper(self, tokens: int, shape: torch.Size) -> bool:
        """Return whether to find a norm from factors, for `tokens` tokens of a whole sample."""

    def squared_norms(
        self, name: str, shape: torch.Size, factors: Sequence[Factors]
    ) -> torch.Tensor:
        """Find squared norms: fp64 (B,), this rank's part of the sum over cp."""


class ExactNorms:
    """Ghost norms."""

    def __init__(self, cp: dist.ProcessGroup | None) -> None:
        self._cp = cp

    def cap(self, name: str) -> float:
        return 1.0

    def start_step(self, key: bytes) -> None:
        """Nothing is random."""

    def start_microbatch(self, positions: Sequence[int] | None) -> None:
        """Nothing depends on whose samples these are."""

    def is_cheaper(self, tokens: int, shape: torch.Size) -> bool:
        return is_cheaper(tokens, shape)

    def squared_norms(
        self, name: str, shape: torch.Size, factors: Sequence[Factors]
    ) -> torch.Tensor:
        return squared_norms(factors, self._cp)
