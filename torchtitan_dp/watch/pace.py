"""The pace of a run: the time of its steps, and the time left. Neither is private."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta


def clock(seconds: float | None) -> str:
    """Write a time as h:mm:ss, `?` where it is unknown."""
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))


@dataclass
class Pace:
    """The steps of this start and the time that they took, which is not private."""

    before: int  # the last step before this start
    total: int
    now: Callable[[], float] = time.monotonic
    done: int = field(init=False)

    def __post_init__(self) -> None:
        self.done, self._begun, self._first_done = self.before, self.now(), 0.0

    def step_done(self, step: int) -> None:
        """Note that a step was taken."""
        self.done = step
        if step == self.before + 1:
            self._first_done = self.now()

    @property
    def seconds_per_step(self) -> float | None:
        """The mean, with validation and checkpoints, but without the first step, which compiles,
        where there is another; None before the first."""
        steps = self.done - self.before
        if steps == 0:
            return None
        if steps == 1:
            return self._first_done - self._begun
        return (self.now() - self._first_done) / (steps - 1)

    @property
    def seconds_left(self) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * (self.total - self.done)
