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
from torchtitan_dp.watch.terminal import SOCKET, clock


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


def samples_words(statistics: dict[str, float]) -> str:
    """Write what the samples of a step were; not private."""
    batch, rejected = statistics["realized_batch_size"], statistics["rejected"]
    if not batch:
        return "batch: 0 (an empty draw)"
    if batch == rejected:
        return f"batch: {batch:.0f}, all left out (not finite)"
    lost = f"  left out (not finite): {rejected:.0f}" if rejected else ""
    return (
        f"loss: {statistics['loss']:.4f}  batch: {batch:.0f}{lost}  "
        f"clipped: {100 * statistics['clipped_fraction']:.0f}%  "
        f"norm p50: {statistics['norm_p50']:.3g}"
    )


def speed_words(scalars: dict[str, float]) -> str:
    """Write memory, tokens a second, and MFU where it is known."""
    mfu = f"  mfu: {scalars['mfu(%)']:.1f}%" if "mfu(%)" in scalars else ""
    memory = f"memory: {scalars['memory/max_reserved(GiB)']:.2f}GiB"
    return f"{memory}  tps: {round(scalars['throughput(tps)']):,}{mfu}"


def pace_words(pace: Pace) -> str:
    """Write the seconds of a step and the time left."""
    seconds = pace.seconds_per_step
    shown = "?" if seconds is None else f"{seconds:.3g}"
    return f"s/step: {shown}  ETA: {clock(pace.seconds_left)}"


def bar_epsilon(scalars: dict[str, float]) -> str:
    """Write epsilon so far and at the end as short as a terminal's width asks for."""
    if "epsilon" not in scalars:
        return ""
    planned = scalars.get("epsilon_planned")
    at_end = "" if planned is None else f" of {rounded_up(planned, 3)}"
    return f"ε {rounded_up(scalars['epsilon'], 3)}{at_end}"


def bar_speed(pace: Pace, scalars: dict[str, float]) -> str:
    """Write speed and memory as short."""
    words = []
    if pace.seconds_per_step is not None:
        words.append(f"{pace.seconds_per_step:.3g} s/step")
    if scalars:
        words.append(f"{round(scalars['throughput(tps)']):,} tps")
        words.extend([f"mfu {scalars['mfu(%)']:.1f}%"] if "mfu(%)" in scalars else [])
        words.append(f"{scalars['memory/max_reserved(GiB)']:.1f} GiB")
    return "  ".join(words)


class Screen:
    """The bar on the launcher's terminal, as rank 0 sends it; nothing elsewhere."""

    def __init__(self, path: str | None) -> None:
        """
        Args:
            path: of the launcher's socket, if it draws a bar.
        """
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        self._scalars: dict[str, float] = {}

    @classmethod
    def of_launcher(cls) -> "Screen":
        """Build that of this process."""
        return cls(os.environ.get(SOCKET) if os.environ.get("RANK") == "0" else None)

    def logged(self, scalars: dict[str, float]) -> None:
        """Take over the scalars of the newest step that was logged."""
        self._scalars = scalars

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
            "public": bar_epsilon(self._scalars),
            "private": "  ".join(filter(None, (within, bar_speed(pace, self._scalars)))),
        }
        # Where its launcher is suspended, or ends, a picture is missed: no step waits for it.
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps(state).encode(), socket.MSG_DONTWAIT, self._path or "")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
