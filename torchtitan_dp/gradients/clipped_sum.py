"""Where every gradient method ends: norms over cp, clip, one sum; over dp once a step.

Guarantee:
    `take` returns this rank's shard of sum_i clip(g_i) over the samples of all data-parallel ranks
    since `reset`, each counting at most C (see `privacy.clipping`). Assumes that the shards passed
    to `add` are those of one sample each, summed over the context-parallel group, and that the cp
    ranks together hold every element of a gradient exactly once. How samples are added up is the
    `Summation`'s: in fixed point a sample moves the sum by at most C, exactly; in fp32 it also
    changes how later samples round, which moves the sum of n samples on a rank by up to n^2 / 2^24
    of C more (`privacy.summation.fp32_sum_excess`): more than C itself from 4,096 samples on.

Gradients arrive in bundles: a bundle is one flat tensor of what a method reduces together, which is
all parameters of an FSDP2 group (`microbatch`) or one parameter alone (`grad_sample`). It says how
gradients travel, and nothing about how they are clipped: whoever wants the norm of a layer asks
`part` for its parameters, which gives the same values whatever the bundles are.

A method whose gradients are all materialised at once calls `add`. One that knows the norms by other
means, or clips several parts of a gradient by norms of their own, calls the three steps that `add`
is made of: `squared_norms`, `clip` and `accumulate`, or `accumulate_part` for each parameter, so
that one parameter's gradients exist at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan_dp.gradients.reduction import ReductionGroups, reduce_scatter_sum
from torchtitan_dp.gradients.rows import RowLayout
from torchtitan_dp.privacy.clipping import Clip, ClipFunction, clip, squared_norm
from torchtitan_dp.privacy.summation import FP32_SUM, Summation


class Place(NamedTuple):
    """Tells where a parameter's local shard lies: in which bundle, and there in the flat chunk."""

    bundle: int
    offset: int
    numel: int


class ClippedSum:
    """Keeps the clipped sum of one step, on flat `(dp_shard, chunk)` shards."""

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
        self.max_grad_norm = max_grad_norm
        self._clip_function = clip_function
        self._summation = summation
        self._whole = torch.empty(0)
        self._bundles: tuple[torch.Tensor, ...] = ()  # views of `_whole`
        self._places: dict[str, Place] = {}
        self.accumulating = False

    @property
    def is_laid_out(self) -> bool:
        return bool(self._places)

    def lay_out(self, sizes: Sequence[int], places: dict[str, Place], device: torch.device) -> None:
        """Fix the bundles that samples arrive in, once.

        Args:
            sizes: of each bundle's chunk, in the order in which `add` is given the bundles.
            places: where each parameter lies in them. Its rows there are padded as FSDP2 pads them
                (`rows.RowLayout`), with zeros.
        """
        assert not self._places
        assert places.keys() == self.parameters.keys(), places.keys() ^ self.parameters.keys()
        shape = (self.groups.dp_shard_size, sum(sizes))
        self._whole = torch.zeros(shape, dtype=self._summation.dtype, device=device)
        self._bundles = self._whole.split(list(sizes), dim=1)
        self._places = places

    def part(self, shards: list[torch.Tensor], name: str) -> torch.Tensor:
        """View what `shards` hold of one parameter: `(B, dp_shard, n)`.

        The n values of each dp_shard rank include the zeros that pad uneven rows, so that parts are
        of one shape, and together they are all of `shards`.
        """
        shape = self.parameters[name].shape
        layout = RowLayout(shape, self.groups.dp_shard_size, self.groups.cp_size)
        place = self._places[name]
        return shards[place.bundle].narrow(-1, place.offset, layout.chunk_numel)

    def add(self, shards: list[torch.Tensor], valid_B: torch.Tensor) -> Clip:
        """Clip B samples, each by the norm of its whole gradient, and add them.

        Args:
            shards: fp32 `(B, dp_shard, chunk)` per bundle: for every dp_shard rank, the part of
                each sample's gradient that belongs to this cp rank. Freed one by one.
            valid_B: bool, on the device; False for padding, which then contributes exactly 0.

        Collectives: one all-reduce of B numbers over cp.
        """
        clipped = self.clip(self.squared_norms(shards), valid_B)
        self.accumulate(shards, clipped)
        return clipped

    def squared_norms(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Square the norm of each sample's whole gradient: fp64 `(B,)`, the same on all cp ranks.

        Args:
            shards: as of `add`; they are read only.

        Collectives: one all-reduce of B numbers over cp.
        """
        assert len(shards) == len(self._bundles), (len(shards), len(self._bundles))
        squared_norm_B = torch.stack([squared_norm(s.flatten(1)) for s in shards]).sum(0)
        if self.groups.cp is not None:
            dist.all_reduce(squared_norm_B, group=self.groups.cp)
        return squared_norm_B

    def clip(self, squared_norm_B: torch.Tensor, valid_B: torch.Tensor) -> Clip:
        """Decide how each sample enters the sum, so that it counts at most C.

        Args:
            squared_norm_B: fp64, of the whole gradients, alike on all cp ranks.
            valid_B: as of `add`.
        """
        return clip(
            squared_norm_B,
            valid_B,
            max_grad_norm=self.max_grad_norm,
            clip_function=self._clip_function,
        )

    def accumulate(self, shards: list[torch.Tensor], clipped: Clip) -> None:
        """Add samples to the sum as `clipped` says.

        It must be of norms that are at least those of these very shards: nothing here measures
        them again.

        Args:
            shards: as of `add`; freed one by one.
        """
        assert len(shards) == len(self._bundles), (len(shards), len(self._bundles))
        self.accumulating = True
        for bundle_DN in self._bundles:
            shard_BDN = shards.pop(0)
            assert shard_BDN.shape[1:] == bundle_DN.shape, "the set of used parameters changed"
            for sample, shard_DN in enumerate(shard_BDN):
                self._summation.add_clipped_(
                    bundle_DN, shard_DN, clipped.factor_B[sample], clipped.rejected_B[sample]
                )

    def accumulate_part(
        self, name: str, shard_BDN: torch.Tensor, factor_B: torch.Tensor, rejected_B: torch.Tensor
    ) -> None:
        """Add one parameter's part of B samples to the sum.

        Over the parts of a sample, what is added must have a norm of at most C: nothing here
        measures it.

        Args:
            shard_BDN: fp32 `(B, dp_shard, n)`, as of `part`; kept.
            factor_B: fp32: what each sample's part is multiplied by.
            rejected_B: bool: adds exactly 0.
        """
        self.accumulating = True
        total_DN = self.part(list(self._bundles), name)
        assert shard_BDN.shape[1:] == total_DN.shape, (name, shard_BDN.shape, total_DN.shape)
        for sample, shard_DN in enumerate(shard_BDN):
            self._summation.add_clipped_(total_DN, shard_DN, factor_B[sample], rejected_B[sample])

    def take(self) -> dict[str, torch.Tensor]:
        """Sum over all data-parallel ranks, and return this rank's flat local shards by name.

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
        chunks = chunk_N.split([bundle.shape[1] for bundle in self._bundles])
        return {
            name: chunks[place.bundle].narrow(0, place.offset, place.numel)
            for name, place in self._places.items()
        }

    def reset(self) -> None:
        """Start the next step's sum at zero."""
        self._whole.zero_()
        self.accumulating = False
