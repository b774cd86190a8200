"""torchrun, whose workers may save a checkpoint when a scheduler ends the run.

    python -m torchtitan_dp.launch [torchrun's options] -m torchtitan_dp.train …
    python -m torchtitan_dp.launch --processes N [torchrun's options] -m torchtitan_dp.train …

SIGTERM, SIGUSR1, SIGHUP (its terminal is gone; nohup ignores that) and Ctrl-C (SIGINT) ask the
workers to stop after the step they are in (`distributed.agreement`); the exit code is then 75,
EX_TEMPFAIL, on every node, whichever was asked. Rerun the same command to resume. A signal that
arrives before a worker listens ends all at once: no step has started yet. A second Ctrl-C does so
at any time, with exit code 130.

torchrun's own forwarding (`--signals-to-handle`) is off: up to torch 2.11 it kills workers after
30 s, and it does not tell a failed save from one that succeeded.

With `--processes`, for a run on this machine alone, the plan checks everything in this process
before N workers are started (`auto`: one for each CUDA device, or 2 on a machine without). A user's
mistake is then one line and exit code 2: torchrun would turn the line into 45 and 2 into 1.
"""

import contextlib
import errno
import gc
import os
import shutil
import signal
import sys
import tempfile
import termios
from pathlib import Path

from torchtitan_dp.base.process import (
    PLANNED,
    STOP_SIGNAL,
    STOPPED_FILE,
    Fault,
    forbid_core_dumps,
    progress,
)
from torchtitan_dp.config.load import check_paths, exit_on_mistake, fail, load_config

EXIT_STOPPED = 75
_LAST_LINES = 20
_GOES_ON = "the same command resumes from the newest checkpoint"


def main(argv: list[str]) -> None:
    """Run the workers; SystemExit with `EXIT_STOPPED` if they were asked to stop, and did."""
    forbid_core_dumps()
    signals = Signals()
    signals.handle()
    if argv[:1] == ["--processes"] and len(argv) > 1:
        _leave_other_nodes()
        _say("checking the configuration and the data…")
        argv = _checked(argv[1], argv[2:])
    if not sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")  # workers, whose output is copied, cannot see it
    signals.checked = True
    # torchrun would leave the workers' output, which is not private, in a folder of its own.
    kept = tempfile.TemporaryDirectory(prefix="torchtitan_dp_", ignore_cleanup_errors=True)
    with kept as signals.logs:
        stopped = _run(argv, signals.logs)
    if stopped or signals.asked:
        raise SystemExit(EXIT_STOPPED)


class Signals:
    """Answers signals: workers that listen are asked to stop; before one does, all end at once."""

    def __init__(self) -> None:
        self.asked, self.checked, self._pressed = False, False, False
        self.logs = ""

    def handle(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self._answer)

    def _answer(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _do_without_lost_terminal()
        again = self._pressed and number == signal.SIGINT
        self.asked, self._pressed = True, self._pressed or number == signal.SIGINT
        # A check may have started its own programs. Workers that do not listen have ended, or are
        # still starting, and will agree with the others.
        lists = Path("/proc/self/task").glob("*/children") if self.checked else ()
        workers = [int(pid) for path in lists for pid in path.read_text().split()]
        listening = [pid for pid in workers if _listens(pid)]
        ends = again or not listening
        if number == signal.SIGINT:
            words = "finishing this step and saving; again: stop now, epsilon counts lost steps"
            _say(f"\nCtrl-C: {f'stopped; {_GOES_ON}, if any' if ends else words}")
        for pid in workers if ends else listening:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL if ends else STOP_SIGNAL)
        if ends and workers:
            shutil.rmtree(self.logs, ignore_errors=True)
            os._exit(128 + signal.SIGINT if again else EXIT_STOPPED)
        if ends:
            raise SystemExit(EXIT_STOPPED)


