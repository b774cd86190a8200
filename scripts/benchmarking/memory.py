"""A process's memory: its peak, of which PyTorch's, and the bytes of its live tensors."""

import contextlib
import ctypes
import gc
import itertools
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from torchtitan_dp.privacy.clipping import ClipPolicy


def map_tensors_alone() -> None:
    """Have glibc map every larger block by itself, so that the resident set is what is alive.

    Otherwise it keeps what is freed, in pieces, and the peak tells more of the order of calls than
    of what an arm needs. Slower: for weighing only.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 2**16)


def peak_bytes() -> float:
    """The largest resident set so far on CPU; on CUDA the most that tensors took."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    from torchtitan_dp.distributed.cpu import peak_memory_bytes

    return float(peak_memory_bytes())


def peak_reserved_bytes() -> float | None:
    """The most that the CUDA allocator reserved; None on CPU, where there is no such pool."""
    return float(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else None


def bytes_beside_the_pool() -> float | None:
    """What the device has in use beside the CUDA allocator's pool, now: the context, NCCL's
    buffers, libraries, other processes; None on CPU.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def allocated_peak_bytes(step: Callable[[], None]) -> float:
    """The most bytes that PyTorch's allocator has out during a step: what CUDA calls allocated.

    Without Python, its libraries and what the C library keeps: fit to compare methods by.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated())
    activities, name = [torch.profiler.ProfilerActivity.CPU], "measured step"
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()  # the profiler sees only the frees of what it saw allocated
        gc.collect()
        at_rest = live_tensor_bytes()
        with torch.profiler.record_function(name):
            step()
    profiler = profile.profiler
    assert profiler is not None
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (start,) = (event.start_ns() for event in events if event.name() == name)
    measured = (e for e in events if e.name() == "[memory]" and e.start_ns() > start)
    return at_rest + float(max(itertools.accumulate((e.nbytes() for e in measured), initial=0)))


def live_tensor_bytes() -> int:
    """Bytes of the distinct storages, on the training device, of all tensors that Python holds."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # A DTensor's own storage is empty; the local tensor that it wraps is listed by itself.
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor | FakeTensor):
            tensor: torch.Tensor = thing
            if tensor.device.type == device_type and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class LiveAtClipping:
    """The most bytes that live tensors took whenever a method clipped."""

    most: int = 0


@contextlib.contextmanager
def watch_clipping() -> Iterator[LiveAtClipping]:
    """Look at live tensors whenever a gradient method clips: its per-sample gradients are whole.

    For one measured step only: it stands in for `ClipPolicy.clip`, by which all methods clip.
    """
    seen, clip = LiveAtClipping(), ClipPolicy.clip

    def clip_seen(*args: Any, **kwargs: Any) -> Any:
        seen.most = max(seen.most, live_tensor_bytes())
        return clip(*args, **kwargs)

    with unittest.mock.patch.object(ClipPolicy, "clip", clip_seen):
        yield seen
