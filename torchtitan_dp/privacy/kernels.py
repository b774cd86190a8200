"""How the kernels of CUDA are compiled: one function each, for every layout of its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

LAYOUTS = 64
"""More graphs than the layouts of a kernel's arguments: contiguous vectors differ in whether their
size, and where they begin in their storage, is 0, 1 or more."""


def compile_kernel(
    function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Any]:
    """Compile a function into one kernel for each layout of its arguments, of any size.

    Dynamo refuses the ninth graph of a function (`torch._dynamo.config.recompile_limit`), and a
    process that runs several gradient methods or meshes has more layouts.
    """
    compile_: Any = torch.compile  # with `recompile_limit` from PyTorch 2.13 on
    if "recompile_limit" in inspect.signature(compile_).parameters:
        kernel: Callable[..., Any] = compile_(
            function, fullgraph=True, dynamic=True, backend=backend, recompile_limit=LAYOUTS
        )
        return kernel
    limited = compile_(function, fullgraph=True, dynamic=True, backend=backend)

    def with_room(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=LAYOUTS):
            return limited(*arguments)

    return with_room
