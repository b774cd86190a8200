"""Runs a data set under a memory limit, in a forked process that looks like torchrun's."""

import os
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from torchtitan_dp.train import trainer as train


def limit(headroom: int) -> None:
    """Allow this process `headroom` bytes more of address space than it has (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(argv: list[str], headroom: int | None, rehearsed: bool, threads: bool) -> None:
    """A worker's whole life; limited from the moment on in which it would rehearse.

    Args:
        threads: whether autograd's threads are there by then. The first backward starts them: 8 in
            torch's CUDA build, with a stack each.
    """
    real = train.rehearse

    def limited(trainer: Any) -> None:
        if threads:
            torch.ones(1, requires_grad=True).sum().backward()
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


def ended(argv: list[str], headroom: int | None, rehearsed: bool, threads: bool, log: Path) -> int:
    """Run to the end in this process, which does nothing else; the exit code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", XDG_CACHE_HOME=str(log.parent / "cache"))
    code = 1
    try:
        run(argv, headroom, rehearsed, threads)
        code = 0
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
