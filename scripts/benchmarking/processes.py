"""Fresh processes, which tell running out of memory from a fault, and what was measured in them.

The journal has one JSON line a measurement, written as it comes, beside the result's file, so that
a benchmark that was cut off goes on where it was; it is removed once the result is written. A line
counts only for the same settings, arm, machine and versions.
"""

import dataclasses
import json
import logging
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .arms import Arm, Setting

_NO_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")


def show(line: str) -> None:
    """Tell how far the benchmark is."""
    print(f"benchmark: {line}", file=sys.stderr, flush=True)


class OutOfMemory(Exception):
    """A rank needed more memory than there is."""


def on_processes(devices: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, folder, **kwargs)` on every rank of fresh processes; the ranks' results.

    Args:
        function: importable; called with a scratch folder after `args`.

    Raises:
        OutOfMemory: on any rank.
        NotImplementedError: raised by the function; the first rank's message.
    """
    # Forked from one process that has imported everything: starts in a second instead of ten.
    # Not with CUDA, which does not survive a fork.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    context = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torchtitan_dp.train.trainer", "opacus"])
    queue = context.SimpleQueue()
    # Held here: a free port that is looked for could be taken before rank 0 binds it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE=str(True),  # rank 0 makes none of its own
            OMP_NUM_THREADS="1",
            OMP_WAIT_POLICY="PASSIVE",  # on a shared machine, threads that spin wait for ever
        )
        arguments = (dict(os.environ), devices, queue, function, (*args, folder), kwargs)
        try:
            mp.start_processes(_work, arguments, nprocs=devices, start_method=method)
        except mp.ProcessRaisedException as error:
            if any(words in str(error) for words in _NO_MEMORY):
                raise OutOfMemory from error
            raise
        except mp.ProcessExitedException as error:
            if error.exit_code == -signal.SIGKILL:  # as the kernel does, out of memory
                raise OutOfMemory from error
            raise
    results = [queue.get() for _ in range(devices)]
    for _, reason in results:
        if reason is not None:
            raise NotImplementedError(reason)
    return [result for result, _ in results]


def _work(
    rank: int,
    environment: dict[str, str],
    devices: int,
    queue: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(environment)  # the fork server has that of its own start
    size = str(devices)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    torch.set_num_threads(max((os.cpu_count() or 1) // devices, 1))
    # TorchTitan warns that all trainers but the first find the process group initialized.
    logging.getLogger().setLevel(logging.ERROR)
    try:
        queue.put((function(*args, **kwargs), None))
    except NotImplementedError as error:
        queue.put((None, str(error)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Journal:
    """Remembers measurements by what they are of; without a file, for this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._found: dict[str, list[Any]] = {}
        if path is not None and path.exists():
            whole, _, cut_off = path.read_text(encoding="utf-8").rpartition("\n")
            if cut_off:  # it was being written when the run ended: what comes next is no part of it
                path.write_text(whole and whole + "\n", encoding="utf-8")
            for line in whole.splitlines():
                key, value = json.loads(line)
                self._found.setdefault(key, []).append(value)
        self.resumed = sum(map(len, self._found.values()))

    def of(self, key: str) -> list[Any]:
        """What is known of a key, in the order in which it was measured."""
        return self._found.get(key, [])

    def add(self, key: str, value: Any) -> None:
        """Write a measurement down; from any process that has the journal."""
        self._found.setdefault(key, []).append(value)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")

    def remove(self) -> None:
        """Forget all: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def key_of(kind: str, setting: Setting, *arms: Arm, **terms: object) -> str:
    """A measurement's key: all that its result may depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    what = kind, dataclasses.asdict(setting), [dataclasses.asdict(arm) for arm in arms], terms
    return json.dumps([*what, platform.node(), device, torch.__version__], sort_keys=True)
