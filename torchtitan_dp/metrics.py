"""The metrics of a private run; all that are computed from records are labelled not private.

Step, learning rate, sigma, epsilon and the configuration may be published with the weights. All
else (loss, norms, batch size, tokens, throughput, memory) depends on records without noise: its
TensorBoard tags and its part of the console line begin with `not_private`.

"""

import os
import shlex
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.clipping import Clip

PUBLIC = frozenset({"lr", "epsilon", "noise_multiplier"})
_PREFIX = "not_private/"


class LabellingLogger(BaseLogger):
    """Passes metrics on under `not_private/`, except the few that are public."""

    def __init__(self, inner: BaseLogger) -> None:
        self._inner = inner

    def log(self, metrics: dict[str, Any], step: int) -> None:
        labelled = {k if k in PUBLIC else _PREFIX + k: v for k, v in metrics.items()}
        self._inner.log(labelled, step)

    def close(self) -> None:
        self._inner.close()


class PrivateMetricsProcessor(MetricsProcessor):
    """Logs TorchTitan's metrics, labelled."""

    logger: BaseLogger
    time_last_log: float
    ntokens_since_last_log: int

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.logger = LabellingLogger(self.logger)
        if os.environ.get("NO_COLOR"):
            self.color = NoColor()
        if job_config.metrics.enable_tensorboard:
            folder = os.path.join(job_config.job.dump_folder, job_config.metrics.save_tb_folder)
            logger.info(f"to watch (not private): tensorboard --logdir {shlex.quote(folder)}")

    def log_step(
        self,
        step: int,
        public: dict[str, float],
        statistics: dict[str, float],
        beside_epsilon: str = "",
    ) -> None:
        """Log one step.

        Args:
            public: `lr`, `epsilon` and `noise_multiplier`; nothing computed from records.
            statistics: what is not private, by tag.
            beside_epsilon: what the console line adds to it.
        """
        elapsed = time.perf_counter() - self.time_last_log
        tokens_per_s = self.ntokens_since_last_log / (
            elapsed * self.parallel_dims.non_data_parallel_size
        )
        memory = self.device_memory_monitor.get_peak_stats()
        measured = {
            "throughput(tps)": tokens_per_s,
            "mfu(%)": 100 * self.num_flops_per_token * tokens_per_s / self.gpu_peak_flops,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/reserved_over_active": memory.max_reserved_gib
            / max(memory.max_active_gib, 1e-9),
        }
        self.logger.log({**public, **statistics, **measured}, step)
        color = self.color
        logger.info(
            f"{color.red}step: {step:3}  {color.blue}epsilon: {rounded_up(public['epsilon'])}"
            f"{f' ({beside_epsilon})' if beside_epsilon else ''}  "
            f"lr: {public['lr']:.2e}  {color.reset}not private: "
            f"{color.green}loss: {statistics['loss']:.4f}  "
            f"{color.orange}batch: {statistics['realized_batch_size']:.0f}  "
            f"clipped: {100 * statistics['clipped_fraction']:.0f}%  "
            f"norm p50: {statistics['norm_p50']:.3g}  "
            f"{color.turquoise}memory: {memory.max_reserved_gib:.2f}GiB  "
            f"{color.cyan}tps: {round(tokens_per_s):,}{color.reset}"
        )
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()


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
