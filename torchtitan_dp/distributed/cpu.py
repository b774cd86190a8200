"""All that TorchTitan 0.2.2 needs to run without a GPU, and one thing that gloo needs anywhere.

This is the package's one documented change of other people's globals: on a machine with an
accelerator `install()` changes gloo's groups alone. Each item below is a function that says what
is missing and `tests/distributed/test_cpu.py` shows when a new TorchTitan makes it unnecessary.
"""

import functools
import os
import platform
import resource
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._utils
import torch.distributed as dist


def has_accelerator() -> bool:
    """Return whether PyTorch sees a device other than the CPU."""
    return torch.accelerator.is_available()


def install() -> None:
    """Make gloo safe, and `import torchtitan` and its Trainer work on CPU.

    With an accelerator only gloo is changed: checkpoints, and ranks that share a device, use it
    there too. A second call changes nothing.
    """
    _give_gloo_groups_one_thread()
    if has_accelerator() or "torchtitan" in sys.modules:
        return
    _import_torchtitan()
    _report_process_memory()
    _accept_string_device_ids_in_barrier()
    _profile_cpu_only()


def peak_memory_bytes() -> int:
    """Return the process's largest resident set so far, in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _import_torchtitan() -> None:
    """Import TorchTitan as a CPU program.

    Two things stand in the way: its mixture-of-experts kernels import `triton` unconditionally,
    and its device type falls back to "cuda". No Llama uses these kernels: an empty module stands
    in, with torch's CUDA build too, which brings `triton` along: both builds run the same.
    """
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    find_device_type = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        import torchtitan.tools.utils
    finally:
        torch._utils._get_available_device_type = find_device_type
    assert torchtitan.tools.utils.device_type == "cpu"


def _report_process_memory() -> None:
    """Report the process's memory, where TorchTitan's monitor would ask the accelerator."""
    import torchtitan.components.metrics as metrics

    class ProcessMemoryMonitor:
        device_name = platform.processor() or platform.machine()

        def get_peak_stats(self) -> metrics.DeviceMemStats:
            peak_gib = peak_memory_bytes() / 2**30
            return metrics.DeviceMemStats(peak_gib, 0.0, peak_gib, 0.0, 0, 0)

        def reset_peak_stats(self) -> None:
            """Do nothing: the kernel's high-water mark is the whole run's peak."""

    metrics.build_device_memory_monitor = ProcessMemoryMonitor
    # The CPU's peak rate is unknown: MFU is of no meaning here, and `lspci` need not be asked.
    import torchtitan.tools.utils as utils

    utils.get_peak_flops = lambda device_name: float("inf")


def _accept_string_device_ids_in_barrier() -> None:
    """Take the string that TorchTitan's `set_pg_timeouts` passes to barrier as its device."""
    barrier = dist.barrier

    @functools.wraps(barrier)
    def barrier_on_cpu(*args: Any, device_ids: object = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    dist.barrier = barrier_on_cpu


def _profile_cpu_only() -> None:
    """Drop the activity `None`, which TorchTitan hands the profiler without an accelerator."""
    profile: Callable[..., Any] = torch.profiler.profile

    @functools.wraps(profile)
    def profile_known_activities(*args: Any, activities: Any = None, **kwargs: Any) -> Any:
        known = None if activities is None else [a for a in activities if a is not None]
        return profile(*args, activities=known, **kwargs)

    torch.profiler.profile = profile_known_activities  # type: ignore[misc,assignment]


def _give_gloo_groups_one_thread() -> None:
    """Let one thread do a gloo group's collectives; PyTorch starts two, which corrupt the heap.

    Each notes the name of what it has just done in a string that they share, without a lock
    (`ProcessGroupGloo::runLoop` of torch 2.13, `lastCompletedWorkName`). A name of more than 15
    letters, as `_REDUCE_SCATTER_BASE`, is on the heap: it is freed twice now and then, and after
    some thousand microbatches the run dies (`malloc(): unaligned tcache chunk detected`).

    All groups share their devices: each device has a thread that wakes up 100 times a second.
    """
    gloo = dist.ProcessGroupGloo
    create = gloo.__init__
    if hasattr(create, "__wrapped__"):
        return  # it is ours by now, also if this module was imported anew since

    @functools.cache
    def devices(interfaces: str) -> list[Any]:
        names = [name for name in interfaces.split(",") if name]
        return [gloo.create_device(interface=name) for name in names] or [
            gloo.create_default_device()
        ]

    @functools.wraps(create)
    def create_with_one_thread(
        group: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
    ) -> None:
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 1
        options._timeout = timeout
        create(group, store, rank, size, options)

    gloo.__init__ = create_with_one_thread  # type: ignore[method-assign,assignment]
