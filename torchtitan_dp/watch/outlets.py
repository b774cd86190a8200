"""Every scalar that a run logs, whether it may be published, and where it goes.

TensorBoard gets all scalars, in two sections; on rank 0 Weights & Biases and MLflow get the public
ones, once, when the planned steps are taken.

Guarantee:
    A public scalar follows from the configuration, the number of steps and the ledger alone. All
    others depend on records without noise, if only by the time that a step took. A scalar that the
    table lacks is treated as one of those. In a run that is not private nothing is public.

    W&B and MLflow get a scalar only if it is public, and nothing in a run that is not private,
    unless `metrics.send_not_private` is set. They get what one uninterrupted job would send: no
    times of steps, no step that was lost, nothing that shows starts (hazard row 73). TensorBoard's
    files stay in the run's folder.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from torchtitan_dp.config import JobConfig
from torchtitan_dp.process import Fault, write_atomically
from torchtitan_dp.watch.services import MLflow, WandB, keep, kept, kept_or

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


def tag(name: str, *, private: bool) -> str:
    """Return a scalar's tag, in its section, of a run that is private or not."""
    scalar = find(name)
    public = private and scalar is not None and scalar.public
    return f"{PUBLISHABLE if public else NOT_PRIVATE}/{name}"


_FLUSH_S = 10  # a person who watches waits no longer


class Sink(Protocol):
    """A service that keeps scalars, by tag."""

    def log(self, scalars: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in one folder, which a resumed run goes on with."""

    def __init__(self, folder: str, step: int) -> None:
        # TensorBoard hides steps after the last that was taken, which a crash took back.
        self._writer = SummaryWriter(
            folder, max_queue=1000, flush_secs=_FLUSH_S, purge_step=step + 1
        )

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Guarded:
    """A service outside of the run, whose failures end no run."""

    def __init__(self, key: str, sink: Sink) -> None:
        self._key, self._sink = key, sink  # the key is that of the configuration
        self._works = True

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._attempt(lambda: self._sink.log(scalars, step))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, send: Callable[[], None]) -> None:
        """Send; after a failure never again in this start, since each may take a minute."""
        try:
            if self._works:
                send()
        except Exception as error:  # of any kind: these are others' services and clients
            self._works = False
            logger.warning(
                f"{self._key}: nothing more is sent until the next start, after {_named(error)}"
            )


LINES = "watch.jsonl"
_OF_ALL_STEPS = f"{PUBLISHABLE}/epsilon_planned"  # one value a start: the newest is sent


class Later:
    """Keeps public scalars in the run's folder, until the planned steps are taken.

    A service that gets it step by step would see when each arrives, and which come again.
    """

    def __init__(
        self, folder: str, step: int, services: Mapping[str, Callable[[float | None], Sink]]
    ) -> None:
        """
        Args:
            step: the last that was taken; lines of later ones, which a crash took back, go.
            services: by their key in the configuration; each is opened with the time of all steps.
        """
        self._folder, self._services = folder, services
        self._path = os.path.join(folder, LINES)
        kept_lines = {n: scalars for n, scalars in self._read().items() if n <= step}
        content = "".join(_line(scalars, n) for n, scalars in kept_lines.items())
        write_atomically(self._path, content.encode())

    def log(self, scalars: dict[str, float], step: int) -> None:
        public = {n: value for n, value in scalars.items() if n.startswith(f"{PUBLISHABLE}/")}
        if public:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(_line(public, step))
                file.flush()
                os.fsync(file.fileno())  # as the checkpoint is: a gap would show where it crashed

    def close(self) -> None:
        pass

    def send(self) -> None:
        """Send the lines that were not sent before; a service that fails gets them next time."""
        lines, now = self._read(), kept_or(self._folder, "time", time.time)
        for key, open_sink in self._services.items():
            sent = f"{key}: last step sent"
            later = {n: line for n, line in lines.items() if n > kept(self._folder).get(sent, -1)}
            if not later:
                continue
            newest = lines[max(lines)].get(_OF_ALL_STEPS)
            try:
                sink = open_sink(now)
                for step, line in later.items():
                    if _OF_ALL_STEPS in line and newest is not None:
                        line[_OF_ALL_STEPS] = newest
                    sink.log(line, step)
                sink.close()
            except (Exception, Fault) as error:  # of any kind: these are others' services
                logger.warning(
                    f"{key}: not sent, after {_named(error)}; the same command sends it again"
                )
            else:
                keep(self._folder, **{sent: max(later)})
                logger.info(f"{key}: sent public scalars of {len(later)} steps")

    def _read(self) -> dict[int, dict[str, float]]:
        """Read the lines by step, in order; a step may have several."""
        lines: dict[int, dict[str, float]] = {}
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # torn by a crash, after the checkpoint
                    step, scalars = json.loads(line)
                    lines.setdefault(step, {}).update(scalars)
        return dict(sorted(lines.items()))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _line(scalars: dict[str, float], step: int) -> str:
    return json.dumps([step, scalars]) + "\n"


class Outlets(BaseLogger):
    """All sinks of a rank; they get scalars under the tags of their sections."""

    def __init__(self, sinks: list[Sink], *, private: bool) -> None:
        self._sinks, self._private = sinks, private

    def send(self) -> None:
        """Send what services get at the end, once the planned steps are taken."""
        for sink in self._sinks:
            if isinstance(sink, Later):
                sink.send()

    def log(self, metrics: dict[str, float], step: int) -> None:
        labelled = {tag(name, private=self._private): v for name, v in metrics.items()}
        for sink in self._sinks:
            sink.log(labelled, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_outlets(config: JobConfig, step: int, *, private: bool) -> Outlets:
    """Open this rank's sinks; `step` is the last that was taken."""
    metrics, folder, rank = config.metrics, config.job.dump_folder, dist.get_rank()
    sinks: list[Sink] = []
    if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
        below = f"rank_{rank}" if metrics.save_for_all_ranks else ""
        sinks.append(TensorBoard(os.path.join(folder, metrics.save_tb_folder, below), step))
    services: dict[str, Callable[[float | None], Sink]] = {}
    if metrics.enable_wandb:
        services["metrics.enable_wandb"] = lambda when: WandB(folder, time_of_all=when)
    if metrics.enable_mlflow:
        services["metrics.enable_mlflow"] = lambda when: MLflow(folder, time_of_all=when)
    if rank != 0 or not services:
        return Outlets(sinks, private=private)
    keys = ", ".join(services)
    if metrics.send_not_private:
        sinks += [Guarded(key, open_sink(None)) for key, open_sink in services.items()]
        logger.info(f"{keys}: sends ALL scalars, also those that are NOT PRIVATE")
    elif private:
        sinks.append(Later(folder, step, services))
        logger.info(f"{keys}: sends public scalars, once the planned steps are taken")
    else:
        logger.warning(
            f"{keys}: this run is not private, so nothing is sent; "
            "metrics.send_not_private = true sends all"
        )
    return Outlets(sinks, private=private)
