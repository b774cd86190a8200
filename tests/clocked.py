"""Runs one job of a scheduler in a process forked for it, by a clock of the tokens trained on."""

import json
import os
from pathlib import Path
from typing import Any

from tests import neighbours
from torchtitan_dp.train import check, outlets
from torchtitan_dp.train import trainer as train

CRASH = 137


class Recorder:
    """A service that keeps what it gets of a run in a file beside its folder."""

    def __init__(self, folder: str, when: float) -> None:
        self._path = Path(f"{folder}.sent")

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._write(step, scalars)

    def close(self) -> None:
        self._write("closed", {})

    def _write(self, *line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def job(_connection: Any, argv: list[str], log: Path, limit: int, crashes_at: int | None) -> None:
    """Train until the end, or until the clock shows `limit`, which asks for a stop, or a crash."""

    class Clocked(train.DPTrainer):
        """A trainer whose steps take as long as their samples are."""

        shown, started = 0, False

        def accumulate(self, microbatch: Any, statistics: Any) -> None:
            super().accumulate(microbatch, statistics)
            self.shown += microbatch.labels_BT.numel()
            if crashes_at is not None and self.started and self.shown >= crashes_at:
                os._exit(CRASH)

        def should_continue_training(self) -> bool:
            if self.shown >= limit:
                self.stop._asked.set()  # as STOP_SIGNAL does
            return super().should_continue_training()

        def batch_generator(self, data_iterable: Any) -> Any:
            feed = super().batch_generator(data_iterable)
            self.shown, self.started = 0, True  # rehearsals are alike
            return feed

    train.DPTrainer = Clocked  # type: ignore[misc]
    outlets.WandB = Recorder  # type: ignore[assignment,misc]
    check.check_packages = lambda config: None
    os._exit(neighbours.ended(argv, None, True, True, log))
