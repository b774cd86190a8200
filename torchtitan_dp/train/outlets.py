"""Every scalar that a run logs, whether it may be published, and where it goes.

TensorBoard gets all scalars, in two sections. `public.jsonl` gets the public ones, and Weights &
Biases gets the lines of that file, once, when the planned steps are taken. Its environment
variables choose the rest: WANDB_MODE (`offline` writes into the run's folder for `wandb sync`),
WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME. A folder is one W&B run, however often it is started.

Guarantee:
    - A public scalar follows from the configuration, the number of steps and the ledger alone. All
      others depend on records without noise, if only by the time that a step took; a scalar that
      the table lacks is treated as one of those. In a run that is not private nothing is public.
    - W&B gets public scalars alone, as one uninterrupted job would send them: no times of
      steps, no step that was lost, nothing that shows starts (hazard row 73).
"""

import contextlib
import json
import os
import secrets
import time
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
                f"metrics.enable_wandb = true: {error}; `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        # Without a time W&B adds the present one, and records' lengths follow from a step's.
        self._run.log({**scalars, "_timestamp": self._when}, step=step)

    def close(self) -> None:
        self._run.finish()


def kept(folder: str) -> dict[str, Any]:
    """Return what earlier starts kept for W&B: the run's name, its time, the last step sent."""
    path = Path(folder, _KEPT_FILE)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def keep(folder: str, name: str, value: Any) -> Any:
    """Keep a value for later starts, and return it."""
    content = json.dumps({**kept(folder), name: value}, indent=2)
    write_atomically(os.path.join(folder, _KEPT_FILE), content.encode() + b"\n")
    return value


class PublicLines(BaseLogger):
    """`public.jsonl`: the public scalars of each logged step, which W&B gets."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder = folder
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
        """Send W&B the lines that it does not have; where that fails it gets them next time."""
        sent, lines = "last step sent", self._read()
        new = {n: line for n, line in lines.items() if n > kept(self._folder).get(sent, -1)}
        if not new:
            return
        try:
            when = kept(self._folder).get("time") or keep(self._folder, "time", time.time())
            run = WandB(self._folder, when)
            for step, line in new.items():
                run.log(line, step)
            run.close()
        except (Exception, Fault) as error:  # of any kind: this is another's service
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            logger.warning(f"metrics.enable_wandb: not sent, after {words}; a rerun sends it again")
        else:
            keep(self._folder, sent, max(new))
            logger.info(f"metrics.enable_wandb: sent public scalars of {len(new)} steps")

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
        """Send W&B its lines, once the planned steps are taken."""
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
    if metrics.enable_tensorboard and rank == 0:
        sinks.append(TensorBoard(os.path.join(folder, metrics.save_tb_folder), step))
    if rank == 0 and metrics.enable_wandb and private:
        sinks.append(PublicLines(folder, step))
        logger.info("metrics.enable_wandb: sends public scalars at the last planned step")
    elif rank == 0 and metrics.enable_wandb:
        logger.warning("metrics.enable_wandb: this run is not private, so nothing is sent")
    return Outlets(sinks, private=private)
