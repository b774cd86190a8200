"""TorchTitan 0.2.2 without a GPU, imported quickly; and a fix of gloo that is needed anywhere.

This is the one place where the package changes other libraries' globals, each by a function that
names what is missing; `tests/distributed/test_cpu.py` fails when a new TorchTitan makes it
unnecessary. On a machine with an accelerator `install()` changes gloo's groups only.

While it is imported, TorchTitan compiles attention functions that no run here uses, and imports
Hugging Face's `datasets` and converters to float8: half of a start's seconds, which `left_out`
spares.
"""

import contextlib
import functools
import os
import platform
import resource
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan_dp.base import torch_private

_QUANTIZATION = "torchtitan.components.quantization"  # it loads Inductor; `train.spec` asks for it


def install() -> None:
    """Make gloo safe, and TorchTitan and its Trainer work on CPU. A second call changes nothing."""
    _give_gloo_groups_one_thread()
    if torch.accelerator.is_available() or "torchtitan" in sys.modules:
        return
    _import_torchtitan()
    _report_process_memory()
    _accept_string_device_ids_in_barrier()
    _profile_known_activities()


def peak_memory_bytes() -> int:
    """Return the process's largest resident set so far, in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _import_torchtitan() -> None:
    """Import TorchTitan as a CPU program: its device type falls back to "cuda", and its
    mixture-of-experts kernels, which no run uses, import `triton`."""
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    with torch_private.cpu_alone():
        import torchtitan.tools.utils
    assert torchtitan.tools.utils.device_type == "cpu"


def _report_process_memory() -> None:
    import torchtitan.components.metrics as metrics

    class ProcessMemoryMonitor:
        device_name = platform.processor() or platform.machine()

        def get_peak_stats(self) -> metrics.DeviceMemStats:
            peak_gib = peak_memory_bytes() / 2**30
            return metrics.DeviceMemStats(peak_gib, 0.0, peak_gib, 0.0, 0, 0)

        def reset_peak_stats(self) -> None:
            """Do nothing: the kernel's high-water mark is the whole run's peak."""

    metrics.build_device_memory_monitor = ProcessMemoryMonitor
    # The CPU's peak rate is unknown: MFU means nothing here, and `lspci` need not run.
    import torchtitan.tools.utils as utils

    utils.get_peak_flops = lambda device_name: float("inf")


def _accept_string_device_ids_in_barrier() -> None:
    """Accept the device string that TorchTitan's `set_pg_timeouts` passes to `barrier`."""
    barrier = dist.barrier

    @functools.wraps(barrier)
    def barrier_on_cpu(*args: Any, device_ids: object = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    dist.barrier = barrier_on_cpu


def _profile_known_activities() -> None:
    """Drop the activity `None` that TorchTitan passes to the profiler without an accelerator."""
    profile: Any = torch.profiler.profile

    @functools.wraps(profile)
    def profile_known_activities(*args: Any, activities: Any = None, **kwargs: Any) -> Any:
        known = None if activities is None else [a for a in activities if a is not None]
        return profile(*args, activities=known, **kwargs)

    torch.profiler.profile = profile_known_activities  # type: ignore[misc,assignment]


def _give_gloo_groups_one_thread() -> None:
    """Run each gloo group's collectives on one thread; PyTorch starts two, which corrupt the heap.

    Both write the name of the last collective to one string without a lock (`lastCompletedWorkName`
    in `ProcessGroupGloo::runLoop` of torch 2.13): after some thousand microbatches the run dies
    (`malloc(): unaligned tcache chunk detected`). All groups share their devices, since each device
    has a thread that wakes up 100 times a second.
    """
    gloo = dist.ProcessGroupGloo
    create = gloo.__init__
    if hasattr(create, "__wrapped__"):
        return  # done already, even if this module was imported again since

    @functools.cache
    def devices(interfaces: str) -> list[Any]:
        names = [name for name in interfaces.split(",") if name]
        made = [gloo.create_device(interface=name) for name in names]
        return made or [gloo.create_default_device()]

    @functools.wraps(create)
    def create_with_one_thread(
        group: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
        **fields: bool,
    ) -> None:
        shared = devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options = torch_private.gloo_options(shared, 1, timeout)
        for name, value in fields.items():  # enable_reconfigure, from torch 2.14
            setattr(options, name, value)
        create(group, store, rank, size, options)

    gloo.__init__ = create_with_one_thread  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leave out what imports inside the block would compile or load; restores all patches."""
    names = "datasets", "datasets.distributed", _QUANTIZATION
    stand_ins = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    for module in stand_ins.values():  # what TorchTitan imports from them: a type, two functions
        vars(module).update(Dataset=object, load_dataset=None, split_dataset_by_node=None)
    sys.modules.update(stand_ins)
    try:
        with mock.patch.object(torch, "compile", lambda function, **_: function):
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
