"""A run's scalars in Weights & Biases, and nothing that its client sends by itself.

W&B's own environment variables choose the rest: WANDB_MODE (`offline` writes into the run's folder
for `wandb sync`), WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME.
"""

import os
import time
from typing import Any

from torchtitan_dp.process import Fault
from torchtitan_dp.watch.names import kept_name


class WandB:
    """One W&B run for all starts of a run."""

    def __init__(self, folder: str, *, with_times: bool) -> None:
        """
        Args:
            folder: the run's.
            with_times: send when each step was taken, which is not private.

        Raises:
            Fault: W&B cannot be reached, or knows no key of the user's.
        """
        import wandb

        self._time = None if with_times else time.time()
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_dp"),
                dir=folder,
                id=kept_name(folder, "wandb"),
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
