"""Every scalar that a run logs, whether it may be published, and where it goes.

TensorBoard gets all scalars, in two sections. `public.jsonl` gets the public ones, and trackers
(Weights & Biases, MLflow) get the lines of that file, once, when the planned steps are taken.
Environment variables of each choose the rest. W&B: WANDB_MODE (`offline` writes into the run's
folder for `wandb sync`), WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME. MLflow: MLFLOW_TRACKING_URI (by
default a database in the run's folder), MLFLOW_EXPERIMENT_NAME. A folder is one run in each,
however often it is started.

Guarantee:
    - A public scalar follows from the configuration, the number of steps and the ledger alone. All
      others depend on records without noise, if only by the time that a step took; a scalar that
      the table lacks is treated as one of those. In a run that is not private nothing is public.
    - A tracker gets public scalars alone, as one uninterrupted job would send them: no times of
      steps, no step that was lost, nothing that shows starts (hazard row 73).
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from torchtitan_dp.base.process import Fault, write_atomically
from torchtitan_dp.config import JobConfig

PUBLISHABLE, NOT_PRIVATE = "private_to_publish", "not_private"  # sections of TensorBoard
PUBLIC_FILE, _KEPT_FILE = "public.jsonl", "watch.json"


@dataclass(frozen=True)
class Scalar:
    """A scalar by its name below the section; `*` stands for any text."""

    name: str
    public: bool
    words: str


SCALARS = (
    Scalar("lr", True, "learning rate of the step"),
    Scalar("epsilon", True, "ε spent so far"),
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


class TensorBoard(BaseLogger):
    """Event files in one folder, which a resumed run goes on with."""

    def __init__(self, folder: str, step: int) -> None:
        # A person who watches waits 10 s at most. Steps after the last that was taken are hidden.
        how = {"max_queue": 1000, "flush_secs": 10, "purge_step": step + 1}
        self._writer = SummaryWriter(folder, **how)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run of a folder; every step gets the same time. Fault where it cannot be reached."""

    def __init__(self, folder: str, when: float) -> None:
        import wandb

        self._when = when
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_dp"),
                dir=folder,
                id=kept(folder).get("wandb") or keep(folder, "wandb", secrets.token_hex(8)),
                resume="allow",
                # Without these W&B would send console lines (with losses), the code, the command
                # line and the paths in it, git's remote, host and user, packages, and the load.
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    capture_loggers={},
                    save_code=False,
                    disable_code=True,
                    disable_git=True,
                    disable_job_creation=True,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    x_save_requirements=False,
                    sync_tensorboard=False,
                    host="",
                    username="",
                    program="",
                ),
            )
        except wandb.Error as error:
            raise Fault(
                f"metrics.enable_wandb = true: {error}; `wandb login`, or set the environment "
                "variable WANDB_MODE=offline"
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        # Without a time W&B adds the present one, and records' lengths follow from a step's.
        self._run.log({**scalars, "_timestamp": self._when}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """As `WandB`, by MLflow's plain client: the functions on its module would add the user, the
    program's path and the git commit, and measure the machine."""

    def __init__(self, folder: str, when: float) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the run's end waits
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._when_ms = Metric, round(1000 * when)
        database = f"sqlite:///{Path(folder).resolve() / 'mlflow.db'}"
        where = os.environ.get("MLFLOW_TRACKING_URI", database)
        try:
            self._client = MlflowClient(where)
            self._run: str = kept(folder).get("mlflow") or keep(folder, "mlflow", self._create())
            self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            raise Fault(
                f"metrics.enable_mlflow = true with MLFLOW_TRACKING_URI = '{where}': {error}"
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        metrics = [self._metric(name, v, self._when_ms, step) for name, v in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run, end_time=self._when_ms)

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan_dp")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        return str(self._client.create_run(experiment, start_time=self._when_ms).info.run_id)


def kept(folder: str) -> dict[str, Any]:
    """Return what earlier starts kept for trackers: the runs' names, their time, what was sent."""
    path = Path(folder, _KEPT_FILE)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def keep(folder: str, name: str, value: Any) -> Any:
    """Keep a value for later starts, and return it."""
    content = json.dumps({**kept(folder), name: value}, indent=2)
    write_atomically(os.path.join(folder, _KEPT_FILE), content.encode() + b"\n")
    return value


class PublicLines(BaseLogger):
    """`public.jsonl`: the public scalars of each logged step, and the trackers that get them.

    `trackers` open, by their key in the configuration, with the folder and the time of all steps.
    """

    def __init__(
        self, folder: str, step: int, trackers: Mapping[str, type[WandB | MLflow]]
    ) -> None:
        self._folder, self._trackers = folder, trackers
        self._path = os.path.join(folder, PUBLIC_FILE)
        taken = {n: line for n, line in self._read().items() if n <= step}
        # Lines of later steps, which a crash took back, go.
        text = "".join(json.dumps(line) + "\n" for line in taken.items())
        write_atomically(self._path, text.encode())

    def log(self, metrics: dict[str, float], step: int) -> None:
        public = {n: value for n, value in metrics.items() if n.startswith(f"{PUBLISHABLE}/")}
        if public:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps((step, public)) + "\n")
                file.flush()
                os.fsync(file.fileno())  # as the checkpoint is: a gap would show where it crashed

    def send(self) -> None:
        """Send each tracker the lines that it does not have; one that fails gets them next time."""
        lines = self._read()
        for key, open_tracker in self._trackers.items():
            sent = f"{key}: last step sent"
            new = {n: line for n, line in lines.items() if n > kept(self._folder).get(sent, -1)}
            if not new:
                continue
            try:
                when = kept(self._folder).get("time") or keep(self._folder, "time", time.time())
                tracker = open_tracker(self._folder, when)
                for step, line in new.items():
                    tracker.log(line, step)
                tracker.close()
            except (Exception, Fault) as error:  # of any kind: these are others' services
                words = f"{type(error).__name__}: {' '.join(str(error).split())}"
                logger.warning(f"{key}: not sent, after {words}; the same command sends it again")
            else:
                keep(self._folder, sent, max(new))
                logger.info(f"{key}: sent public scalars of {len(new)} steps")

    def _read(self) -> dict[int, dict[str, float]]:
        """Read the lines by step, in order; a step may have several."""
        lines: dict[int, dict[str, float]] = {}
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # torn by a crash, after the checkpoint
                    step, scalars = json.loads(line)
                    lines.setdefault(step, {}).update(scalars)
        return dict(sorted(lines.items()))


class Outlets(BaseLogger):
    """All sinks of a rank; they get scalars under the tags of their sections."""

    def __init__(self, sinks: list[BaseLogger], *, private: bool) -> None:
        self._sinks, self._private = sinks, private

    def send(self) -> None:
        """Send trackers what they get, once the planned steps are taken."""
        for sink in self._sinks:
            if isinstance(sink, PublicLines):
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
    sinks: list[BaseLogger] = []
    if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
        below = f"rank_{rank}" if metrics.save_for_all_ranks else ""
        sinks.append(TensorBoard(os.path.join(folder, metrics.save_tb_folder, below), step))
    every: dict[str, type[WandB | MLflow]] = {"enable_wandb": WandB, "enable_mlflow": MLflow}
    trackers = {f"metrics.{key}": of for key, of in every.items() if getattr(metrics, key)}
    if rank == 0 and trackers and private:
        sinks.append(PublicLines(folder, step, trackers))
        logger.info(f"{', '.join(trackers)}: sends public scalars at the last planned step")
    elif rank == 0 and trackers:
        logger.warning(f"{', '.join(trackers)}: this run is not private, so nothing is sent")
    return Outlets(sinks, private=private)
