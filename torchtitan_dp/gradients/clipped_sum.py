"""Where every gradient method ends: norms over cp, clip, one sum; over dp once a step.

Guarantee:
    `take` returns this rank's shard of sum_i clip(g_i) over the samples of all data-parallel ranks
    since `reset`, each counting at most C (see `privacy.clipping`). Assumes that the shards passed
    to `add` are those of one sample each, summed over the context-parallel group, and that the cp
    ranks together hold every element of a gradient exactly once. How samples are added up is the
    `Summation`'s: in fixed point a sample moves the sum by at most C, exactly; in fp32 it also
    changes how later samples round, which moves the sum of n samples on a rank by up to n^2 / 2^24
    of C more (`privacy.summation.fp32_sum_excess`): more than C itself from 4,096 samples on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan_dp.gradients.reduction import ReductionGroups, reduce_scatter_sum
from torchtitan_dp.privacy.clipping import Clip, ClipFunction, clip, squared_norm
from torchtitan_dp.privacy.summation import FP32_SUM, Summation


class Place(NamedTuple):
    """Where a parameter's local shard lies: in which piece, and there in the flat chunk."""

    piece: int
    offset: int
    numel: int


class ClippedSum:
    """The clipped sum of one step, on flat `(dp_shard, chunk)` shards."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        groups: ReductionGroups,
        *,
        max_grad_norm: float,
        clip_function: ClipFunction = "vanilla",
        summation: Summation = FP32_SUM,
    ) -> None:
        """
        Args:
            parameters: every trainable parameter, a DTensor sharded on dim 0, by canonical name.
            groups: the mesh's process groups.
            max_grad_norm: C.
            summation: what samples are added up in; the optimizer must have the same.
        """
        self.parameters = parameters
        self.groups = groups
        self._max_grad_norm = max_grad_norm
        self._clip_function = clip_function
        self._summation = summation
        self._whole = torch.empty(0)
        self._pieces: tuple[torch.Tensor, ...] = ()  # views of `_whole`
        self._places: dict[str, Place] = {}
        self.accumulating = False

    @property
    def is_laid_out(self) -> bool:
        return bool(self._places)

    def lay_out(self, sizes: Sequence[int], places: dict[str, Place], device: torch.device) -> None:
        """Fix the pieces that `add` will be given, once: their chunks' sizes, and what is where.

        A piece is whatever the method reduces together: an FSDP2 group, or one parameter.
        """
        assert not self._places
        assert places.keys() == self.parameters.keys(), places.keys() ^ self.parameters.keys()
        shape = (self.groups.dp_shard_size, sum(sizes))
        self._whole = torch.zeros(shape, dtype=self._summation.dtype, device=device)
        self._pieces = self._whole.split(list(sizes), dim=1)
        self._places = places

    def add(self, shards: list[torch.Tensor], valid_B: torch.Tensor) -> Clip:
        """Clip B samples, each by the norm of its whole gradient, and add them.

        Args:
            shards: fp32 `(B, dp_shard, chunk)` per piece: for every dp_shard rank, the part of
                each sample's gradient that belongs to this cp rank. Overwritten, and freed.
            valid_B: bool, on the device; False for padding, which then contributes exactly 0.

        Collectives: one all-reduce of B numbers over cp.
        """
        assert len(shards) == len(self._pieces), (len(shards), len(self._pieces))
        self.accumulating = True
        squared_norm_B = torch.stack([squared_norm(s.flatten(1)) for s in shards]).sum(0)
        if self.groups.cp is not None:
            dist.all_reduce(squared_norm_B, group=self.groups.cp)
        clipped = clip(
            squared_norm_B,
            valid_B,
            max_grad_norm=self._max_grad_norm,
            clip_function=self._clip_function,
        )
        for piece_DN in self._pieces:
            shard_BDN = shards.pop(0)
            assert shard_BDN.shape[1:] == piece_DN.shape, "the set of used parameters changed"
            for sample, shard_DN in enumerate(shard_BDN):
                self._summation.add_clipped_(
                    piece_DN, shard_DN, clipped.factor_B[sample], clipped.rejected_B[sample]
                )
        return clipped

    def take(self) -> dict[str, torch.Tensor]:
        """The clipped sum over all data-parallel ranks: flat local shards, by name.

        They are of the summation's dtype, for its `add_noise_`, and valid until `reset`; they may
        be changed in place. Zeros if nothing was accumulated, which holds on all ranks or on none.

        Collectives: a reduce-scatter over dp_shard, and an all-reduce over dp_replicate.
        """
        if not self._places:
            return {
                name: torch.zeros(
                    parameter.to_local().numel(),  # type: ignore[attr-defined]
                    dtype=self._summation.dtype,
                    device=parameter.device,
                )
                for name, parameter in self.parameters.items()
            }
        chunk_N = self._whole[0]
        if self.groups.dp_shard is not None:
            chunk_N = torch.empty_like(chunk_N)
            reduce_scatter_sum(chunk_N, self._whole, self.groups.dp_shard)
        if self.groups.dp_replicate is not None:
            dist.all_reduce(chunk_N, group=self.groups.dp_replicate)
        chunks = chunk_N.split([piece.shape[1] for piece in self._pieces])
        return {
            name: chunks[place.piece].narrow(0, place.offset, place.numel)
            for name, place in self._places.items()
        }

    def reset(self) -> None:
        """Start the next step's sum at zero."""
        self._whole.zero_()
        self.accumulating = False
