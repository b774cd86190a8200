"""Every scalar that a run logs, whether it may be published, and where it goes.

TensorBoard gets all scalars, in two sections; on rank 0 Weights & Biases and MLflow get the public
ones.

Guarantee:
    A public scalar follows from the configuration, the number of steps and the ledger alone. All
    others depend on records without noise, if only by the time that a step took. A scalar that the
    table lacks is treated as one of those. In a run that is not private nothing is public.

    W&B and MLflow get a scalar only if it is public, and nothing in a run that is not private,
    unless `metrics.send_not_private` is set. TensorBoard's files stay in the run's folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from torchtitan_dp.config import JobConfig
from torchtitan_dp.watch.services import MLflow, WandB

PUBLISHABLE, NOT_PRIVATE = "private_to_publish", "not_private"  # sections of TensorBoard


@dataclass(frozen=True)
class Scalar:
    """A scalar by its name below the section; `*` stands for any text."""

    name: str
    public: bool
    words: str


SCALARS = (
    Scalar("lr", True, "learning rate of the step"),
    Scalar("epsilon", True, "ε spent so far"),
    Scalar("epsilon_planned", True, "ε at the last planned step, with all steps lost to a crash"),
    Scalar("noise_multiplier", True, "σ: the noise's standard deviation over the clip norm"),
    Scalar("loss", False, "mean loss of the step's samples"),
    Scalar("realized_batch_size", False, "samples that were drawn"),
    Scalar("rejected", False, "drawn samples left out: their gradient or loss is not finite"),
    Scalar("clipped_fraction", False, "share of samples whose gradient was longer than the clip"),
    Scalar("norm_p10", False, "10th percentile of per-sample gradient norms, before clipping"),
    Scalar("norm_p50", False, "their median"),
    Scalar("norm_p90", False, "their 90th percentile"),
    Scalar("heldout_loss_noised", True, "mean clipped loss of held-out units, with noise"),
    Scalar("heldout_loss", False, "mean loss of held-out units"),
    Scalar("heldout_loss_at/*", False, "the same by position in the sample"),
    Scalar("heldout_loss_ema", False, "held-out loss of the averaged weights"),
    Scalar("heldout_loss_ema_at/*", False, "the same by position in the sample"),
    Scalar("throughput(tps)", False, "tokens a second and device, padding included"),
    Scalar("mfu(%)", False, "model FLOPs utilization, where the device's peak is known"),
    Scalar("memory/max_active(GiB)", False, "peak memory of live tensors (CPU: of the process)"),
    Scalar("memory/max_reserved(GiB)", False, "peak memory that PyTorch's allocator reserved"),
    Scalar("memory/reserved_over_active", False, "their ratio: fragmentation, where well above 1"),
)


def find(name: str) -> Scalar | None:
    """Find a scalar in the table."""
    return next((scalar for scalar in SCALARS if fnmatchcase(name, scalar.name)), None)


def is_public(name: str) -> bool:
    """Return whether a private run's scalar may be published; not if the table lacks it."""
    scalar = find(name)
    return scalar is not None and scalar.public


def tag(name: str, *, private: bool) -> str:
    """Return a scalar's tag, in its section.

    Args:
        private: whether the run is.
    """
    return f"{PUBLISHABLE if private and is_public(name) else NOT_PRIVATE}/{name}"


_FLUSH_S = 10  # a person who watches waits no longer


class Sink(Protocol):
    """A service that keeps scalars, by tag."""

    def log(self, scalars: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in one folder, which a resumed run goes on with."""

    def __init__(self, folder: str, step: int) -> None:
        """
        Args:
            step: the last that was taken; TensorBoard hides later ones, which a crash took back.
        """
        self._writer = SummaryWriter(
            folder, max_queue=1000, flush_secs=_FLUSH_S, purge_step=step + 1
        )

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Guarded:
    """A service outside of the run, which gets what may be sent and whose failures end no run."""

    def __init__(self, key: str, sink: Sink, *, send_not_private: bool) -> None:
        """
        Args:
            key: its key in the configuration.
        """
        self._key, self._sink, self._all = key, sink, send_not_private
        self._works = True

    def log(self, scalars: dict[str, float], step: int) -> None:
        sent = {
            name: value
            for name, value in scalars.items()
            if self._all or not name.startswith(f"{NOT_PRIVATE}/")
        }
        if sent:
            self._attempt(lambda: self._sink.log(sent, step))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, send: Callable[[], None]) -> None:
        """Send; after a failure never again in this start, since each may take a minute."""
        if not self._works:
            return
        try:
            send()
        except Exception as error:  # of any kind: these are others' services and clients
            self._works = False
            logger.warning(
                f"{self._key}: nothing more is sent until the next start, after "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            )


class Outlets(BaseLogger):
    """All sinks of a rank; they get scalars under the tags of their sections."""

    def __init__(self, sinks: list[Sink], *, private: bool) -> None:
        """
        Args:
            private: whether the run is.
        """
        self._sinks, self._private = sinks, private

    def log(self, metrics: dict[str, float], step: int) -> None:
        labelled = {tag(name, private=self._private): v for name, v in metrics.items()}
        for sink in self._sinks:
            sink.log(labelled, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_outlets(config: JobConfig, step: int, *, private: bool) -> Outlets:
    """Open this rank's sinks.

    Args:
        step: the last that was taken.
        private: whether the run is.
    """
    metrics, folder, rank = config.metrics, config.job.dump_folder, dist.get_rank()
    sinks: list[Sink] = []
    if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
        below = f"rank_{rank}" if metrics.save_for_all_ranks else ""
        sinks.append(TensorBoard(os.path.join(folder, metrics.save_tb_folder, below), step))
    services: list[tuple[str, Callable[[], Sink]]] = []
    everything = metrics.send_not_private
    if metrics.enable_wandb:
        services.append(("metrics.enable_wandb", lambda: WandB(folder, with_times=everything)))
    if metrics.enable_mlflow:
        services.append(("metrics.enable_mlflow", lambda: MLflow(folder, with_times=everything)))
    for key, open_sink in services if rank == 0 else ():
        if not private and not everything:
            logger.warning(
                f"{key}: this run is not private, so nothing is sent; "
                "metrics.send_not_private = true sends all"
            )
            continue
        sinks.append(Guarded(key, open_sink(), send_not_private=everything))
        what = "ALL scalars, also those that are NOT PRIVATE" if everything else "public scalars"
        logger.info(f"{key}: sends {what}")
    return Outlets(sinks, private=private)
