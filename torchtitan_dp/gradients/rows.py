"""How FSDP2 lays one parameter's rows over `dp_shard x cp`, and where a per-sample gradient goes.

A parameter's dim 0 is cut into size(fsdp) chunks of equally many rows, the last ones padded; fsdp
rank = dp_shard rank * cp + cp rank. Per-sample gradients are written straight into the layout
`(cp, B, dp_shard, rows, …)`, whose equal contiguous parts are what a reduce-scatter over cp sends:
no permuting copy. The part of one cp rank holds, for every dp_shard rank, the chunk that is its.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


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

    def allocate(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Allocate an fp32 `(cp, B, dp_shard, rows, …)` buffer, in which padding is zero."""
        padded = self.rows * self.dp_shard * self.cp != self.shape[0]
        make = torch.zeros if padded else torch.empty
        size = (self.cp, batch_size, self.dp_shard, self.rows, *self.shape[1:])
        return make(size, dtype=torch.float32, device=device)

    def chunks(self, whole: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of the parameter's rows, each with its view `(B, n, …)` of `whole`.

        There is one range if each sample's rows are contiguous.
        """
        if self.in_one_piece(whole):
            joined = whole.view(whole.shape[1], -1, *self.shape[1:])
            yield slice(0, self.shape[0]), joined.narrow(1, 0, self.shape[0])
            return
        for fsdp_rank in range(self.dp_shard * self.cp):
            start = fsdp_rank * self.rows
            stop = min(start + self.rows, self.shape[0])
            if start < stop:
                dp_shard_rank, cp_rank = divmod(fsdp_rank, self.cp)
                yield (
                    slice(start, stop),
                    whole[cp_rank, :, dp_shard_rank].narrow(1, 0, stop - start),
                )

    def in_one_piece(self, whole: torch.Tensor) -> bool:
        """Return whether each sample's rows are contiguous in `whole`."""
        return self.dp_shard == 1 and (self.cp == 1 or whole.shape[1] == 1)

    def positions(self, row_BT: torch.Tensor) -> torch.Tensor:
        """Find sample b's rows in `whole` when flattened to `(cp * B * dp_shard * rows, …)`."""
        fsdp_rank_BT = row_BT // self.rows
        cp_rank_BT, dp_shard_rank_BT = fsdp_rank_BT % self.cp, fsdp_rank_BT // self.cp
        B = len(row_BT)
        sample_B1 = torch.arange(B, device=row_BT.device)[:, None]
        block_BT = (cp_rank_BT * B + sample_B1) * self.dp_shard + dp_shard_rank_BT
        return block_BT * self.rows + row_BT % self.rows
