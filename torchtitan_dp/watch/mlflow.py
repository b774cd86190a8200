"""A run's scalars in MLflow, and nothing that its client adds by itself.

Its environment variables choose the rest: MLFLOW_TRACKING_URI (by default a database in the run's
folder), MLFLOW_EXPERIMENT_NAME. The plain client is used: the functions on the module would add the
user, the program's path and git's commit, and measure the machine.
"""

import os
import time
from pathlib import Path

from torchtitan_dp.process import Fault
from torchtitan_dp.watch.names import keep_name, name_of


class MLflow:
    """One MLflow run for all starts of a run."""

    def __init__(self, folder: str, *, with_times: bool) -> None:
        """
        Args:
            folder: the run's.
            with_times: send when each step was taken, which is not private.

        Raises:
            Fault: the tracking server cannot be reached.
        """
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a step waits for them
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._with_times, self._begun = Metric, with_times, _now()
        database = f"sqlite:///{Path(folder).resolve() / 'mlflow.db'}"
        where = os.environ.get("MLFLOW_TRACKING_URI", database)
        try:
            self._client = MlflowClient(where)
            self._run = name_of(folder, "mlflow") or self._create(folder)
            self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            raise Fault(
                f"metrics.enable_mlflow = true with MLFLOW_TRACKING_URI = '{where}': {error}"
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        # Records' lengths follow from the time of a step.
        when = _now() if self._with_times else self._begun
        metrics = [self._metric(_allowed(name), v, when, step) for name, v in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run, end_time=_now() if self._with_times else self._begun)

    def _create(self, folder: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan_dp")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(experiment, start_time=self._begun)
        keep_name(folder, "mlflow", run.info.run_id)
        return str(run.info.run_id)


def _now() -> int:
    return round(1000 * time.time())


def _allowed(name: str) -> str:
    """Write a tag in MLflow's alphabet, which has no brackets and no percent sign."""
    return name.replace("(%)", "_percent").replace("(", "_").replace(")", "")
