"""Per-sample gradients for microbatches of one sample: the gradient that FSDP2 reduces anyway.

With one sample in a microbatch, the gradient that FSDP2 reduce-scatters over the context-parallel
group is that sample's gradient, already sharded and overlapped with backward, without hooks.

Guarantee:
    The `ClippedSum` gets the gradient of one loss over the whole context-parallel group, or of the
    sum of one unit's losses: held gradients (`hold`) are added up before their sum is clipped,
    once, so that a unit with K windows counts at most C (hazard row 57). Gradients of different
    units are never added before clipping. Assumes that each loss passed to `accumulate_clipped`,
    and those held before it, are of one unit, the same on all ranks of a cp group.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod, Place
from torchtitan_dp.gradients.fsdp import ReduceScatterOverCP
from torchtitan_dp.privacy.clipping import Clip


class MicrobatchGradients(GradientMethod):
    """FSDP2's reduced gradients of one sample at a time, in a bundle for each FSDP2 group."""

    batch_size = 1

    def __init__(self, fsdp_modules: list[FSDPModule], clipped_sum: ClippedSum) -> None:
        """Take one module of each FSDP2 group that has a trainable parameter."""
        self.clipped_sum = clipped_sum
        self._reductions = [ReduceScatterOverCP(clipped_sum.groups) for _ in fsdp_modules]
        for module, reduction in zip(fsdp_modules, self._reductions, strict=True):
            module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
        self._held: list[Tensor] = []  # sums over a unit's earlier windows, laid out as `shards`

    def hold(self, loss_B: Tensor) -> None:
        """Backpropagate the loss, shape (1,), of one of a unit's windows, and keep its unclipped
        gradient shard, which the next call adds to its own.

        Collectives: reduce-scatter over cp, each FSDP2 group, within backward.
        """
        self._held = self._backward(loss_B)

    def accumulate_clipped(
        self, loss_B: Tensor, valid_B: Tensor, positions: Sequence[int] | None = None
    ) -> Clip:
        """Add one sample (`clipped_sum.GradientMethod`): `loss_B` and `valid_B` have shape (1,).

        Collectives: reduce-scatter over cp, each FSDP2 group, within backward; then an all-reduce
        of one number over cp.
        """
        return self.clipped_sum.add(self._backward(loss_B), valid_B)

    def _backward(self, loss_B: Tensor) -> list[Tensor]:
        """Backpropagate and return reduced gradients, fp32 `(1, dp_shard, chunk)` per bundle, with
        the held ones added, which are then released."""
        assert loss_B.shape == (1,), "samples would be merged before they are clipped"
        loss_B.sum().backward()
        taken = [reduction.take() for reduction in self._reductions]
        shards = [shard_DN[None] for _, shard_DN in taken]
        gradients: dict[str, Any] = {}
        for name, parameter in self.clipped_sum.parameters.items():
            assert parameter.grad is not None, f"{name} is trainable but had no gradient"
            gradients[name], parameter.grad = parameter.grad, None
        if not self.clipped_sum.is_laid_out:  # known once FSDP2 has reduced for the first time
            storages = [output.untyped_storage().data_ptr() for output, _ in taken]
            places = {}
            for name, gradient in gradients.items():  # a view of FSDP2's output
                local = gradient.to_local()
                bundle = storages.index(local.untyped_storage().data_ptr())
                places[name] = Place(bundle, int(local.storage_offset()), local.numel())
            sizes = [shard_1DN.shape[-1] for shard_1DN in shards]
            self.clipped_sum.lay_out(sizes, places, shards[0].device)
        held, self._held = self._held, []
        for earlier, shard_1DN in zip(held, shards, strict=bool(held)):  # none with one window
            shard_1DN.add_(earlier)
        return shards
