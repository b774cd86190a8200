"""FSDP2 for per-sample gradients: reductions over cp only, layouts of rows, gathered weights.

The ranks of a context-parallel group hold parts of the same sample, so their gradients are summed
in backward, overlapped by FSDP2 as always. Ranks that differ in `dp_shard` or `dp_replicate` hold
different samples, which are summed after clipping, once a step.

FSDP2 cuts a parameter's dim 0 into size(fsdp) chunks of equally many rows, the last ones padded;
fsdp rank = dp_shard rank * cp + cp rank. Per-sample gradients are written straight into the layout
`(cp, B, dp_shard, rows, …)` (`RowLayout`), whose equal contiguous parts a reduce-scatter over cp
sends without a permuting copy. Gathered weights serve all microbatches of a step, if they are kept:
they are copies, which no update reaches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_dp.base.collectives import reduce_scatter_sum
from torchtitan_dp.gradients.labels import label


@dataclass(frozen=True)
class ReductionGroups:
    """The process groups of `dp_replicate x dp_shard x cp`; None where the degree is 1."""

    dp_replicate: dist.ProcessGroup | None
    dp_shard: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None

    def all(self) -> tuple[dist.ProcessGroup | None, ...]:
        """List the groups in the order of the mesh."""
        return self.dp_replicate, self.dp_shard, self.cp

    @property
    def dp_shard_size(self) -> int:
        return dist.get_world_size(self.dp_shard) if self.dp_shard else 1

    @property
    def cp_size(self) -> int:
        return dist.get_world_size(self.cp) if self.cp else 1

    @classmethod
    def build(cls, device_type: str, degrees: tuple[int, int, int]) -> "ReductionGroups":
        """Make the groups for degrees of (dp_replicate, dp_shard, cp), with TorchTitan's row-major
        ranks. Collective over the world."""
        names = ("dp_replicate", "dp_shard", "cp")
        mesh = init_device_mesh(device_type, degrees, mesh_dim_names=names)
        named = zip(names, degrees, strict=True)
        return cls(*(mesh[name].get_group() if degree > 1 else None for name, degree in named))


def sum_over_cp(whole: Tensor, cp: dist.ProcessGroup | None) -> Tensor:
    """Sum `(cp, …)` over cp by one reduce-scatter, and return this rank's part, `(…)`."""
    if cp is None:
        return whole[0]
    shard = torch.empty_like(whole[0])
    reduce_scatter_sum(shard, whole, cp)
    return shard


