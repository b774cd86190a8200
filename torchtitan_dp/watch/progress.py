"""How far a run is: its pace, the console line of a step, and what the launcher's terminal shows.

A worker's output is copied line by line by torchrun, so it cannot draw on the person's terminal.
Where the launcher has one (`terminal`), it names a socket in the environment, and rank 0 sends it
what to draw.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.watch.terminal import SOCKET


@dataclass
class Pace:
    """The steps of this start and the time that they took, which is not private."""

    first: int  # the step before the first of this start
    total: int
    now: Callable[[], float] = time.monotonic
    done: int = field(init=False)

    def __post_init__(self) -> None:
        self.done, self._begun, self._first_done = self.first, self.now(), 0.0

    def step_done(self, step: int) -> None:
        """Note that a step was taken."""
        self.done = step
        if step == self.first + 1:
            self._first_done = self.now()

    @property
    def seconds_per_step(self) -> float | None:
        """The mean, with validation and checkpoints, but without the first step, which compiles,
        where there is another; None before the first."""
        steps = self.done - self.first
        if steps == 0:
            return None
        if steps == 1:
            return self._first_done - self._begun
        return (self.now() - self._first_done) / (steps - 1)

    @property
    def seconds_left(self) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * (self.total - self.done)


def epsilon_words(scalars: dict[str, float], beside: str) -> str:
    """Write epsilon so far and at the end, rounded up."""
    planned = scalars.get("epsilon_planned")
    words = f"{rounded_up(planned)} at the end" if planned is not None else ""
    beside = ", ".join(filter(None, (words, beside)))
    return f"epsilon: {rounded_up(scalars['epsilon'])}{f' ({beside})' if beside else ''}"


def speed_words(scalars: dict[str, float]) -> str:
    """Write tokens a second, MFU where it is known, and memory."""
    mfu = f"mfu: {scalars['mfu(%)']:.1f}%  " if "mfu(%)" in scalars else ""
    memory = f"memory: {scalars['memory/max_reserved(GiB)']:.2f}GiB"
    return f"tps: {round(scalars['throughput(tps)']):,}  {mfu}{memory}"


def pace_words(pace: Pace) -> str:
    """Write the seconds of a step."""
    seconds = pace.seconds_per_step
    return f"s/step: {'?' if seconds is None else f'{seconds:.3g}'}"


class Screen:
    """The bar on the launcher's terminal, as rank 0 sends it; nothing elsewhere."""

    def __init__(self, path: str | None) -> None:
        """
        Args:
            path: of the launcher's socket, if it draws a bar.
        """
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        self.public, self.private = "", ""  # words of the newest step that was logged

    @classmethod
    def of_launcher(cls) -> "Screen":
        """Build that of this process."""
        return cls(os.environ.get(SOCKET) if os.environ.get("RANK") == "0" else None)

    def show(self, pace: Pace, part: float, within: str) -> None:
        """Draw the present state.

        Args:
            part: of the step that is under way, from 0 to 1.
            within: words about it.
        """
        if self._socket is None:
            return
        state = {
            "done": pace.done,
            "total": pace.total,
            "part": part,
            "left": pace.seconds_left,
            "public": self.public,
            "private": "  ".join(filter(None, (within, self.private))),
        }
        # Where its launcher is suspended, or ends, a picture is missed: no step waits for it.
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps(state).encode(), socket.MSG_DONTWAIT, self._path or "")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
