"""Runs a function on several gloo ranks: processes that are forked once and reused.

`on_ranks(4, function, *args)` returns each rank's result. Functions must be importable (defined at
a module's top level). A rank that raises, or silence, ends the pool and fails the test.
"""

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests import forks

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

    def _result(self, rank: int, name: str) -> Any:
        message = pickle.loads(self.processes[rank].connection.recv_bytes())
        if isinstance(message, forks.Ended):
            raise AssertionError(f"rank {rank} ended with exit code {message.code} in {name}")
        value, error = message
        if error is not None:
            raise AssertionError(f"rank {rank} failed in {name}{self._dead()}:\n{error}")
        return value

    def _dead(self) -> str:
        """Workers that ended, and how: the others tell only of a lost connection."""
        time.sleep(0.2)  # for the report of an end that was the cause
        found = ""
        for rank, process in enumerate(self.processes):
            if process.connection.poll():
                message = pickle.loads(process.connection.recv_bytes())
                if isinstance(message, forks.Ended):
                    found += f"; rank {rank} ended with exit code {message.code}"
        return found

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