def sum_all_over_cp(wholes: dict[str, Tensor], cp: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum small tensors, alike but for the last dimension, as `sum_over_cp` does, by one call."""
    if not wholes:
        return {}
    joined = torch.cat(list(wholes.values()), dim=-1)
    parts = sum_over_cp(joined, cp).split([whole.shape[-1] for whole in wholes.values()], dim=-1)
    return dict(zip(wholes, parts, strict=True))


class ReduceScatterOverCP:
    """One FSDP2 group's reduce-scatter, over cp only in place of `dp_shard x cp`.

    FSDP2's input, (fsdp rank, chunk), is seen as (dp_shard, cp, chunk) and summed over cp: this
    rank keeps `(dp_shard, chunk)`, the part of one sample's gradient that belongs to its cp rank.
    The contract is FSDP2's public `set_custom_reduce_scatter`. FSDP2 never calls it for a group of
    one rank, but copies between two buffers from `allocate`, which returns the same one twice.

    Streams: FSDP2 reduces on a stream R of its own; a sample's gradient is read on backward's
    stream C. Every buffer is allocated on C, even if requested on R. R waits for C between
    allocation and first write, so the memory's previous user is done; C waits for R before backward
    ends (FSDP2 does that for `.grad`). A buffer may thus be dropped as soon as its last reader is
    queued: only C can reuse its memory, in order.
    """

    def __init__(self, groups: ReductionGroups) -> None:
        self._cp = groups.cp
        self._is_called = groups.cp is not None or groups.dp_shard is not None
        self._cp_size, self._dp_shard_size = groups.cp_size, groups.dp_shard_size
        self._home: Any = None  # C, from the first `allocate` until `take`
        self._output: Tensor | None = None
        self._shard_DN: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate FSDP2's input, requested on C, and then its output, requested on R."""
        streams = torch.get_device_module(device)
        if self._home is None:
            self._home = streams.current_stream()
        if self._is_called or self._output is None:
            with streams.stream(self._home):
                self._output = torch.empty(size, dtype=dtype, device=device)
        assert tuple(self._output.shape) == tuple(size)
        assert self._output.dtype == dtype
        self._shard_DN = None
        return self._output

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter over cp alone. Only where dp_shard is 1 is `output_tensor` filled."""
        assert self._shard_DN is None, "reduced twice without being taken"
        assert output_tensor.dtype == torch.float32, "gradients are reduced in fp32"
        assert not async_op, "FSDP2 orders streams, not the host"
        streams = torch.get_device_module(output_tensor.device)
        input_DCN = input_tensor.view(self._dp_shard_size, self._cp_size, -1)
        if self._cp is None:  # nothing to sum: what FSDP2 would send is the sample's gradient
            label("per_sample_shards", [output_tensor, input_tensor])
            self._shard_DN = input_DCN[:, 0]
            return None
        with streams.stream(self._home), label("per_sample_shards", [output_tensor]):
            alone = self._dp_shard_size == 1
            shard_DN = output_tensor.view(1, -1) if alone else torch.empty_like(input_DCN[:, 0])
        streams.current_stream().wait_stream(self._home)
        self._shard_DN = shard_DN
        for shard_N, input_CN in zip(shard_DN, input_DCN, strict=True):  # in one piece each
            reduce_scatter_sum(shard_N, input_CN, self._cp)
        return None

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the last backward's result, to be read on that backward's stream: FSDP2's output
        buffer, whose views are `.grad`, and this sample's fp32 gradient shard (dp_shard, chunk),
        which shares its memory where dp_shard is 1."""
        assert self._output is not None, "no gradient was reduced: is a whole group unused?"
        output, shard_DN = self._output, self._shard_DN
        assert (shard_DN is not None) == self._is_called, "FSDP2 reduced by other means"
        current = torch.get_device_module(output.device).current_stream()
        assert self._home == current, "backward ran on another stream"
        self._home = self._output = self._shard_DN = None
        return output, output.view(1, -1) if shard_DN is None else shard_DN


@dataclass(frozen=True)
class RowLayout:
    """The layout of one parameter over `dp_shard x cp`."""

    shape: torch.Size  # of the whole parameter
    dp_shard: int
    cp: int

    @property
    def rows(self) -> int:
        """The rows of a chunk, padding included."""
        return -(-self.shape[0] // (self.dp_shard * self.cp))

    @property
    def chunk_numel(self) -> int:
        return self.rows * self.shape[1:].numel()

    def allocate(self, batch_size: int, device: torch.device) -> Tensor:
        """Allocate an fp32 `(cp, B, dp_shard, rows, …)` buffer, in which padding is zero."""
        padded = self.rows * self.dp_shard * self.cp != self.shape[0]
        make = torch.zeros if padded else torch.empty
        size = (self.cp, batch_size, self.dp_shard, self.rows, *self.shape[1:])
        return make(size, dtype=torch.float32, device=device)

    def chunks(self, whole: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of the parameter's rows, each with its view `(B, n, …)` of `whole`: one
        range if each sample's rows are contiguous."""
        if self.in_one_piece(whole):
            joined = whole.view(whole.shape[1], -1, *self.shape[1:])
            yield slice(0, self.shape[0]), joined.narrow(1, 0, self.shape[0])
            return
        for fsdp_rank in range(self.dp_shard * self.cp):
            start = fsdp_rank * self.rows
            stop = min(start + self.rows, self.shape[0])
            if start < stop:
                dp_shard_rank, cp_rank = divmod(fsdp_rank, self.cp)
                chunk = whole[cp_rank, :, dp_shard_rank]
                yield slice(start, stop), chunk.narrow(1, 0, stop - start)

    def in_one_piece(self, whole: Tensor) -> bool:
        """Return whether each sample's rows are contiguous in `whole`."""
        return self.dp_shard == 1 and (self.cp == 1 or whole.shape[1] == 1)

    def positions(self, row_BT: Tensor) -> Tensor:
        """Find sample b's rows in `whole` when flattened to `(cp * B * dp_shard * rows, …)`."""
        fsdp_rank_BT = row_BT // self.rows
        cp_rank_BT, dp_shard_rank_BT = fsdp_rank_BT % self.cp, fsdp_rank_BT // self.cp
        B = len(row_BT)
        sample_B1 = torch.arange(B, device=row_BT.device)[:, None]
        block_BT = (cp_rank_BT * B + sample_B1) * self.dp_shard + dp_shard_rank_BT
        return block_BT * self.rows + row_BT % self.rows


def free_gathered(model: nn.Module) -> None:
    """Free all gathered weights, also those that a forward pass without a backward pass left, so
    that the next use gathers the current ones."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """List the modules of a model that FSDP2 shards."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
