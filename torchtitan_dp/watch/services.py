"""Sinks in Weights & Biases and MLflow, which get scalars and nothing that their clients add.

The environment variables of each choose the rest. W&B: WANDB_MODE (`offline` writes into the run's
folder for `wandb sync`), WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME. MLflow: MLFLOW_TRACKING_URI (by
default a database in the run's folder), MLFLOW_EXPERIMENT_NAME. A folder is one run in each,
however often it is started; the run's names and its one time are kept in the folder. MLflow's
plain client is used: the functions on the module would add the user, the program's path and the
git commit, and measure the machine.
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_dp.process import Fault, write_atomically


class WandB:
    """One W&B run for all starts of the run in a folder; Fault where it cannot be reached.

    `time_of_all` is sent as the time of each step; None sends the times themselves, NOT PRIVATE.
    """

    def __init__(self, folder: str, *, time_of_all: float | None) -> None:
        import wandb

        self._time = time_of_all
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_dp"),
                dir=folder,
                id=kept_or(folder, "wandb", lambda: secrets.token_hex(8)),
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
        time_of_it = {} if self._time is None else {"_timestamp": self._time}
        self._run.log({**scalars, **time_of_it}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """As `WandB`; raises Fault where the tracking server cannot be reached."""

    def __init__(self, folder: str, *, time_of_all: float | None) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a step waits for them
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._time = Metric, time_of_all
        database = f"sqlite:///{Path(folder).resolve() / 'mlflow.db'}"
        where = os.environ.get("MLFLOW_TRACKING_URI", database)
        try:
            self._client = MlflowClient(where)
            self._run: str = kept_or(folder, "mlflow", self._create)
            self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            raise Fault(
                f"metrics.enable_mlflow = true with MLFLOW_TRACKING_URI = '{where}': {error}"
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        when = self._now()  # records' lengths follow from the time of a step
        metrics = [self._metric(_allowed(name), v, when, step) for name, v in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run, end_time=self._now())

    def _now(self) -> int:
        return round(1000 * (time.time() if self._time is None else self._time))

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan_dp")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(experiment, start_time=self._now())
        return str(run.info.run_id)


def _allowed(name: str) -> str:
    """Write a tag in MLflow's alphabet, which has no brackets and no percent sign."""
    return name.replace("(%)", "_percent").replace("(", "_").replace(")", "")


FILE = "watch.json"


def kept_or(folder: str, name: str, make: Callable[[], Any]) -> Any:
    """Return what is kept under a name, made and kept at the first call."""
    if name not in kept(folder):
        keep(folder, **{name: make()})
    return kept(folder)[name]


def keep(folder: str, **values: Any) -> None:
    """Keep values for later starts."""
    content = json.dumps({**kept(folder), **values}, indent=2)
    write_atomically(os.path.join(folder, FILE), content.encode() + b"\n")


def kept(folder: str) -> dict[str, Any]:
    """Return what earlier starts kept."""
    path = Path(folder, FILE)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
