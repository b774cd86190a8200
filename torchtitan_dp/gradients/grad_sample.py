"""Per-sample gradients for microbatches of several samples: LongShield's V1, V2 and, with AC, V3.

Each layer's backward forms its samples' gradients from this rank's tokens (`layers`). V2
reduce-scatters them over the context-parallel group while backward continues and keeps `1 / cp` on
each rank. V1, the paper's baseline, keeps them whole and sums them after backward. With V2, a clip
group is added, and freed, within backward.

Guarantee:
    What is added to the `ClippedSum` for sample b is the gradient of loss b over the whole
    context-parallel group. Gradients of different samples are never added before they are clipped.
    Assumes that loss b depends on sample b alone, that each rank of a cp group has the same
    samples, and what `layers` assumes.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.base.collectives import Pending
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import sum_all_over_cp
from torchtitan_dp.gradients.labels import label
from torchtitan_dp.gradients.layers import Formed, LayerGradients, layers_of_each_parameter
from torchtitan_dp.gradients.operands import Write, add_to, scale_
from torchtitan_dp.privacy.clipping import Clip


class GradSampleGradients(LayerGradients):
    """Per-sample gradients of one microbatch at a time."""

    def __init__(
        self, model: nn.Module, clipped_sum: ClippedSum, *, shard_grad_samples: bool
    ) -> None:
        """Use V2 if `shard_grad_samples`, else V1."""
        super().__init__(model, clipped_sum)
        self._shard = shard_grad_samples
        # (B, dp_shard, rows, …), summed over cp, of each parameter: of its newest layer, with that
        # one's factor, and before it the sum of its other layers (a tied weight has several).
        self._shards: dict[str, list[tuple[Pending, Tensor | None]]] = {}
        self._wholes: dict[str, Tensor] = {}  # (cp, B, dp_shard, rows, …), not yet summed
        self._in_flight: deque[Pending] = deque()  # one entry for each sum over cp that was begun
        # A clip group is added within backward when all of its layers have formed gradients. One
        # with a vector is added at the end, since vectors wait for each other.
        self._adds_early = shard_grad_samples and not clipped_sum.policy.is_flat
        self._group, layers = clipped_sum.policy.group_of(), layers_of_each_parameter(model)
        self._layers = [sum(layers[n] for n in names) for names in clipped_sum.policy.members]
        self._start(torch.empty(0))

    def _start(self, valid_B: Tensor) -> None:
        self._valid_B = valid_B
        self._left = [*self._layers]  # of each clip group, those without gradients so far
        self._complete: int | None = None  # the group whose last layer's sum has just begun
        self._added: set[int] = set()
        self._clips: list[Clip] = []  # of the groups in `_added`

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
        self._start(valid_B)
        loss_B.sum().backward()
        self._require_no_sum()
        self._in_flight.clear()  # `_shards` waits for those that run
        summed = (sum_all_over_cp if self._shard else _sum_each_over_cp)(self._wholes, self._cp)
        self._wholes.clear()
        for name in list(summed):  # no name here keeps one: they are freed as they are added
            self._add_shard(name, Pending(summed.pop(name)), None)
        added = {name for name in self._layouts if self._group[name] in self._added}
        unused = self._layouts.keys() - self._shards.keys() - added
        assert not unused, f"trainable but had no gradient: {sorted(unused)}"
        if not self._adds_early:
            return self.clipped_sum.add([*map(self._take, self._layouts)], valid_B)
        for group in range(len(self._layers)):
            if group not in self._added:
                self._add_group(group)
        return Clip(*map(torch.cat, zip(*self._clips, strict=True))).over_groups()

    def form_grad_samples(self, name: str, batch_size: int, write: Write) -> None:
        """Write a layer's per-sample gradients within backward, and start their sum over cp."""
        self.add(name, self.form(name, batch_size, write))

    def form(self, name: str, batch_size: int, write: Write) -> Formed:
        """Write a layer's per-sample gradients and start their sum over cp, without adding them.
        Matrices are reduced at once, while the next is written: two at a time are held whole.
        Vectors wait for each other."""
        layout = self._layouts[name]
        with label("per_sample_shards"):
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
                with label("communication"):
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
            scale_(formed.whole, factor_B)
            add_to(self._wholes, name, formed.whole)
            return
        assert formed.shard is not None
        self._add_shard(name, formed.shard, factor_B)
        if not self._adds_early:
            return
        before, group = self._complete, self._group[name]
        self._left[group] -= 1
        self._complete = None if self._left[group] else group
        if before is not None:
            self._add_group(before)

    def _add_group(self, group: int) -> None:
        """Clip and add a group with all its gradients; other layers' sums keep running."""
        parts = {name: self._take(name) for name in self.clipped_sum.policy.members[group]}
        self._clips.append(self.clipped_sum.add_group(group, parts, self._valid_B))
        self._added.add(group)

    def _add_shard(self, name: str, shard: Pending, factor_B: Tensor | None) -> None:
        """Add another layer's gradients, times `factor_B`, without waiting for them."""
        before = [(Pending(self._take(name)), None)] if name in self._shards else []
        self._shards[name] = [*before, (shard, factor_B)]

    def _take(self, name: str) -> Tensor:
        """Wait for the gradients of a parameter, and return their sum, (B, dp_shard, values)."""
        total = None
        for pending, factor_B in self._shards.pop(name):
            shard_BDN = pending.wait().flatten(2)
            if factor_B is not None:
                shard_BDN.mul_(factor_B[:, None, None])
            total = shard_BDN if total is None else total.add_(shard_BDN)
        assert total is not None
        return total


def _sum_each_over_cp(wholes: dict[str, Tensor], cp: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum whole gradients over cp, an all-reduce per parameter, and keep this rank's part."""
    if cp is None:
        return {name: whole[0] for name, whole in wholes.items()}
    for whole in wholes.values():
        dist.all_reduce(whole, group=cp)
    return {name: whole[dist.get_rank(cp)] for name, whole in wholes.items()}
