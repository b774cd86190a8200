"""Where a run's scalars go: TensorBoard, and on rank 0 Weights & Biases and MLflow.

Guarantee:
    W&B and MLflow get a scalar only if it is public (`scalars`), and nothing in a run that is not
    private, unless `metrics.send_not_private` is set. TensorBoard's files stay in the run's folder
    and get all, in two sections.
"""

import os
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from torchtitan_dp.config import JobConfig
from torchtitan_dp.watch.mlflow import MLflow
from torchtitan_dp.watch.scalars import NOT_PRIVATE, tag
from torchtitan_dp.watch.wandb import WandB

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
