"""Sinks in Weights & Biases and MLflow, which get scalars and nothing that their clients add.

Environment variables of each choose the rest. W&B: WANDB_MODE (`offline` writes into the run's
folder for `wandb sync`), WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME. MLflow: MLFLOW_TRACKING_URI (by
default a database in the run's folder), MLFLOW_EXPERIMENT_NAME. A folder is one run in each,
however often it is started.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from torchtitan_dp.process import Fault, write_atomically

_FILE = "watch.json"


class Tracker(Protocol):
    """Keeps public scalars, by tag."""

    def log(self, scalars: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class WandB:
    """One W&B run of a folder, each of whose steps gets the same time; Fault where it cannot be
    reached."""

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
    path = Path(folder, _FILE)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def keep(folder: str, name: str, value: Any) -> Any:
    """Keep a value for later starts, and return it."""
    content = json.dumps({**kept(folder), name: value}, indent=2)
    write_atomically(os.path.join(folder, _FILE), content.encode() + b"\n")
    return value