def _listens(pid: int) -> bool:
    """Return whether a process handles `STOP_SIGNAL`, which would kill it otherwise (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended meanwhile
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (STOP_SIGNAL - 1) & 1)


def _do_without_lost_terminal() -> None:
    """Redirect streams of a terminal that is gone to /dev/null: each write to it would fail."""
    for stream in range(3):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # else it is a file
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)


def _run(argv: list[str], logs: str) -> bool:
    """Run torchrun, whose workers' output goes below the folder `logs`; return whether a worker, of
    any node, was asked to stop, and did."""
    # Imported here, after the first line is printed: importing PyTorch takes seconds.
    from torch.distributed import DistNetworkError, DistStoreError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    stopped = Path(f"{logs}_stopped")  # beside it: a cleaner of /tmp may take an old empty folder
    os.environ[STOPPED_FILE] = str(stopped)
    asked = run.parse_args(["--signals-to-handle", "SIGQUIT", "--log-dir", logs, *argv])
    try:
        run.run(asked)
    except ChildFailedError as error:
        rank, shown = str(error.get_first_failure()[1].local_rank), asked.local_ranks_filter
        lines = _last_lines(asked.log_dir, rank)
        if shown and rank not in shown.split(","):
            _say("\n".join(f"[rank{rank}]: {line}" for line in lines))
        if not any(line.startswith("error: ") for line in lines):  # else it has said why
            _say(str(error))  # which worker failed; a traceback of torchrun's adds nothing
        if error.get_first_failure()[1].exitcode < 0:  # killed: no fault of the run's
            _say(_GOES_ON)
        raise SystemExit(1) from None
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise Fault(
            f"another node's launcher is gone, or cannot be reached ({type(error).__name__}: "
            f"{error.__cause__ or error}): its own log has the reason; {_GOES_ON}"
        ) from error
    was_stopped = stopped.exists()
    stopped.unlink(missing_ok=True)
    return was_stopped


def _last_lines(logs: str, local_rank: str) -> list[str]:
    """Return what a worker wrote last, where torchrun has kept it."""
    for log in sorted(Path(logs).glob(f"*/attempt_*/{local_rank}/stderr.log"))[-1:]:
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return []


def _leave_other_nodes() -> None:
    """Drop torchrun's variables, which a PyTorchJob of Kubernetes sets; exit with code 2 where they
    say that this is one machine of several, for which it would wait."""
    nodes = os.environ.get("PET_NNODES", "1")
    if {*nodes.split(":")} != {"1"}:
        fail(
            f"PET_NNODES = '{nodes}': this command trains on one machine; unset it, or start "
            "python -m torchtitan_dp.launch on each (docs/clusters.md)"
        )
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]


def _checked(processes: str, argv: list[str]) -> list[str]:
    """Run the plan on the workers' own arguments; return torchrun's arguments for so many workers.
    SystemExit if it found and printed a mistake, or the devices cannot be used."""
    given = argv[argv.index("-m") + 2 :]
    with exit_on_mistake():  # before PyTorch, which takes seconds to import
        check_paths(load_config(given, None if processes == "auto" else int(processes)))

    progress("importing PyTorch and Transformers…")
    gc.disable()  # a fifth of the seconds in which PyTorch and transformers are imported
    from torchtitan_dp.distributed import devices

    workers = devices.default_processes() if processes == "auto" else int(processes)
    with exit_on_mistake():
        devices.require_usable_devices()
        devices.require_so_many(workers)
    here = ["--world_size", str(workers), "--ranks_here", str(workers)]
    argv = [*argv, *_run_plan([*here, *given])]
    gc.enable()
    os.environ[PLANNED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    where = "" if devices.cuda_devices() else " on the CPU"
    _say(f"starting {workers} process{'es' if workers > 1 else ''}{where}…")
    return ["--nproc_per_node", str(workers), *argv]


def _run_plan(argv: list[str]) -> list[str]:
    """Run the plan in this process, which needs PyTorch anyway; return what it has chosen."""
    from torchtitan_dp.plan.__main__ import main

    return main(argv)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
