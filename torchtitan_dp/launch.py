"""torchrun, whose workers may save a checkpoint when a scheduler ends the run.

    python -m torchtitan_dp.launch [torchrun's options] -m torchtitan_dp.train …

torchrun itself answers SIGTERM by ending its workers within 30 s. Here SIGTERM and SIGUSR1 ask them
to stop after the step they are in (`distributed.stop`), and the exit code is then 75, EX_TEMPFAIL:
run the same command again, and it goes on (where the last step was done, it has nothing to do).
"""

import os
import signal
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from torchtitan_dp.process import STOP_SIGNAL

EXIT_STOPPED = 75


def main(argv: list[str]) -> None:
    """Run the workers; SystemExit with `EXIT_STOPPED` if they were asked to stop, and did."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        workers = _children()
        for pid in workers:
            os.kill(pid, STOP_SIGNAL)
        if not workers:  # too early: nothing has begun
            raise SystemExit(EXIT_STOPPED)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    try:
        run.main(["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *argv])
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # which worker failed; a traceback of torchrun's adds nothing
        raise SystemExit(1) from None
    if asked:
        raise SystemExit(EXIT_STOPPED)


def _children() -> list[int]:
    """The processes that this one has started and that live (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
