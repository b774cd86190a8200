"""Runs a function on several gloo ranks: processes that are forked once and reused.

`on_ranks(4, function, *args)` returns each rank's result. Functions must be importable (defined at
a module's top level). A rank that raises, or silence, ends the pool and fails the test. `let_go`
waits for the other threads of the process that calls it.
"""

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import forks, late

TIMEOUT_S = 400  # less than a test has, more than a compilation on a busy machine takes
_pools: dict[int, "_Pool"] = {}


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world; the results, by rank."""
    forks.need()
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.call(function, args)
    except BaseException:
        pool.close()
        del _pools[world_size]
        raise


class _Pool:
    def __init__(self, world_size: int) -> None:
        # Held here: a free port that is looked for could be taken before rank 0 binds it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            forks.Process(_work, rank, world_size, self.store.port) for rank in range(world_size)
        ]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        # By value: torch would hand tensors over in shared memory, to be fetched from this process.
        task = pickle.dumps((function, args))
        for process in self.processes:
            process.connection.send_bytes(task)
        waiting = {process.connection: rank for rank, process in enumerate(self.processes)}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = set(waiting.values())
                raise AssertionError(f"ranks {missing} hang in {function.__name__}")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                results[rank] = self._result(rank, function.__name__)
        return [results[rank] for rank in range(len(self.processes))]

    def _answer(self, rank: int) -> Any:
        return pickle.loads(self.processes[rank].connection.recv_bytes())

    def _result(self, rank: int, name: str) -> Any:
        message = self._answer(rank)
        if isinstance(message, forks.Ended):
            raise AssertionError(f"rank {rank} ended with exit code {message.code} in {name}")
        value, error = message
        if error is not None:
            raise AssertionError(f"rank {rank} failed in {name}{self._dead()}:\n{error}")
        return value

    def _dead(self) -> str:
        """Workers that ended, and how: the others tell only of a lost connection."""
        time.sleep(0.2)  # for the report of an end that was the cause
        ready = [i for i, process in enumerate(self.processes) if process.connection.poll()]
        ends = {rank: self._answer(rank) for rank in ready}
        return "".join(
            f"; rank {rank} ended with exit code {end.code}"
            for rank, end in ends.items()
            if isinstance(end, forks.Ended)
        )

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.connection.close()


def _work(connection: "Connection[Any, Any]", rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),  # rank 0 makes none of its own
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    late.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S - 100))
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:  # the session is over
            os._exit(0)
        try:
            function, args = pickle.loads(task)
            answer = pickle.dumps((function(*args), None))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        connection.send_bytes(answer)


def let_go() -> None:
    """Return when every other thread was seen asleep (Linux), with its work done, and again.

    gloo's threads hold what they sent until after it has arrived: a collective is done before the
    thread that ran it lets go of its tensors, on a busy machine long before. Tests that count
    tensors wait for that. While this thread sleeps, those that need the interpreter to free a
    tensor can have it.
    """
    deadline = time.monotonic() + 60
    for _ in range(3):
        awake = _others()
        while awake:
            assert time.monotonic() < deadline, f"{len(awake)} threads never sleep"
            time.sleep(0.002)
            awake = {task for task in awake & _others() if _state(task) != "S"}


def _others() -> set[Path]:
    me = str(threading.get_native_id())
    return {task for task in Path("/proc/self/task").iterdir() if task.name != me}


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended meanwhile
        return "S"
