"""One step's losses, gradient norms and clipping, over all ranks: computed without noise."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from torchtitan_dp.privacy.clipping import Clip


@dataclass
class SampleStatistics:
    """Keeps one step's samples of this rank on the device; they are reduced only when a step is
    logged."""

    rows: list[torch.Tensor] = field(default_factory=list)

    def add(self, loss_B: torch.Tensor, valid_B: torch.Tensor, clip: Clip) -> None:
        """Add some samples: their partial losses on this rank, and how they were clipped."""
        columns = (
            loss_B.detach().double(),
            clip.norm_B,
            valid_B.double(),
            clip.rejected_B.double(),
            clip.exceeds_B.double(),
        )
        self.rows.append(torch.stack(columns, dim=1))

    def reduce(self, parallel_dims: ParallelDims) -> dict[str, float]:
        """Compute statistics over all ranks; they are not private.

        Collectives: an all-reduce over cp (each rank has a part of each loss) and an all-gather
        over the data-parallel ranks, which have equally many rows.
        """
        cp, batch = map(parallel_dims.get_optional_mesh, ("cp", "batch"))
        names = ("norm_p10", "norm_p50", "norm_p90")
        nothing = dict.fromkeys(("loss", "clipped_fraction", *names), float("nan"))
        if not self.rows:
            return {"realized_batch_size": 0.0, "rejected": 0.0, **nothing}
        table = torch.cat(self.rows)
        if cp is not None:
            losses = table[:, 0].contiguous()
            dist.all_reduce(losses, group=cp.get_group())
            table[:, 0] = losses
        if batch is not None:
            parts = [torch.empty_like(table) for _ in range(batch.size())]
            dist.all_gather(parts, table, group=batch.get_group())
            table = torch.cat(parts)
        table = table.cpu()
        drawn = table[table[:, 2] > 0]
        used = drawn[drawn[:, 3] == 0]
        counts = {
            "realized_batch_size": float(len(drawn)),
            "rejected": float(len(drawn) - len(used)),
        }
        if len(used) == 0:
            return {**counts, **nothing}
        levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        quantiles = dict(zip(names, used[:, 1].quantile(levels).tolist(), strict=True))
        return {
            **counts,
            "loss": used[:, 0].mean().item(),
            "clipped_fraction": used[:, 4].mean().item(),
            **quantiles,
        }
