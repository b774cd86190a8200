"""Waits for this process's other threads: gloo's hold what they sent until after it has arrived.

Whoever waits for a collective goes on as soon as it is done. The thread that ran it lets go of its
tensors a little later, on a busy machine much later; tests that count tensors wait for that.
"""

import threading
import time
from pathlib import Path

LIMIT_S = 60.0
_ROUNDS = 3


def let_go() -> None:
    """Return when every other thread was seen asleep (Linux), with its work done, and again.

    While this thread sleeps, those that need the interpreter to free a tensor can have it.
    """
    deadline = time.monotonic() + LIMIT_S
    for _ in range(_ROUNDS):
        awake = _others()
        while awake:
            assert time.monotonic() < deadline, f"{len(awake)} threads never sleep"
            time.sleep(0.002)
            awake = {task for task in awake & _others() if _state(task) != "S"}


def _others() -> set[Path]:
    return {
        t for t in Path("/proc/self/task").iterdir() if int(t.name) != threading.get_native_id()
    }


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended meanwhile
        return "S"
