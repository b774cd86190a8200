"""torchrun, whose workers may save a checkpoint when a scheduler ends the run.

    python -m torchtitan_dp.launch [torchrun's options] -m torchtitan_dp.train …
    python -m torchtitan_dp.launch --processes N [torchrun's options] -m torchtitan_dp.train …

torchrun itself answers SIGTERM by ending its workers within 30 s. Here SIGTERM, SIGUSR1, SIGHUP
(its terminal is gone; nohup ignores that) and Ctrl-C (SIGINT) ask them to stop after the step they
are in (`distributed.stop`), and the exit code is then 75, EX_TEMPFAIL, on every node, whichever was
asked: run the same command again, and it resumes (where the last step was done, it has nothing to
do). Before a worker listens nothing has begun, and all end at once. A second Ctrl-C does so at any
time, with exit code 130.

With `--processes`, for a run on this machine alone, the plan checks everything in this process
before N workers are started; `auto` is one for each CUDA device, or 2 on a machine without. A
user's mistake is then one line and exit code 2: torchrun would turn the line into 45 and 2 into 1.
This process opens no CUDA context, which would take memory of its worker's device.
"""

import contextlib
import errno
import os
import signal
import sys
import tempfile
import termios
from pathlib import Path
from typing import NoReturn

from torchtitan_dp.process import PLANNED, STOP_SIGNAL, STOPPED_FILE, Fault

EXIT_STOPPED = 75


def main(argv: list[str]) -> None:
    """Run the workers; SystemExit with `EXIT_STOPPED` if they were asked to stop, and did."""
    signals = Signals()
    signals.handle()
    processes, argv = _processes(argv)
    if processes is not None:
        _leave_other_nodes()
        _say("checking the configuration and the data…")
        argv, signals.folder = _checked(processes, argv)
    if not sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")  # workers, whose output is copied, cannot see it
    signals.checked = True
    if _run(argv, signals.folder) or signals.asked:
        raise SystemExit(EXIT_STOPPED)


class Signals:
    """Answers signals: workers that listen are asked to stop; before one does, all end at once."""

    def __init__(self) -> None:
        self.asked, self.checked, self.folder = False, False, ""
        self._pressed = False

    def handle(self) -> None:
        """Answer these signals from now on."""
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._answer)

    def _answer(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _do_without_lost_terminal()
        self.asked = True
        workers = _children() if self.checked else []  # a check may have started its own programs
        listening = [pid for pid in workers if _listens(pid)]
        if number == signal.SIGINT:
            self._answer_key(workers, listening)
        _send(listening, STOP_SIGNAL)  # others have ended, or are still starting, and will agree
        if not listening:  # too early: nothing has begun
            _end(workers, EXIT_STOPPED)

    def _answer_key(self, workers: list[int], listening: list[int]) -> None:
        """Say what Ctrl-C does; pressed again, it ends all at once."""
        again, self._pressed = self._pressed, True
        if again:
            _say(f"\nCtrl-C: stopped at once; {_goes_on(self.folder)}")
            _end(workers, 128 + signal.SIGINT)
        if listening:
            _say(
                "\nCtrl-C: finishing the step and saving; press it again to stop at once (loses "
                f"the steps since {_newest(self.folder) or 'the start'})"
            )
        else:
            _say(f"\nCtrl-C: stopped; {_goes_on(self.folder)}" if workers else "\nCtrl-C: stopped")


def _run(argv: list[str], folder: str) -> bool:
    """Run torchrun; return whether a worker, of any node, was asked to stop, and did."""
    # Imported here, after the first line is printed: importing PyTorch takes seconds.
    from torch.distributed import DistNetworkError, DistStoreError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        with tempfile.NamedTemporaryFile(prefix="torchtitan_dp_stopped_") as stopped:
            os.environ[STOPPED_FILE] = stopped.name
            run.main(["--signals-to-handle", "SIGQUIT", *argv])
            return bool(stopped.read())
    except ChildFailedError as error:
        _say(str(error))  # which worker failed; a traceback of torchrun's adds nothing
        if error.get_first_failure()[1].exitcode < 0:  # killed: no fault of the run's
            _say(_goes_on(folder))
        raise SystemExit(1) from None
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise Fault(
            f"another node's launcher is gone, or cannot be reached ({type(error).__name__}: "
            f"{error.__cause__ or error}): its own log has the reason; the same command resumes "
            "from the newest checkpoint"
        ) from error


def _processes(argv: list[str]) -> tuple[str | None, list[str]]:
    """Take off `--processes N`, where that comes first: N, and all that follows."""
    if argv[:1] != ["--processes"]:
        return None, argv
    if len(argv) == 1:
        print("error: --processes: give a number, or auto", file=sys.stderr)
        raise SystemExit(2)
    return argv[1], argv[2:]


def _leave_other_nodes() -> None:
    """Take torchrun's variables, which a PyTorchJob of Kubernetes sets, from the environment; exit
    with code 2 where they say that this is one machine of several, for which it would wait."""
    nodes = os.environ.get("PET_NNODES", "1")
    if {*nodes.split(":")} != {"1"}:
        print(
            f"error: PET_NNODES = '{nodes}': this command trains on one machine; unset it, or "
            "start python -m torchtitan_dp.launch on each (docs/clusters.md)",
            file=sys.stderr,
        )
        raise SystemExit(2)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]


