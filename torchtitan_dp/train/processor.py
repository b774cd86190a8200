"""A run's progress and scalars: a labelled line of each logged step, and its time left.

Step, epsilon, sigma and learning rate are public. All else (losses, batch sizes, norms, speed,
memory, time) depends on records without noise: its tags begin with `not_private/`, its part of the
console line with `not private:`.
"""

import dataclasses
import math
import os
import shlex
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from torchtitan_dp.config import JobConfig
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.train.outlets import Outlets, open_outlets

_QUIET_S = 60  # between the lines of a long step
_QUANTILES = {"norm_p10": 0.1, "norm_p50": 0.5, "norm_p90": 0.9}


@dataclass
class SampleStatistics:
    """One step's samples of this rank, on the device; reduced only when a step is logged."""

    rows: list[Tensor] = field(default_factory=list)

    def add(self, loss_B: Tensor, valid_B: Tensor, clip: Clip) -> None:
        """Add some samples: their partial losses on this rank, and how they were clipped."""
        columns = (loss_B.detach(), clip.norm_B, valid_B, clip.rejected_B, clip.exceeds_B)
        self.rows.append(torch.stack([column.double() for column in columns], dim=1))

    def reduce(self, parallel_dims: ParallelDims) -> dict[str, float]:
        """Compute statistics over all ranks, which are not private; of an empty batch its counts.

        Collectives: an all-reduce over cp (each rank has a part of each loss) and an all-gather
        over the data-parallel ranks, which have equally many rows.
        """
        table = torch.cat(self.rows) if self.rows else torch.empty((0, 5))
        cp, batch = map(parallel_dims.get_optional_mesh, ("cp", "batch"))
        if self.rows and cp is not None:
            losses = table[:, 0].contiguous()
            dist.all_reduce(losses, group=cp.get_group())
            table[:, 0] = losses
        if self.rows and batch is not None:
            parts = [torch.empty_like(table) for _ in range(batch.size())]
            dist.all_gather(parts, table, group=batch.get_group())
            table = torch.cat(parts)
        table = table.cpu()
        rows = table[table[:, 2] > 0]
        used = rows[rows[:, 3] == 0]
        found = {"realized_batch_size": float(len(rows)), "rejected": float(len(rows) - len(used))}
        if len(used):
            learned = used[used[:, 1] > 0]  # a sample without targets has loss and gradient 0
            found["loss"] = (learned if len(learned) else used)[:, 0].mean().item()
            found["clipped_fraction"] = used[:, 4].mean().item()
            found |= {name: used[:, 1].quantile(at).item() for name, at in _QUANTILES.items()}
        return found


class LabelledMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics, for our sinks. TorchTitan's own W&B sink would send the whole
    configuration and the console's lines."""

    logger: Outlets
    time_last_log: float
    ntokens_since_last_log: int

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        config: Any = job_config
        none = dataclasses.replace(config.metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(dataclasses.replace(config, metrics=none), parallel_dims)
        self.job_config = job_config
        if os.environ.get("NO_COLOR"):
            self.color = NoColor()

    def begin(self, step: int, *, private: bool) -> None:
        """Open the sinks, after loading; `step` is the last that was taken."""
        self.logger = open_outlets(self.job_config, step, private=private)
        folder, watch = self.job_config.job.dump_folder, ""
        if self.job_config.metrics.enable_tensorboard:
            watch = f"; to watch (not private): tensorboard --logdir {shlex.quote(folder)}"
        logger.info(f'writes: {folder}/{watch}; share nothing that is marked "not private"')
        self.time_last_log = time.perf_counter()  # opening may take seconds

    def should_log(self, step: int) -> bool:
        """Return whether a step is logged: as TorchTitan does, and the last one."""
        return super().should_log(step) or step == self.job_config.training.steps


class PrivateMetricsProcessor(LabelledMetricsProcessor):
    """The scalars of a private run, and its progress."""

    def count_from(self, step: int, epsilon_planned: float | None) -> None:
        """Start the clock after `step`; `epsilon_planned` is that at the last step, if known."""
        self._planned = epsilon_planned
        training, dims = self.job_config.training, self.parallel_dims
        rows = training.global_batch_size * self.job_config.data.windows_per_draw
        at_once = dims.dp_replicate * dims.dp_shard * training.local_batch_size
        self.start_clock(step, training.steps, max(1.0, rows / at_once))

    def start_clock(self, step: int, total: int, expected: float) -> None:
        """Begin to measure after `step` of `total`, with that many microbatches expected a step."""
        self._loaded, self._done, self._total = step, step, total
        self._microbatches, self._expected = 0, expected
        # Of the first step of this start, which compiles, and from which the others are counted.
        self._newest_line = self._started = self._first_done = time.monotonic()

    def microbatch_begun(self, tokens: int) -> None:
        """Count a microbatch and its tokens, and log a line where the newest is `_QUIET_S` old."""
        self.ntokens_since_last_log += tokens
        self._microbatches += 1
        if time.monotonic() - self._newest_line >= _QUIET_S:
            self._newest_line = time.monotonic()
            logger.info(
                f"step: {self._done + 1}/{self._total}  not private: microbatch: "
                f"{self._microbatches} of about {self._expected:.0f}  {self.pace_words()}"
            )

    def step_done(self, step: int) -> None:
        """Note that a step was taken."""
        self._done, self._microbatches = step, 0
        if step == self._loaded + 1:
            self._first_done = time.monotonic()

    def log_step(
        self,
        step: int,
        public: dict[str, float],
        statistics: dict[str, float],
        beside_epsilon: str = "",
    ) -> None:
        """Log one step: the `public` scalars of `outlets.SCALARS`, with nothing computed from
        records, the `statistics` that are not private, and words for the console line."""
        elapsed = time.perf_counter() - self.time_last_log
        devices = self.parallel_dims.non_data_parallel_size
        tokens_per_s = self.ntokens_since_last_log / (elapsed * devices)
        peak = self.device_memory_monitor.get_peak_stats()
        active, reserved = peak.max_active_gib, peak.max_reserved_gib
        not_private = {
            **statistics,
            "throughput(tps)": tokens_per_s,
            "memory/max_active(GiB)": active,
            "memory/max_reserved(GiB)": reserved,
        }
        speed = f"memory: {reserved:.2f}GiB  tps: {round(tokens_per_s):,}"
        if math.isfinite(self.gpu_peak_flops):  # it is unknown of a CPU
            mfu = 100 * self.num_flops_per_token * tokens_per_s / self.gpu_peak_flops
            not_private["mfu(%)"] = mfu
            speed += f"  mfu: {mfu:.1f}%"
        self.logger.log({**public, **not_private}, step)
        now, end = rounded_up(public["epsilon"]), self._planned and rounded_up(self._planned)
        planned = f"{end} at the end" if end and end != now else ""
        beside = ", ".join(filter(None, (planned, beside_epsilon)))
        epsilon = f"at most {now}{f' ({beside})' if beside else ''}"
        color = self.color
        logger.info(
            f"{color.red}step: {step}/{self._total}  {color.blue}epsilon: {epsilon}  "
            f"lr: {public['lr']:.2e}  {color.reset}not private: "
            f"{color.green}{samples_words(statistics)}  "
            f"{color.turquoise}{speed}  {color.cyan}{self.pace_words()}{color.reset}"
        )
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log, self._newest_line = time.perf_counter(), time.monotonic()
        self.device_memory_monitor.reset_peak_stats()

    def pace_words(self) -> str:
        """Write the seconds of a step and the time left, by the mean with validation and
        checkpoints, but without this start's first step where there is another."""
        steps = self._done - self._loaded
        if steps == 0:
            return "s/step: ?  ETA: ?"
        if steps == 1:
            pace = self._first_done - self._started
        else:
            pace = (time.monotonic() - self._first_done) / (steps - 1)
        left = timedelta(seconds=round(pace * (self._total - self._done)))
        return f"s/step: {pace:.3g}  ETA: {left}"


def samples_words(statistics: dict[str, float]) -> str:
    """Write the loss, size and clipped share of a step's batch; not private."""
    batch, rejected = statistics["realized_batch_size"], statistics["rejected"]
    if not batch:
        return "batch: 0 (an empty draw)"
    if batch == rejected:
        return f"batch: {batch:.0f}, all left out (not finite)"
    lost = f"  left out (not finite): {rejected:.0f}" if rejected else ""
    return (
        f"loss: {statistics['loss']:.4f}  batch: {batch:.0f}{lost}  "
        f"clipped: {100 * statistics['clipped_fraction']:.0f}%  "
        f"norm p50: {statistics['norm_p50']:.3g}"
    )
