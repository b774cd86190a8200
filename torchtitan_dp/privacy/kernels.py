"""How loops over values use the machine: blocks on threads of the CPU, compiled kernels on CUDA."""

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Positions in a block. No more than torch's parallel grain size: an operation stays on its thread.
BLOCK = 2**15
_LEAST_BLOCKS = 4  # for a thread, whose start takes as long as some of them

LAYOUTS = 64
"""More graphs than the layouts of a kernel's arguments: contiguous vectors differ in whether their
size, and where they begin in their storage, is 0, 1 or more."""

_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def on_threads(work: Callable[[range], None], blocks: range) -> None:
    """Deal `blocks` out to torch's number of threads, or to fewer if there are few blocks."""
    threads = min(torch.get_num_threads(), len(blocks) // _LEAST_BLOCKS)
    if threads <= 1:
        work(blocks)
        return
    with ThreadPoolExecutor(threads) as pool:  # numpy and torch release the GIL
        list(pool.map(torch.no_grad()(work), (blocks[i::threads] for i in range(threads))))


@functools.cache
def compile_kernel(
    function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Any]:
    """Compile a function, once, into one kernel for each layout of its arguments, of any size.

    Dynamo refuses the ninth graph of a function (`torch._dynamo.config.recompile_limit`). Callers
    pass contiguous vectors, views of nothing, which need fewer; PyTorch 2.13 also takes a limit.
    """
    room = {"recompile_limit": LAYOUTS} if _HAS_LIMIT else {}
    kernel: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        function, fullgraph=True, dynamic=True, backend=backend, **room
    )
    return kernel
