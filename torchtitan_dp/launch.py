"""torchrun, whose workers may save a checkpoint when a scheduler ends the run.

    python -m torchtitan_dp.launch [torchrun's options] -m torchtitan_dp.train …
    python -m torchtitan_dp.launch --processes N [torchrun's options] -m torchtitan_dp.train …

torchrun itself answers SIGTERM by ending its workers within 30 s. Here SIGTERM and SIGUSR1 ask them
to stop after the step they are in (`distributed.stop`), and the exit code is then 75, EX_TEMPFAIL:
run the same command again, and it goes on (where the last step was done, it has nothing to do).

With `--processes`, for a run on this machine alone, the plan checks everything in this process
before N workers are started; `auto` is one for each CUDA device, or 2 on a machine without. A
user's mistake is then one line and exit code 2: torchrun would turn the line into 45 and 2 into 1.
This process opens no CUDA context, which would hold memory of a device beside its worker.
"""

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path

from torchtitan_dp.process import STOP_SIGNAL, Fault

EXIT_STOPPED = 75


def main(argv: list[str]) -> None:
    """Run the workers; SystemExit with `EXIT_STOPPED` if they were asked to stop, and did."""
    asked, checked = False, False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        workers = _children() if checked else []  # a check may have started a program of its own
        for pid in workers:
            os.kill(pid, STOP_SIGNAL)
        if not workers:  # too early: nothing has begun
            raise SystemExit(EXIT_STOPPED)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    processes, argv = _processes(argv)
    if processes is not None:
        _say("checking the configuration and the data…")
        argv = _checked(processes, argv)
    # Imported here: whoever waits for PyTorch has been told why.
    from torch.distributed import DistNetworkError, DistStoreError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    checked = True
    try:
        run.main(["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *argv])
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # which worker failed; a traceback of torchrun's adds nothing
        raise SystemExit(1) from None
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise Fault(
            f"another node's launcher is gone, or cannot be reached ({type(error).__name__}: "
            f"{error.__cause__ or error}): its own log has the reason; the same command resumes "
            "from the newest checkpoint"
        ) from error
    if asked:
        raise SystemExit(EXIT_STOPPED)


def _processes(argv: list[str]) -> tuple[str | None, list[str]]:
    """Take off `--processes N`, where that comes first: N, and all that follows."""
    if argv[:1] != ["--processes"]:
        return None, argv
    parser = argparse.ArgumentParser(prog="python -m torchtitan_dp.launch", allow_abbrev=False)
    parser.add_argument("--processes", metavar="N")
    return parser.parse_args(argv[:2]).processes, argv[2:]


def _checked(processes: str, argv: list[str]) -> list[str]:
    """Run the plan on the workers' own arguments; torchrun's arguments for so many workers.

    Raises:
        SystemExit: the plan found a mistake and has said which, or the devices cannot be used.
    """
    import torch

    from torchtitan_dp.config.load import exit_on_mistake
    from torchtitan_dp.distributed.devices import require_usable_devices

    with exit_on_mistake():
        require_usable_devices()
    if processes == "auto":
        processes = str(torch.cuda.device_count() or 2)
    module = argv.index("-m")
    _run_plan(["--world_size", processes, *argv[module + 2 :]])
    cores, workers = len(os.sched_getaffinity(0)), int(processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    _say(f"starting {workers} process{'es' if workers > 1 else ''}…")
    return ["--nproc_per_node", processes, *argv]


def _run_plan(argv: list[str]) -> None:
    """Run `python -m torchtitan_dp.plan` in this process, which needs PyTorch anyway."""
    before = sys.argv
    sys.argv = ["torchtitan_dp.plan", *argv]
    try:
        runpy.run_module("torchtitan_dp.plan", run_name="__main__")
    finally:
        sys.argv = before


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
