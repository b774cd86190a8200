"""The host's memory: how much of it a process may take, page-locked buffers, and
`activation_checkpoint.offload_inputs`, whose checkpointed blocks keep their inputs there.

A process may take the least of the kernel's `MemAvailable` and of the rest that each cgroup around
it leaves, in both versions of cgroups (Linux). Memory that only caches files counts as free. For
ancestors that a container does not see, version 1 reports the limit; version 2 does not.

With full activation checkpointing only a block's input is kept, and at long T these inputs fill
most of a device. Each is copied to the host when its block begins, and back when the block is
recomputed, on the computing stream: at long T a block takes ten times as long as its copies. A host
buffer, of the longest sample's size, is reused when its input's graph is gone.
"""

import contextlib
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return how many bytes this process may still take; None if it is unknown."""
    of_kernel = (kib * 1024 for kib in _numbers(proc / "meminfo", "MemAvailable:"))
    return min([*of_kernel, *_of_cgroups(proc)], default=None)


def _of_cgroups(proc: Path) -> Iterator[int]:
    """Yield what each limit of a cgroup around this process leaves, in bytes."""
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
        # mountinfo escapes blanks.
        root, mount = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
            for field in fields[3:5]
        )
        below = Path(os.path.relpath(own[kind], root)).parts
        if ".." in below:  # the process's cgroup is out of sight
            below = ()
        for count in range(len(below) + 1):
            yield from _left(Path(mount, *below[:count]), *_CGROUPS[kind])


# By version of cgroups: the file of memory held, those of limits, and the prefix of what is counted
# over all descendants. Above `high` processes crawl. A limit may be "max".
_CGROUPS = {
    "cgroup2": ("memory.current", ("memory.max", "memory.high"), ""),
    "cgroup": ("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_"),
}


def _left(folder: Path, held_in: str, limited_by: tuple[str, ...], prefix: str) -> Iterator[int]:
    """Yield what each limit of a cgroup leaves; other controllers' folders have none."""
    stat, cached = folder / "memory.stat", (f"{prefix}inactive_file", f"{prefix}active_file")
    held = sum(_numbers(folder / held_in)) - sum(_numbers(stat, *cached))
    limits = [limit for name in limited_by for limit in _numbers(folder / name)]
    for limit in (*limits, *_numbers(stat, "hierarchical_memory_limit")):
        yield max(limit - held, 0)


def _numbers(path: Path, *names: str) -> list[int]:
    """Return the number that a file holds, or those of `names` in a file of names and numbers."""
    rows = [line.split() for line in _lines(path)]
    texts = [row[1] for row in rows if row[0] in names] if names else [row[0] for row in rows]
    return [int(text) for text in texts if text.isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()]


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate page-locked host memory, (numel,), for copies to and from `device` that do not
    block; for a CPU ordinary memory. RuntimeError: the driver cannot lock so much."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def page_locked_bytes(size: int) -> int:
    """Return how many bytes PyTorch's allocator takes for `size`: the next power of two."""
    return 1 << (size - 1).bit_length()


class InputsOnHost:
    """The inputs of one model's checkpointed blocks, in the host's memory."""

    def __init__(self, longest: int) -> None:
        """Expect inputs (B, T, D) of up to T = `longest`; a longer one may waste buffers."""
        self.host_bytes = 0
        """Bytes of page-locked memory in use, as `page_locked_bytes` counts them."""
        self._longest = longest
        self.free_buffers: list[Tensor] = []

    @contextlib.contextmanager
    def __call__(self, h: Tensor) -> Iterator[None]:
        """Keep tensors of `h`'s shape that autograd saves in this block in the host's memory.

        Wrap the call of one checkpointed block with its input `h`, (B, T, D). Tensors saved when
        the block is recomputed, in backward, are not affected.
        """
        shape, dtype = h.shape, h.dtype  # autograd keeps `pack`, which must not keep h

        def pack(saved: Tensor) -> Tensor | _OnHost:
            is_input = saved.shape == shape and saved.dtype == dtype
            return _OnHost(self, saved) if is_input else saved

        def unpack(packed: Tensor | _OnHost) -> Tensor:
            return packed.fetch() if isinstance(packed, _OnHost) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def take_buffer(self, like: Tensor) -> Tensor:
        """Return a flat buffer of `like`'s dtype, for it and for the longest sample."""
        most = max(like.numel(), like.numel() // like.shape[1] * self._longest)
        while self.free_buffers:
            buffer = self.free_buffers.pop()
            if buffer.numel() >= like.numel() and buffer.dtype == like.dtype:
                return buffer
            self.host_bytes -= page_locked_bytes(buffer.nbytes)
        buffer = page_locked(most, like.dtype, like.device)
        self.host_bytes += page_locked_bytes(buffer.nbytes)
        return buffer


class _OnHost:
    """One input's copy on the host. Copies are in the computing stream's order, so that neither
    tensor is reused too early."""

    def __init__(self, inputs: InputsOnHost, saved: Tensor) -> None:
        buffer = inputs.take_buffer(saved)
        weakref.finalize(self, inputs.free_buffers.append, buffer)
        self._copy, self._device = buffer[: saved.numel()].view(saved.shape), saved.device
        self._copy.copy_(saved, non_blocking=True)

    def fetch(self) -> Tensor:
        """Return the input on its device."""
        there = torch.empty(self._copy.shape, dtype=self._copy.dtype, device=self._device)
        return there.copy_(self._copy, non_blocking=True)
