"""The host's memory: how much a process may still take of it (Linux), and page-locked buffers.

A process may take the least of the kernel's `MemAvailable` and of the rest that each cgroup around
it leaves, in both versions of cgroups: a scheduler's job and a container have their limits there,
and the limits of all ancestors apply. Memory that only caches files counts as free, as in
`MemAvailable`: it is dropped when memory is needed. For ancestors that a container does not see,
version 1 reports the limit; version 2 does not.

Of page-locked memory, for copies that do not block, PyTorch's allocator takes the next power of two
of bytes: nothing is wasted on 4,096 values a token, a third on 3,072 and six tenths on 5,120. Where
it would waste, large buffers are pages of their own here, registered with CUDA as PyTorch's
checkpoints do it.
"""

import contextlib
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

EXACT_FROM = 1 << 20
"""Bytes from which a page-locked buffer takes its own pages alone."""


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return how many bytes this process may still take; None if it is unknown."""
    return min([*_of_kernel(proc), *_of_cgroups(proc)], default=None)


def _of_kernel(proc: Path) -> Iterator[int]:
    """Yield the kernel's `MemAvailable`, in bytes."""
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_cgroups(proc: Path) -> Iterator[int]:
    """Yield what each cgroup around this process leaves, in bytes."""
    own = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.partition(" ")[0]
        if kind not in own or len(fields) < 5:
            continue
        root, mount = map(_unescaped, fields[3:5])  # other controllers' have none of these files
        for folder in _ancestors(Path(mount), os.path.relpath(own[kind], root)):
            yield from _left_by_2(folder) if kind == "cgroup2" else _left_by_1(folder)


def _ancestors(mount: Path, below: str) -> Iterator[Path]:
    """Yield the folder `below` a mount and its parents up to the mount; for a folder that lies
    elsewhere the mount alone."""
    parts = Path(below).parts
    if ".." in parts:
        parts = ()
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _left_by_2(folder: Path) -> Iterator[int]:
    """Yield what the limits of a cgroup of version 2 leave; above `high` its processes crawl."""
    cached = _numbers(folder / "memory.stat", "inactive_file", "active_file")
    held = sum(_numbers(folder / "memory.current")) - sum(cached)
    for name in ("memory.max", "memory.high"):
        yield from (max(limit - held, 0) for limit in _numbers(folder / name))  # none for "max"


def _left_by_1(folder: Path) -> Iterator[int]:
    """Yield what the limits of a cgroup of version 1 and of those above it leave."""
    stat = folder / "memory.stat"
    cached = _numbers(stat, "total_inactive_file", "total_active_file")
    held = sum(_numbers(folder / "memory.usage_in_bytes")) - sum(cached)
    limits = _numbers(folder / "memory.limit_in_bytes")
    for limit in (*limits, *_numbers(stat, "hierarchical_memory_limit")):
        yield max(limit - held, 0)


def _numbers(path: Path, *names: str) -> list[int]:
    """Return the number that a file holds, or those of `names` in a file of names and numbers."""
    found = []
    for line in _lines(path):
        *name, number = line.split() or [""]
        if name == [] if not names else name and name[0] in names:
            with contextlib.suppress(ValueError):
                found.append(int(number))
    return found


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    """Undo the escapes of blanks in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate page-locked host memory, (numel,), for copies to and from `device`.

    It is unlocked and freed with its last view. For a CPU it is ordinary memory.

    Raises:
        RuntimeError: the driver cannot lock so much.
    """
    size = numel * dtype.itemsize
    if device.type != "cuda":
        return torch.empty(numel, dtype=dtype, device="cpu")
    if size < EXACT_FROM or size == _next_power(size):
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    pages = mmap.mmap(-1, page_locked_bytes(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # no process that is forked copies them
    buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
    _lock(buffer.data_ptr(), len(pages))
    # Called before the storage lets go of its pages. At the process's end the driver unlocks.
    weakref.finalize(buffer.untyped_storage(), _unlock, buffer.data_ptr()).atexit = False
    return buffer


def page_locked_bytes(size: int) -> int:
    """Return how many bytes a buffer of `size` bytes takes: a power of two, or whole pages.

    >>> [page_locked_bytes(size) for size in (1, 300, 3 << 20, 1 << 22)]
    [1, 512, 3145728, 4194304]
    """
    if size < EXACT_FROM:
        return _next_power(size)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _lock(pointer: int, size: int) -> None:
    """Lock pages for CUDA. RuntimeError if it cannot: `out of memory`, say."""
    portable = 1  # of cudaHostRegister's flags: for all devices
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pointer, size, portable))


def _unlock(pointer: int) -> None:
    """Unlock pages after all copies, which know nothing of their end."""
    with contextlib.suppress(RuntimeError):  # a device that has failed: the process ends
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(pointer))
