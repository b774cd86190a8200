"""Per-sample gradients for microbatches of one sample: the gradient FSDP2 reduces anyway.

With one sample in a microbatch, the gradient that FSDP2 reduce-scatters over the context-parallel
group is that sample's gradient, already sharded and overlapped with backward (LongShield's
section 3.1 at MBS 1). No hooks, no einsum; activation checkpointing and `torch.compile` are
untouched. What is left: one all-reduce of a squared norm and one scaled add.

Guarantee:
    `take_sum` returns this rank's shard of sum_i clip(g_i), g_i the gradient of the i-th loss over
    the whole context-parallel group, each counting at most C (see `privacy.clipping`). Gradients
    of different samples are never added before they are clipped. Assumes that each loss passed to
    `accumulate_clipped` is of one sample, and the same sample on all ranks of a cp group.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_dp.gradients.reduction import (
    ReduceScatterOverCP,
    ReductionGroups,
    reduce_scatter_sum,
)
from torchtitan_dp.privacy.clipping import Clip, ClipFunction, add_clipped_, clip, squared_norm


class _Place(NamedTuple):
    """Where a parameter's local shard lies in its FSDP2 group's flat chunk."""

    group: int
    offset: int
    numel: int


class MicrobatchGradients:
    """Accumulates the clipped sum of one step, in fp32, on (dp_shard, chunk) shards per group."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        fsdp_modules: list[FSDPModule],
        groups: ReductionGroups,
        *,
        max_grad_norm: float,
        clip_function: ClipFunction = "vanilla",
    ) -> None:
        """
        Args:
            parameters: every trainable parameter, a DTensor sharded on dim 0, by canonical name.
            fsdp_modules: one module of each FSDP2 group that holds any of them.
            groups: the mesh's process groups.
            max_grad_norm: C.
        """
        self._parameters = parameters
        self._groups = groups
        self._max_grad_norm = max_grad_norm
        self._clip_function = clip_function
        self._reductions = [ReduceScatterOverCP(groups) for _ in fsdp_modules]
        for module, reduction in zip(fsdp_modules, self._reductions, strict=True):
            module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
        # Known once FSDP2 has reduced for the first time.
        self._places: dict[str, _Place] = {}
        self._accumulators: list[torch.Tensor] = []
        self.accumulating = False

    def accumulate_clipped(self, loss: torch.Tensor, valid: torch.Tensor) -> Clip:
        """Backpropagate one sample's loss and add its clipped gradient to the sum.

        Args:
            loss: shape (): this rank's part of the sample's loss; summed over cp it is the loss.
            valid: bool, shape (): False for a padding sample, which then contributes exactly 0.

        Collectives: reduce-scatter over cp, each FSDP2 group, within backward; then an all-reduce
        of one number over cp.
        """
        self.accumulating = True
        loss.backward()
        shards = self._take_shards()
        squared_norm_1 = torch.stack([squared_norm(shard.view(-1)) for shard in shards]).sum(
            0, True
        )
        if self._groups.cp is not None:
            dist.all_reduce(squared_norm_1, group=self._groups.cp)
        clipped = clip(
            squared_norm_1,
            valid.view(1),
            max_grad_norm=self._max_grad_norm,
            clip_function=self._clip_function,
        )
        for accumulator, shard in zip(self._accumulators, shards, strict=True):
            add_clipped_(accumulator, shard, clipped.factor_B[0], clipped.rejected_B[0])
        return clipped

    def take_sum(self) -> dict[str, torch.Tensor]:
        """The clipped sum over all data-parallel ranks: flat fp32 local shards, by name.

        The tensors may be changed in place; they are valid until `reset`. Zeros if nothing was
        accumulated, which holds on all ranks or on none.

        Collectives: per group, a reduce-scatter over dp_shard and an all-reduce over dp_replicate.
        """
        if not self._places:
            return {
                name: torch.zeros_like(parameter.to_local()).view(-1)  # type: ignore[attr-defined]
                for name, parameter in self._parameters.items()
            }
        chunks = [self._sum_over_data_parallel(shard_DN) for shard_DN in self._accumulators]
        return {
            name: chunks[place.group].narrow(0, place.offset, place.numel)
            for name, place in self._places.items()
        }

    def reset(self) -> None:
        """Start the next step's sum at zero."""
        for accumulator in self._accumulators:
            accumulator.zero_()
        self.accumulating = False

    def _sum_over_data_parallel(self, shard_DN: torch.Tensor) -> torch.Tensor:
        chunk_N = shard_DN[0]
        if self._groups.dp_shard is not None:
            chunk_N = torch.empty_like(shard_DN[0])
            reduce_scatter_sum(chunk_N, shard_DN, self._groups.dp_shard)
        if self._groups.dp_replicate is not None:
            dist.all_reduce(chunk_N, group=self._groups.dp_replicate)
        return chunk_N

    def _take_shards(self) -> list[torch.Tensor]:
        taken = [reduction.take() for reduction in self._reductions]
        shards = [shard_DN for _, shard_DN in taken]
        if not self._places:
            self._places = self._find_places([output for output, _ in taken])
            self._accumulators = [torch.zeros_like(shard_DN) for shard_DN in shards]
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, f"{name} is trainable but had no gradient"
            parameter.grad = None
        for shard_DN, accumulator in zip(shards, self._accumulators, strict=True):
            assert shard_DN.shape == accumulator.shape, "the set of used parameters changed"
        return shards

    def _find_places(self, outputs: list[torch.Tensor]) -> dict[str, _Place]:
        """Read from `.grad`, which FSDP2 makes a view of its output, what lies where."""
        groups = {output.untyped_storage().data_ptr(): i for i, output in enumerate(outputs)}
        places = {}
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, f"{name} is trainable but had no gradient"
            local = parameter.grad.to_local()  # type: ignore[attr-defined]
            group = groups[local.untyped_storage().data_ptr()]
            places[name] = _Place(group, int(local.storage_offset()), local.numel())
        return places
