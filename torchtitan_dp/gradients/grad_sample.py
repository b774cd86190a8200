"""Per-sample gradients for microbatches of several samples: LongShield's V1, V2 and, with AC, V3.

Each layer's backward forms its samples' gradients from this rank's tokens (`layers`). V2 (section
3.2, input-stationary) reduce-scatters them over the context-parallel group while backward continues
and keeps `1 / cp` on each rank (section 3.1). V1, the paper's baseline, keeps them whole and sums
them after backward. With V2, a clip group is added, and freed, within backward.

Guarantee:
    What is added to the `ClippedSum` for sample b is the gradient of loss b over the whole
    context-parallel group. Gradients of different samples are never added before they are clipped.
    Assumes that loss b depends on sample b alone, that each rank of a cp group has the same
    samples, and what `layers` assumes.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.collectives import Pending
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import sum_together_over_cp
from torchtitan_dp.gradients.layers import Formed, LayerGradients, layers_of_each_parameter
from torchtitan_dp.gradients.operands import TRANSIENT_BYTES, Write, add_to
from torchtitan_dp.privacy.clipping import Clip


class GradSampleGradients(LayerGradients):
    """Per-sample gradients of one microbatch at a time."""

    makes_gradients: ClassVar[tuple[str, ...]] = ("form", "add")

    def __init__(
        self,
        model: nn.Module,
        clipped_sum: ClippedSum,
        *,
        shard_grad_samples: bool = True,
        transient_bytes: int = TRANSIENT_BYTES,
    ) -> None:
        """Use V2 if `shard_grad_samples`, else V1; other arguments are those of
        `LayerGradients`."""
        super().__init__(model, clipped_sum, transient_bytes)
        self._shard = shard_grad_samples
        self._shards: dict[str, _Layers] = {}  # (B, dp_shard, rows, …), summed over cp
        self._wholes: dict[str, Tensor] = {}  # (cp, B, dp_shard, rows, …), not yet summed
        self._in_flight: deque[Pending] = deque()  # one entry for each sum over cp that was begun
        early = shard_grad_samples and not clipped_sum.policy.is_flat
        self._early = _CompleteGroups(model, clipped_sum) if early else None
        self._valid_B = torch.empty(0)  # of this microbatch
        self._clips: list[Clip] = []  # of groups that were added within backward

    def accumulate_clipped(
        self, loss_B: Tensor, valid_B: Tensor, positions: Sequence[int] | None = None
    ) -> Clip:
        """Add a microbatch (`clipped_sum.GradientMethod`).

        Collectives, over cp: a reduce-scatter per layer within backward, one more after it (V2),
        or an all-reduce per parameter after it (V1); then an all-reduce of B numbers for each clip
        group, with V2 some of them within backward.
        """
        assert not self._shards
        assert not self._wholes
        self._valid_B = valid_B
        loss_B.sum().backward()
        self._require_no_sum()
        self._sum_over_cp()
        if self._early is None:
            shards = [self._shards.pop(name).take().flatten(2) for name in self._layouts]
            return self.clipped_sum.add(shards, valid_B)
        for group in self._early.finish():
            self._add_group(group)
        clips, self._clips = self._clips, []
        return Clip(*map(torch.cat, zip(*clips, strict=True))).over_groups()

    def form_grad_samples(self, name: str, batch_size: int, write: Write) -> None:
        """Write a layer's per-sample gradients within backward, and start their sum over cp."""
        self.add(name, self.form(name, batch_size, write))

    def form(self, name: str, batch_size: int, write: Write) -> Formed:
        """Write a layer's per-sample gradients and start their sum over cp, without adding them.

        Matrices are reduced at once, while the next is written: two at a time are held whole.
        Vectors (norm weights) are small: they wait for each other.
        """
        layout = self._layouts[name]
        if not self._shard or len(layout.shape) == 1:
            whole = layout.allocate(batch_size, self._device)
            write(layout, whole, slice(0, batch_size))
            return Formed(batch_size, None, whole)
        parts = self._slices_of(name, batch_size)
        if self._cp is None:
            whole = layout.allocate(batch_size, self._device)
            for samples in parts:
                write(layout, whole[:, samples], samples)
            return Formed(batch_size, Pending(whole[0]))
        shape = (batch_size, layout.dp_shard, layout.rows, *layout.shape[1:])
        shard = Pending(torch.empty(shape, dtype=torch.float32, device=self._device))
        for samples in parts:
            while len(self._in_flight) > 1:  # one runs on while the next part is written
                self._in_flight.popleft().wait_for_first()
            whole = layout.allocate(samples.stop - samples.start, self._device)
            write(layout, whole, samples)
            shard.reduce_scatter(samples, whole, self._cp)
            self._in_flight.append(shard)
        return Formed(batch_size, shard)

    def add(self, name: str, formed: Formed, factor_B: Tensor | None = None) -> None:
        """Add a layer's per-sample gradients, times fp32 factors if given, to the microbatch's."""
        same = formed.batch_size == len(self._valid_B)
        assert same, f"{name}: dim 0 of its layer's input is not the sample"
        if formed.whole is not None:
            if factor_B is not None:
                formed.whole.mul_(_along(factor_B, formed.whole, dim=1))
            add_to(self._wholes, name, formed.whole)
            return
        assert formed.shard is not None
        self._shards.setdefault(name, _Layers()).add(formed.shard, factor_B)
        if self._early is not None:
            for group in self._early.take(name):
                self._add_group(group)

    def _add_group(self, group: int) -> None:
        """Clip and add a group whose layers have all formed gradients; other layers' sums keep
        running."""
        names = self.clipped_sum.policy.members[group]
        parts = {name: self._shards.pop(name).take().flatten(2) for name in names}
        self._clips.append(self.clipped_sum.add_group(group, parts, self._valid_B))

    def storages(self) -> list[torch.UntypedStorage]:
        """List the memory of the per-sample gradients that this backward has formed so far."""
        shards = [storage for layers in self._shards.values() for storage in layers.storages()]
        return shards + [whole.untyped_storage() for whole in self._wholes.values()]

    def _sum_over_cp(self) -> None:
        """Sum the gradients in `_wholes` over cp: `_shards` then has all that are not added yet."""
        self._in_flight.clear()  # `_shards` waits for those that run
        summed = sum_together_over_cp if self._shard else _sum_each_over_cp
        for name, shard in summed(self._wholes, self._cp).items():
            self._shards.setdefault(name, _Layers()).add(Pending(shard), None)
        self._wholes.clear()
        added = self._early.added if self._early is not None else set()
        unused = self._layouts.keys() - self._shards.keys() - added
        assert not unused, f"trainable but had no gradient: {sorted(unused)}"


