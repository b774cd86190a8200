"""The metrics of a run: labelled scalars to its sinks, and one console line a step.

Step, learning rate, sigma, epsilon and the configuration may be published with the weights. All
else (loss, norms, batch size, tokens, throughput, memory, time) depends on records without noise:
its tags begin with `not_private/`, its part of the console line with `not private:`.
"""

import dataclasses
import math
import os
import shlex
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from torchtitan_dp.config import JobConfig
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.watch.outlets import Outlets, open_outlets
from torchtitan_dp.watch.progress import (
    Pace,
    Screen,
    epsilon_words,
    pace_words,
    samples_words,
    speed_words,
)


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


class LabelledMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics, for our sinks; none of TorchTitan's own is opened.

    TorchTitan's W&B sink would send the whole configuration and the console's lines.
    """

    logger: BaseLogger
    time_last_log: float
    ntokens_since_last_log: int

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        metrics: Any = job_config.metrics
        none = dataclasses.replace(metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(dataclasses.replace(job_config, metrics=none), parallel_dims)
        self.job_config = job_config
        if os.environ.get("NO_COLOR"):
            self.color = NoColor()

        self._planned: dict[str, float] = {}

    def begin(self, step: int, *, private: bool, epsilon_planned: float | None = None) -> None:
        """Open the sinks, after loading.

        Args:
            step: the last that was taken.
            private: whether the run is.
            epsilon_planned: at the last planned step, where this rank knows it.
        """
        self._planned = {} if epsilon_planned is None else {"epsilon_planned": epsilon_planned}
        self.logger = open_outlets(self.job_config, step, private=private)
        if self.job_config.metrics.enable_tensorboard:
            folder = shlex.quote(self.job_config.job.dump_folder)
            logger.info(f"to watch (not private): tensorboard --logdir {folder}")
        self.time_last_log = time.perf_counter()  # opening may take seconds

    def send(self) -> None:
        """Send what services get once the planned steps are taken."""
        assert isinstance(self.logger, Outlets)
        self.logger.send()


class PrivateMetricsProcessor(LabelledMetricsProcessor):
    """The scalars of a private run, and its progress."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.pace = Pace(0, job_config.training.steps)
        self.screen = Screen.of_launcher()
        training, data = job_config.training, job_config.data
        ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        rows = training.global_batch_size * data.windows_per_draw
        self._begun, self._expected = 0, max(1.0, rows / (ranks * training.local_batch_size))

    def begin(self, step: int, *, private: bool, epsilon_planned: float | None = None) -> None:
        super().begin(step, private=private, epsilon_planned=epsilon_planned)
        self.pace = Pace(step, self.job_config.training.steps)
        self.screen.show(self.pace, 0.0, "")

    def microbatch_begun(self, tokens: int) -> None:
        """Count a microbatch and its tokens, and move the progress bar."""
        self.ntokens_since_last_log += tokens
        self._begun += 1
        # The bar's scale is the expected number: that of a draw is not known ahead of time here.
        part = min(self._begun / self._expected, 0.95)
        self.screen.show(self.pace, part, f"microbatch {self._begun}")

    def step_done(self, step: int) -> None:
        """Note that a step was taken."""
        self.pace.step_done(step)
        self._begun = 0
        self.screen.show(self.pace, 0.0, "")

    def log_step(
        self,
        step: int,
        public: dict[str, float],
        statistics: dict[str, float],
        beside_epsilon: str = "",
    ) -> None:
        """Log one step.

        Args:
            public: the public scalars of `outlets.SCALARS`; nothing computed from records.
            statistics: scalars that are not private, by name.
            beside_epsilon: words after epsilon in the console line.
        """
        elapsed = time.perf_counter() - self.time_last_log
        tokens_per_s = self.ntokens_since_last_log / (
            elapsed * self.parallel_dims.non_data_parallel_size
        )
        memory = self.device_memory_monitor.get_peak_stats()
        measured = {
            "throughput(tps)": tokens_per_s,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/reserved_over_active": memory.max_reserved_gib
            / max(memory.max_active_gib, 1e-9),
        }
        if math.isfinite(self.gpu_peak_flops):  # it is unknown of a CPU
            measured["mfu(%)"] = 100 * self.num_flops_per_token * tokens_per_s / self.gpu_peak_flops
        scalars = {**public, **self._planned, **statistics, **measured}
        self.logger.log(scalars, step)
        spent = epsilon_words(scalars, beside_epsilon)
        self.screen.logged(scalars)
        self.screen.show(self.pace, 0.0, "")
        color = self.color
        logger.info(
            f"{color.red}step: {step}/{self.pace.total}  {color.blue}{spent}  "
            f"lr: {public['lr']:.2e}  {color.reset}not private: "
            f"{color.green}{samples_words(statistics)}  "
            f"{color.turquoise}{speed_words(scalars)}  "
            f"{color.cyan}{pace_words(self.pace)}{color.reset}"
        )
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def close(self) -> None:
        self.screen.close()
        super().close()
