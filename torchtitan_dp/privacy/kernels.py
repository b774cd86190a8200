"""How the kernels of CUDA are compiled: one function each, for every layout of its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

LAYOUTS = 64
"""More graphs than the layouts of a kernel's arguments: contiguous vectors differ in whether their
size, and where they begin in their storage, is 0, 1 or more."""

_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def compile_kernel(
    function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Any]:
    """Compile a function into one kernel for each layout of its arguments, of any size.

    Dynamo refuses the ninth graph of a function (`torch._dynamo.config.recompile_limit`), which the
    callers stay below: they hand over contiguous vectors that are views of nothing. From PyTorch
    2.13 on the limit is an argument, and `LAYOUTS` is far above what they need.
    """
    room = {"recompile_limit": LAYOUTS} if _HAS_LIMIT else {}
    kernel: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        function, fullgraph=True, dynamic=True, backend=backend, **room
    )
    return kernel