class _Layers:
    """The per-sample gradients of one parameter: the sum of its layers' (a tied weight has
    several), and the newest layer's, whose sum over cp may be running."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._newest: tuple[Pending, Tensor | None] | None = None

    def add(self, shard: Pending, factor_B: Tensor | None) -> None:
        """Add another layer's gradients, times `factor_B`, without waiting for them."""
        self._settle()
        self._newest = shard, factor_B

    def take(self) -> Tensor:
        """Wait for the newest layer's, and return the sum."""
        self._settle()
        assert self._sum is not None
        return self._sum

    def storages(self) -> list[torch.UntypedStorage]:
        """List the memory of both."""
        before = [] if self._sum is None else [self._sum.untyped_storage()]
        return before if self._newest is None else [*before, self._newest[0].storage]

    def _settle(self) -> None:
        if self._newest is None:
            return
        (pending, factor_B), self._newest = self._newest, None
        shard = pending.wait()
        if factor_B is not None:
            shard.mul_(_along(factor_B, shard, dim=0))
        self._sum = shard if self._sum is None else self._sum.add_(shard)


def _sum_each_over_cp(wholes: dict[str, Tensor], cp: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum whole gradients over cp, an all-reduce per parameter, and keep this rank's part."""
    if cp is None:
        return {name: whole[0] for name, whole in wholes.items()}
    for whole in wholes.values():
        dist.all_reduce(whole, group=cp)
    return {name: whole[dist.get_rank(cp)] for name, whole in wholes.items()}


class _CompleteGroups:
    """The clip groups that are complete while backward continues: all of their layers have formed
    gradients. One with a vector is complete at the end, since vectors wait for each other."""

    def __init__(self, model: nn.Module, clipped_sum: ClippedSum) -> None:
        self._members = clipped_sum.policy.members
        self._group = clipped_sum.policy.group_of()
        layers = layers_of_each_parameter(model)
        self._layers = [sum(layers[name] for name in names) for names in self._members]
        self._start()

    def _start(self) -> None:
        self._formed: Counter[int] = Counter()  # layers, by group
        self._complete: list[int] = []
        self._taken: list[int] = []

    @property
    def added(self) -> set[str]:
        """The parameters of groups that were taken."""
        return {name for group in self._taken for name in self._members[group]}

    def take(self, name: str) -> list[int]:
        """Count one more layer's gradients of `name`, and return the groups that were complete
        before: this layer's sum over cp has only just begun."""
        before, self._complete = self._complete, []
        group = self._group[name]
        self._formed[group] += 1
        if self._formed[group] == self._layers[group]:
            self._complete = [group]
        self._taken += before
        return before

    def finish(self) -> list[int]:
        """Return the groups that were not taken, and start again."""
        left = [group for group in range(len(self._members)) if group not in self._taken]
        self._start()
        return left


def _along(factor_B: Tensor, gradients: Tensor, dim: int) -> Tensor:
    """View `factor_B` so that it multiplies the samples, which are dimension `dim`."""
    shape = [1] * gradients.dim()
    shape[dim] = len(factor_B)
    return factor_B.view(shape)
