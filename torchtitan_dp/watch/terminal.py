"""The launcher's terminal: workers' lines, and below them one bar that moves.

The launcher alone writes to the terminal: two processes would tear each other's lines. It names a
socket in its workers' environment, draws what rank 0 sends there (`Screen`), and prints workers'
lines, which torchrun copies, above.
"""

import contextlib
import io
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SOCKET = "TORCHTITAN_DP_PROGRESS"
"""The variable with the path of the launcher's socket, in the environment of its workers."""
_LONGEST_PATH = 100  # of a socket: the kernel allows 107 bytes
_BAR_WIDTH = 12
_ERASE_AND_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"


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


class Screen:
    """The bar on the launcher's terminal, as rank 0 sends it; nothing elsewhere."""

    def __init__(self, path: str | None) -> None:
        self._path = path  # of the launcher's socket, if it draws a bar
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None

    @classmethod
    def of_launcher(cls) -> "Screen":
        """Build this process's screen, which the launcher draws if this is rank 0."""
        return cls(os.environ.get(SOCKET) if os.environ.get("RANK") == "0" else None)

    def show(self, pace: Pace, part: float, public: str, private: str) -> None:
        """Draw the present state: `part`, from 0 to 1, of the step that is under way, and words."""
        if self._socket is None:
            return
        steps = {"done": pace.done, "total": pace.total, "part": part, "left": pace.seconds_left}
        state = {**steps, "public": public, "private": private}
        # Where its launcher is suspended, or ends, a picture is missed: no step waits for it.
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps(state).encode(), socket.MSG_DONTWAIT, self._path or "")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


@contextlib.contextmanager
def bar() -> Iterator[None]:
    """Draw the run's progress below its lines, where stdout is a terminal that can."""
    console = Console(file=sys.stdout)
    longest = len(tempfile.gettempdir()) + len("/torchtitan_dp_12345678/progress")
    if not console.is_terminal or console.is_dumb_terminal or longest > _LONGEST_PATH:
        yield
        return
    path = os.path.join(tempfile.mkdtemp(prefix="torchtitan_dp_"), "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        os.environ[SOCKET] = path
        drawing = Drawing(console)
        threading.Thread(target=drawing.follow, args=(receiver,), daemon=True).start()
        before = sys.stdout, sys.stderr
        sys.stdout = Above(console, before[0])  # type: ignore[assignment]
        if before[1].isatty():
            sys.stderr = Above(console, before[1])  # type: ignore[assignment]
        try:
            yield
        finally:
            drawing.stop()
            del os.environ[SOCKET]
            sys.stdout, sys.stderr = before
            _remove(path)


def leave() -> None:
    """Leave the terminal as it was, where the process ends at once; a signal's handler may."""
    if (path := os.environ.get(SOCKET)) is None:
        return
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(sys.stdout.fileno(), _ERASE_AND_SHOW_CURSOR.encode())
    _remove(path)


def _remove(path: str) -> None:
    """Remove the socket and its folder."""
    with contextlib.suppress(OSError):  # somebody cleaned up before
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


class Drawing:
    """One line at the bottom of the terminal: the newest state of the run."""

    def __init__(self, console: Console) -> None:
        self._state: dict[str, Any] = {}
        self._begun = self._heard = time.monotonic()
        self._lock, self._stopped = threading.Lock(), False
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def follow(self, receiver: socket.socket) -> None:
        """Draw the states that arrive, until the socket is closed."""
        while True:
            try:
                message = receiver.recv(65536)
            except OSError:  # closed: the run has ended
                return
            self.show(json.loads(message))

    def show(self, state: dict[str, Any]) -> None:
        """Draw a state from now on, unless the drawing was stopped."""
        with self._lock:
            if self._stopped:
                return
            first, self._state, self._heard = not self._state, state, time.monotonic()
            if first:
                self._begun = self._heard
                self._live.start(refresh=True)

    def stop(self) -> None:
        """Erase the line, and show the cursor again."""
        with self._lock:
            self._stopped = True
            self._live.stop()

    def render(self) -> Table:
        """Lay out the line; the words at its end give way on a narrow terminal."""
        state, now = self._state, time.monotonic()
        left = state.get("left")
        left = None if left is None else max(0.0, left - (now - self._heard))
        done, total = state.get("done", 0), state.get("total", 1)
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append(f"{state['public']}  " if state.get("public") else "", "blue")
        words.append(f"not private: {clock(now - self._begun)}  ETA {clock(left)}  ", "cyan")
        words.append(state.get("private", ""), "dim")
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(width=_BAR_WIDTH)
        row.add_column(ratio=1, no_wrap=True)
        bar = ProgressBar(total=total, completed=done + state.get("part", 0.0), width=_BAR_WIDTH)
        row.add_row(Text(f"step {done}/{total}", "red"), bar, words)
        return row


class Above(io.TextIOBase):
    """A file that prints whole lines above the drawing."""

    def __init__(self, console: Console, terminal: Any) -> None:
        self._console, self._terminal, self._begun = console, terminal, ""
        self._lock = threading.RLock()  # torchrun copies in threads; a signal's handler prints too

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: whole lines are printed at once."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._terminal.fileno())
