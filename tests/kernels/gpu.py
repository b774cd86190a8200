"""A GPU that is not there: Inductor and Triton compile for it, and Triton's interpreter runs.

    python -m tests.kernels.gpu ptx 9 0                       # compute capability 9.0
    TRITON_INTERPRET=1 python -m tests.kernels.gpu values 9 0

The first prints the PTX of every kernel of `tests.kernels.compiled`, the second how their values
differ from the CPU's, as JSON. Both need PyTorch's CUDA build, which brings Triton and its
assembler, and neither a driver nor a C compiler.

Dynamo and AOTAutograd trace on the CPU. From there a graph goes to Inductor as that of a GPU:
numbers that Inductor asks for are those of an H100, but for the compute capability. Inductor's own
wrapper then launches the kernels, where there is something to launch.
"""

import contextlib
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, codecache, compile_fx, config, scheduler
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor

from tests.kernels.compiled import CASES, Case

GPU = torch.device("cuda", 0)
BY_TORCH = ("exp", "log", "log1p", "sin", "sqrt")
"""libdevice's functions in the interpreter: its own are numpy's, which round otherwise."""


def properties(major: int, minor: int) -> types.SimpleNamespace:
    """What Inductor asks about a GPU."""
    return types.SimpleNamespace(
        **{"name": "stand-in", "major": major, "minor": minor, "warp_size": 32},
        **{"multi_processor_count": 132, "max_threads_per_multi_processor": 2048},
        **{"max_threads_per_block": 1024, "regs_per_multiprocessor": 65536},
        **{"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472},
        **{"L2_cache_size": 50 << 20, "total_memory": 80 << 30, "is_integrated": 0},
        gcnArchName="",
    )


@contextlib.contextmanager
def in_sight(major: int, minor: int) -> Iterator[None]:
    """Answer what Inductor and its wrapper ask about a GPU; allocate on the CPU."""
    of_torch_cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties(major, minor),
        "get_rng_state": lambda *_: torch.zeros(1),
        "set_rng_state": lambda *_: None,
        "set_device": lambda *_: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "_DeviceGuard": lambda *_: contextlib.nullcontext(),
    }
    of_interface = {
        "get_device_properties": staticmethod(lambda *_: properties(major, minor)),
        "get_raw_stream": staticmethod(lambda *_: 0),
    }
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * major + minor, warp_size=32)
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
    patch = mock.patch.object
    with (
        mock.patch.multiple(torch.cuda, **of_torch_cuda),
        mock.patch.multiple(CudaInterface, **of_interface),
        patch(scheduler, "has_triton", lambda: True),
        patch(triton_helpers, "set_driver_to_gpu", lambda: None),
        patch(torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        patch(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided),
        patch(fake_tensor, "init_gpu_context", lambda *_: None),  # torch 2.11 allocates on it
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        yield


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def for_gpu(
    major: int, minor: int, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable[[list[Any]], Any]:
    """Compile AOTAutograd's graph of CPU tensors as that of tensors on the GPU."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    with in_sight(major, minor):
        compiled = compile_fx.compile_fx_inner(graph, [on_gpu(one) for one in inputs], **options)

    def run(inputs: list[Any]) -> Any:
        with in_sight(major, minor):
            return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def on_gpu(value: Any) -> Any:
    """Move a fake tensor; what is not a tensor is a size."""
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.to(GPU)


def compiled(case: Case, major: int, minor: int) -> Callable[..., Any]:
    """Compile a function with the package's own options for the GPU."""
    torch._dynamo.reset()
    inner = functools.partial(for_gpu, major, minor)
    return case.compiled(functools.partial(compile_fx.compile_fx, inner_compile=inner))


def ptx(case: Case, major: int, minor: int) -> list[str]:
    """Return the PTX of a function's kernels, of each configuration that a GPU would try."""
    import triton

    found: list[str] = []

    def compile_(*args: Any, **options: Any) -> Any:
        binary = original(*args, **options)
        found.append(binary.asm["ptx"])
        return binary

    def kernel_of(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = getattr(codecache.PyCodeCache.load(source), name)
        for one in kernel.configs:
            kernel._precompile_config(one)
        return types.SimpleNamespace(run=lambda *_, **__: None)

    original = triton.compile
    with (
        mock.patch.object(triton, "compile", compile_),
        mock.patch.object(async_compile.AsyncCompile, "triton", kernel_of),
    ):
        compiled(case, major, minor)(*next(case.variants()))
    return found


def use_torchs_functions() -> None:
    """Give the interpreter torch's functions in the place of libdevice's."""
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    def of_block(function: Callable[[Tensor], Tensor], x: Any) -> Any:
        values = function(torch.from_numpy(np.array(x.handle.data))).numpy()
        return language.core.tensor(TensorHandle(values, x.handle.dtype), x.type)

    functions = {name: functools.partial(of_block, getattr(torch, name)) for name in BY_TORCH}
    triton_helpers.libdevice = triton_helpers.math = types.SimpleNamespace(**functions)
    language.sqrt_rn = functions["sqrt"]


def differences(case: Case, major: int, minor: int) -> dict[str, int]:
    """Compare the interpreter's values with the CPU's: what is changed in place, and returned."""
    assert case.on_cpu is not None
    run = compiled(case, major, minor)
    steps = []
    for inputs in case.variants():
        found, expected = results(run, inputs), results(case.on_cpu, inputs)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan())
            steps.append((places(mine) - places(theirs)).abs())
    every = torch.cat(steps)
    return {"values": len(every), "differ": int((every > 0).sum()), "ulps": int(every.max())}


def results(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Return the first input, which may be changed in place, and the output, if of numbers."""
    first, *others = (x.clone() if isinstance(x, Tensor) else x for x in inputs)
    output = function(first, *others)
    return [x for x in (first, output) if isinstance(x, Tensor) and x.is_floating_point()]


def places(values: Tensor) -> Tensor:
    """Return each value's place among all of its dtype: differences are ulps. NaN is 0."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    place = values.nan_to_num(0.0).flatten().view(bits).long()
    return torch.where(place < 0, torch.iinfo(bits).min - place, place)


def main(question: str, major: str, minor: str) -> None:
    cases, ask = CASES, ptx
    if question == "values":
        use_torchs_functions()
        cases, ask = {name: case for name, case in CASES.items() if case.on_cpu}, differences
    print(json.dumps({name: ask(case, int(major), int(minor)) for name, case in cases.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