def _checked(processes: str, argv: list[str]) -> tuple[list[str], str]:
    """Run the plan on the workers' own arguments; return torchrun's arguments for so many workers,
    and the folder of their checkpoints.

    Raises:
        SystemExit: the plan found and printed a mistake, or the devices cannot be used.
    """
    from torchtitan_dp.config.load import exit_on_mistake, load_config

    module = argv.index("-m")
    with exit_on_mistake():  # before PyTorch, which takes seconds to import
        load_config(argv[module + 2 :], None if processes == "auto" else int(processes))

    from torchtitan_dp.checkpoint.folder import checkpoint_folder
    from torchtitan_dp.distributed.devices import (
        cuda_devices,
        default_processes,
        missing_devices,
        require_usable_devices,
    )

    with exit_on_mistake():
        require_usable_devices()
    if (warning := missing_devices()) is not None:
        _say(warning)
    if processes == "auto":
        processes = str(default_processes())
    here = ["--world_size", processes, "--ranks_here", processes]
    argv = [*argv, *_run_plan([*here, *argv[module + 2 :]])]
    os.environ[PLANNED] = "1"
    folder = checkpoint_folder(load_config(argv[module + 2 :], int(processes)))
    cores, workers = len(os.sched_getaffinity(0)), int(processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    where = "" if cuda_devices() else " on the CPU"
    _say(f"starting {workers} process{'es' if workers > 1 else ''}{where}…")
    return ["--nproc_per_node", processes, *argv], folder


def _run_plan(argv: list[str]) -> list[str]:
    """Run the plan in this process, which needs PyTorch anyway; return what it has chosen."""
    from torchtitan_dp.plan.__main__ import main

    return main(argv)


def _newest(folder: str) -> str:
    """Name the newest whole checkpoint in a folder, "" if there is none; where no plan was run, the
    folder is not known."""
    if not folder:
        return "the newest checkpoint"
    from torchtitan_dp.checkpoint.folder import newest_finished_checkpoint

    step = newest_finished_checkpoint(folder)
    return f"step-{step}" if step >= 0 else ""


def _goes_on(folder: str) -> str:
    newest = _newest(folder)
    return f"the same command resumes from {newest}" if newest else "the same command starts again"


def _end(workers: list[int], code: int) -> NoReturn:
    """End this process, and its workers without waiting for them, as torchrun would."""
    _send(workers, signal.SIGKILL)
    if workers:
        os._exit(code)
    raise SystemExit(code)


def _do_without_lost_terminal() -> None:
    """Redirect streams of a terminal that is gone to /dev/null: each write to it would fail."""
    for stream in range(3):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # else it is a file
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, number)


def _listens(pid: int) -> bool:
    """Return whether a process handles `STOP_SIGNAL`, which would kill it otherwise (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended meanwhile
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (STOP_SIGNAL - 1) & 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _children() -> list[int]:
    """List the processes that this one has started and that live (Linux)."""
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
