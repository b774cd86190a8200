"""Runs neighbouring data sets under one memory limit, each in a process of its own.

    python -m tests.neighbours TASKS.json

Answers in JSON, a line a task: the exit code and what the run said last. The processes are forked
from this one, which has imported all there is to import, and have what torchrun would give them.
"""

import json
import os
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torchtitan_dp.train as train


def limit(headroom: int) -> None:
    """Allow this process `headroom` bytes more of address space than it has (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(argv: list[str], headroom: int | None, rehearsed: bool) -> None:
    """A worker's whole life; limited from the moment on in which it would rehearse."""
    real = train.rehearse

    def limited(trainer: Any) -> None:
        if headroom is not None:
            limit(headroom)
        if rehearsed:
            real(trainer)

    train.rehearse = limited
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train.main(argv)


def forked(task: dict[str, Any], log: Path) -> int:
    """In a child; its exit code."""
    pid = os.fork()
    if pid == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            run(task["argv"], task["headroom"], task["rehearsed"])
            code = 0
        except SystemExit as stop:
            print(stop.code, file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(path: str) -> None:
    for number, task in enumerate(json.loads(Path(path).read_text())):
        log = Path(f"{path}.{number}.log")
        code = forked(task, log)
        print(json.dumps([code, log.read_text(errors="replace")]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
