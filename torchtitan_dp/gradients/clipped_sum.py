"""Where every gradient method ends: norms over cp, clip, one sum; over dp once a step.

Gradients arrive in bundles, flat tensors of parameters that are reduced together: an FSDP2 group
(`microbatch`) or one parameter (`grad_sample`). Bundles decide how gradients are communicated, clip
groups (`privacy.clipping`) how they are clipped. A method that has all gradients at once calls
`add`; one that completes a group early `add_group`, which frees them; one with norms from elsewhere
`policy.clip`, then `accumulate` or `add_part`.

Guarantee:
    - `take` returns this rank's shard of sum_i clip(g_i) over the samples of all data-parallel
      ranks since `reset`, each counting at most C if norms are exact; for estimates see
      `privacy.losses`. Assumes that each row passed to `add` is one sample's gradient, summed over
      the context-parallel group, whose ranks together hold every element exactly once.
    - The sum is in fp32: a sample also changes how later ones round
      (`privacy.clipping.fp32_sum_excess`).
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.base.collectives import reduce_scatter_sum
from torchtitan_dp.gradients.fsdp import ReductionGroups, RowLayout
from torchtitan_dp.gradients.labels import label
from torchtitan_dp.privacy.clipping import Clip, ClipPolicy, add_clipped_, squared_norm


class Place(NamedTuple):
    """The place of a parameter's local shard: its bundle, and its range in that flat chunk."""

    bundle: int
    offset: int
    numel: int


