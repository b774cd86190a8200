"""Runs tests on a mutated copy of the package, without importing PyTorch for each.

    python -m tests.hazards.mutants.server

This process imports PyTorch, TorchTitan and what else the tests need, but nothing of this package
stays imported. For each job, a JSON line on stdin, it forks a child that runs pytest in the job's
folder, and answers with a JSON line on stdout.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.processes import forks

OURS = ("torchtitan_dp", "tests")
PRELOADED = (
    *forks.THIRD_PARTY,
    "pytest_timeout",
    "tensorboard.backend.event_processing.event_accumulator",
    "tests.build",  # for TorchTitan, which needs ours in order to import without a GPU
    "torchtitan_dp.train.trainer",
)


def prepare() -> None:
    """Import everything once; then forget what is ours, which each child imports from its copy.
    TorchTitan stays as `torchtitan_dp.distributed.cpu` has made it: no mutant changes that file."""
    forks.preload(*PRELOADED)
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not Path(entry or ".", "torchtitan_dp").is_dir()]


def run_tests(root: str, tests: list[str], report: str) -> int:
    """In the child: pytest's exit code."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half a second
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    code = int(pytest.main([*options, f"--junitxml={report}", *tests]))
    found = Path(importlib.import_module("torchtitan_dp").__path__[0]).resolve()
    assert found == Path(root, "torchtitan_dp").resolve(), f"{found} was tested"
    return code


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job to its end, or kill it and all its processes at its time limit."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        log = os.open(f"{job['place']}/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        root = job["root"]
        os.chdir(root)
        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = root
        code = 125
        try:
            with importlib.import_module("tests.processes.forks").forked_server(job["place"]):
                code = run_tests(root, job["tests"], f"{job['place']}/report.xml")
        except SystemExit:  # a process that the server forked has done its job
            raise
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)
    status: int | None = None
    while status is None and time.monotonic() - begun < job["timeout_s"]:
        ended, waited = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(waited)
        else:
            time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its workers; it too, if it was too slow
    if status is None:
        os.waitpid(pid, 0)
    return {"code": status, "seconds": time.monotonic() - begun}


def main() -> None:
    prepare()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
