"""Stands in for torchrun and `torchtitan_dp.launch`: ranks forked from `tests.processes.forks`.

What a rank can tell is the same: its environment, a session and a log of its own, a launcher that
it dies with, a store at MASTER_ADDR. So is what the caller can tell: the prefixed output, SIGTERM
and SIGUSR1 that ask all ranks to stop, the exit codes.
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from torchtitan_dp.base.process import STOP_SIGNAL
from torchtitan_dp.launch import EXIT_STOPPED

GRACE_S = 5.0  # torchrun gives 30


def launch(
    connection: "Connection[Any, Any]",
    world_size: int,
    program: tuple[str, ...],
    argv: list[str],
    environment: dict[str, str],
    log: str,
) -> None:
    """Start the ranks, `("-m", module)` or `(file,)`; tell their ids, and watch them to the end."""
    os.environ.clear()
    os.environ.update(environment, TORCHTITAN_DP_LAUNCHER_PID=str(os.getpid()))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    ranks: dict[int, int] = {}
    outputs: list[int] = []
    for rank in range(world_size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            listening.close()
            for number in (1, 2):
                os.dup2(write, number)
            _be_rank(rank, world_size, port)
            _run(program, argv)
            return
        os.close(write)
        ranks[pid] = rank
        outputs.append(read)
    terms = {"is_master": True, "wait_for_workers": False}
    store = dist.TCPStore("127.0.0.1", port, master_listen_fd=listening.detach(), **terms)
    connection.send(list(ranks))
    raise SystemExit(_watch(ranks, outputs, store))


def _be_rank(rank: int, world_size: int, port: int) -> None:
    os.setsid()
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": str(True), "TORCHELASTIC_RUN_ID": "none"},
        TORCHELASTIC_RESTART_COUNT="0",
    )


def _run(program: tuple[str, ...], argv: list[str]) -> None:
    sys.argv = [program[-1], *argv]
    if program[0] == "-m":
        found = importlib.import_module(program[1])
        if hasattr(found, "__path__"):  # a package, which Python runs by its __main__
            found = importlib.import_module(f"{program[1]}.__main__")
        found.main(argv)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _watch(ranks: dict[int, int], outputs: list[int], _store: dist.TCPStore) -> int:
    """Until all have ended, and the others of one that failed with it; the exit code."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        _signal(ranks, STOP_SIGNAL)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    copying = [
        threading.Thread(target=_copy, args=(source, rank)) for rank, source in enumerate(outputs)
    ]
    for thread in copying:
        thread.start()
    failed, killed_at = False, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > killed_at:
                _signal(ranks, signal.SIGKILL)
            time.sleep(0.01)
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0 and not failed:
            print(f"rank {rank} failed with exit code {code}", file=sys.stderr, flush=True)
            failed, killed_at = True, time.monotonic() + GRACE_S
            _signal(ranks, signal.SIGTERM)
    for thread in copying:
        thread.join()
    return 1 if failed else EXIT_STOPPED if asked else 0


def _signal(ranks: dict[int, int], number: int) -> None:
    for pid in ranks:
        os.kill(pid, number)


def _copy(source: int, rank: int) -> None:
    """A rank's lines, each after its name, as torchrun's `--tee` has them."""
    with open(source, "rb") as lines:
        for line in lines:
            os.write(1, f"[rank{rank}]:".encode() + line)