class ClippedSum:
    """The clipped sum of one step, in flat `(dp_shard, chunk)` shards."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], groups: ReductionGroups, policy: ClipPolicy
    ) -> None:
        """Take every trainable parameter, a DTensor sharded on dim 0, by canonical name."""
        self.parameters = parameters
        self.groups = groups
        self.policy = policy
        assert sorted(sum(policy.members, ())) == sorted(parameters)
        self._whole = torch.empty(0)
        self._bundles: tuple[Tensor, ...] = ()  # views of `_whole`
        self._places: dict[str, Place] = {}
        self.accumulating = False

    @property
    def is_laid_out(self) -> bool:
        return bool(self._places)

    def lay_out(self, sizes: Sequence[int], places: dict[str, Place], device: torch.device) -> None:
        """Fix the layout of bundles, once: the elements in each bundle's chunk, in the order of the
        bundles passed to `add`, and each parameter's place. FSDP2's padding (`RowLayout`) is
        zeros."""
        assert not self._places
        assert places.keys() == self.parameters.keys(), places.keys() ^ self.parameters.keys()
        shape = (self.groups.dp_shard_size, sum(sizes))
        with label("accumulator"):
            self._whole = torch.zeros(shape, dtype=torch.float32, device=device)
        self._bundles = self._whole.split(list(sizes), dim=1)
        self._places = places

    def lay_out_parameters(self) -> dict[str, RowLayout]:
        """Fix one bundle for each parameter, in order; return row layouts by name."""
        dp_shard, cp = self.groups.dp_shard_size, self.groups.cp_size
        layouts = {n: RowLayout(p.shape, dp_shard, cp) for n, p in self.parameters.items()}
        places = {
            name: Place(bundle, 0, parameter.to_local().numel())  # type: ignore[attr-defined]
            for bundle, (name, parameter) in enumerate(self.parameters.items())
        }
        device = next(iter(self.parameters.values())).device
        self.lay_out([layout.chunk_numel for layout in layouts.values()], places, device)
        return layouts

    def part(self, shards: list[Tensor], name: str) -> Tensor:
        """View one parameter's part of `shards`, `(B, dp_shard, n)`, padding zeros included."""
        shape = self.parameters[name].shape
        layout = RowLayout(shape, self.groups.dp_shard_size, self.groups.cp_size)
        place = self._places[name]
        return shards[place.bundle].narrow(-1, place.offset, layout.chunk_numel)

    def add(self, shards: list[Tensor], valid_B: Tensor) -> Clip:
        """Clip B samples, each group by the norm of its part of the gradient, and add them.

        Args:
            shards: fp32 `(B, dp_shard, chunk)` per bundle: this cp rank's part of each sample's
                gradient, for every dp_shard rank. Freed one by one.
            valid_B: bool, on the device; False for padding, which then contributes exactly 0.

        Collectives: one all-reduce of G B numbers over cp, for G groups.
        """
        with label("per_sample_shards", shards):
            clipped = self.policy.clip(self.squared_norms(shards), valid_B)
            self.accumulate(shards, clipped)
            return clipped.over_groups()

    def add_group(self, group: int, parts: dict[str, Tensor], valid_B: Tensor) -> Clip:
        """Clip and add one clip group, an index of `policy.members`, of B samples' gradients, as
        `add` does; (1, B). `parts` are fp32 `(B, dp_shard, n)` by parameter, in the layout of
        `part`, freed one by one.

        Collectives: one all-reduce of B numbers over cp.
        """
        names = self.policy.members[group]
        assert sorted(parts) == sorted(names), (sorted(parts), names)
        squares = [squared_norm(parts[name].flatten(1)) for name in names]
        squares_1B = self._over_cp(torch.stack(squares).sum(0, keepdim=True))
        clipped = self.policy.clip(squares_1B, valid_B, group)
        for name in names:
            self.add_part(name, parts.pop(name), clipped.factor_B[0], clipped.rejected_B[0])
        return clipped

    def squared_norms(self, shards: list[Tensor]) -> Tensor:
        """Compute squared norms by group, fp64 `(G, B)`, equal on cp: one all-reduce over cp."""
        assert len(shards) == len(self._bundles), (len(shards), len(self._bundles))
        if self.policy.is_flat:
            squares_GB = torch.stack([squared_norm(s.flatten(1)) for s in shards]).sum(0)[None]
        else:
            squares_GB = self.by_group(
                {name: squared_norm(self.part(shards, name)).sum(1) for name in self.parameters}
            )
        return self._over_cp(squares_GB)

    def by_group(self, squares: dict[str, Tensor]) -> Tensor:
        """Sum squared norms within each clip group: {name: (B,)} -> (G, B)."""
        members = self.policy.members
        of_groups = (torch.stack([squares[name] for name in names]) for names in members)
        return torch.stack([squares_NB.sum(0) for squares_NB in of_groups])

    def _over_cp(self, squares: Tensor) -> Tensor:
        if self.groups.cp is not None:
            dist.all_reduce(squares, group=self.groups.cp)
        return squares

    def accumulate(self, shards: list[Tensor], clipped: Clip) -> None:
        """Add samples, in the layout that `add` takes, freed one by one, to the sum, scaled by a
        clip result of shape (G, B), which comes from norms at least as large as those of these very
        shards: they are not measured again."""
        assert len(shards) == len(self._bundles), (len(shards), len(self._bundles))
        if not self.policy.is_flat:
            for names, factor_B, rejected_B in zip(
                self.policy.members, clipped.factor_B, clipped.rejected_B, strict=True
            ):
                for name in names:
                    self.add_part(name, self.part(shards, name), factor_B, rejected_B)
            shards.clear()
            return
        (factor_B,), (rejected_B,) = clipped.factor_B, clipped.rejected_B
        self.accumulating = True
        for bundle_DN in self._bundles:
            shard_BDN = shards.pop(0)
            assert shard_BDN.shape[1:] == bundle_DN.shape, "the set of used parameters changed"
            for sample, shard_DN in enumerate(shard_BDN):
                add_clipped_(bundle_DN, shard_DN, factor_B[sample], rejected_B[sample])

    def add_part(self, name: str, shard_BDN: Tensor, factor_B: Tensor, rejected_B: Tensor) -> None:
        """Add one parameter's part of B samples, fp32 `(B, dp_shard, n)`, in the layout of `part`,
        to the sum, by the factors of a `Clip`.

        The caller ensures that a sample's scaled parts in one clip group have a norm of at most the
        group's bound: they are not measured here.
        """
        self.accumulating = True
        total_DN = self.part(list(self._bundles), name)
        assert shard_BDN.shape[1:] == total_DN.shape, (name, shard_BDN.shape, total_DN.shape)
        with label("per_sample_shards"):
            for sample, shard_DN in enumerate(shard_BDN):
                add_clipped_(total_DN, shard_DN, factor_B[sample], rejected_B[sample])

    def take(self) -> dict[str, Tensor]:
        """Sum over all data-parallel ranks, and return this rank's flat local shards by name.

        They are fp32, may be changed in place, and are valid until `reset`. Zeros if nothing was
        accumulated (then on all ranks).

        Collectives: a reduce-scatter over dp_shard, and an all-reduce over dp_replicate.
        """
        if not self._places:
            return {
                name: torch.zeros_like(p.to_local(), dtype=torch.float32).view(-1)  # type: ignore[attr-defined]
                for name, p in self.parameters.items()
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


class GradientMethod:
    """The way from per-sample losses to a `ClippedSum`."""

    batch_size: ClassVar[int | None] = None
    """The number of samples that one `accumulate_clipped` takes; None for any number."""

    clipped_sum: ClippedSum

    def start_step(self, key: bytes) -> None:
        """Set the key, 32 bytes, of a step's random norms, the same on all ranks: here unused."""

    def hold(self, loss_B: Tensor) -> None:
        """Backpropagate an earlier window of the units that the next `accumulate_clipped` clips,
        where the method `averages_windows`."""
        raise AssertionError("refused with the configuration: data.windows_per_draw")

    def accumulate_clipped(
        self, loss_B: Tensor, valid_B: Tensor, positions: Sequence[int] | None = None
    ) -> Clip:
        """Backpropagate the losses, clip each sample's gradient, and add it.

        Args:
            loss_B: this rank's parts of the samples' losses; summed over cp they are the losses.
            valid_B: bool: False for a padding sample, which contributes exactly 0.
            positions: index of each sample's unit in the training population, -1 for padding; no
                duplicates within a step. Random norms need it.

        Returns:
            Per-sample clip result, fields of shape (B,).
        """
        raise NotImplementedError
