"""Runs a function on all ranks of fresh processes, and tells running out of memory from a fault."""

import logging
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_NO_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")


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
        context.set_forkserver_preload(["torchtitan_dp.train", "opacus"])
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
    from torchtitan_dp.train_spec import register

    register()
    try:
        queue.put((function(*args, **kwargs), None))
    except NotImplementedError as error:
        queue.put((None, str(error)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
