"""Runs a function on several gloo ranks: worker processes that are started once and reused.

`on_ranks(4, function, *args)` returns each rank's result. Functions must be importable (defined at
a module's top level). A rank that raises, or silence, ends the pool and fails the test.
"""

import atexit
import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 400  # less than a test has, more than a compilation on a busy machine takes
# "fork" saves the imports; only for a process that ran nothing yet (tests/hazards/mutants).
START_METHOD = "TORCHTITAN_DP_TEST_START_METHOD"
_pools: dict[int, "_Pool"] = {}


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world; the results, by rank."""
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
        context = mp.get_context(os.environ.get(START_METHOD, "spawn"))
        # Held here: a free port that is looked for could be taken before rank 0 binds it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.tasks = [context.Queue() for _ in range(world_size)]
        self.results = context.Queue()
        self.processes = [
            context.Process(
                target=_work,
                args=(rank, world_size, self.store.port, self.tasks[rank], self.results),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.daemon = True
            process.start()
        atexit.register(self.close)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for task in self.tasks:
            task.put((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self.tasks):
            try:
                rank, value, error = self.results.get(timeout=TIMEOUT_S)
            except queue.Empty:
                missing = set(range(len(self.tasks))) - set(results)
                raise AssertionError(
                    f"ranks {missing} hang in {function.__name__}{self._dead()}"
                ) from None
            if error is not None:
                raise AssertionError(
                    f"rank {rank} failed in {function.__name__}{self._dead()}:\n{error}"
                )
            results[rank] = value
        return [results[rank] for rank in range(len(self.tasks))]

    def _dead(self) -> str:
        """Workers that ended, and how: the others tell only of a lost connection."""
        return "".join(
            f"; rank {rank} ended with exit code {process.exitcode}"
            for rank, process in enumerate(self.processes)
            if process.exitcode is not None
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _work(rank: int, world_size: int, port: int, tasks: Any, results: Any) -> None:
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
    import torchtitan_dp.distributed  # noqa: F401

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S - 100))
    while True:
        function, args = tasks.get()
        try:
            results.put((rank, function(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
