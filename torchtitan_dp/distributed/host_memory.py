"""The host's memory: how much of it a process may take, page-locked buffers, and
`activation_checkpoint.offload_inputs`, whose checkpointed blocks keep their inputs there.

A process may take the least of the kernel's `MemAvailable` and of the rest that each cgroup around
it leaves, in both versions of cgroups (Linux). Memory that only caches files counts as free. For
ancestors that a container does not see, version 1 reports the limit; version 2 does not.

With full activation checkpointing only a block's input is kept, and at long T these inputs fill
most of a device. Each is copied out when its block begins and back while the block after it is
recomputed, on a stream of their own; nothing waits for the host. An input is allocated on the
computing stream C, and dropped once C waits for the copy's event, two blocks later, so that C can
reuse it at once. A host buffer, of the longest sample's size, is reused when its input's graph is
gone.
"""

import collections
import contextlib
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


ON_DEVICE = 2
"""Inputs on the device in forward: the block's own, and the one before, which is copied out."""


class InputsOnHost:
    """The inputs of one model's checkpointed blocks, in the host's memory."""

    def __init__(self, longest: int) -> None:
        """Expect inputs (B, T, D) of up to T = `longest`; a longer one may waste buffers."""
        self.host_bytes = 0
        """Bytes of page-locked memory in use, as `page_locked_bytes` counts them."""
        self._longest = longest
        self.free_buffers: list[Tensor] = []
        self._last: weakref.ref[_OnHost] | None = None  # of this forward pass, while it is alive
        # Tensors that the copy stream may still use, and the event after which it does not.
        self._copied: collections.deque[tuple[Tensor, Any]] = collections.deque()
        self._side: Any = None

    @contextlib.contextmanager
    def __call__(self, h: Tensor) -> Iterator[None]:
        """Keep tensors of `h`'s shape that autograd saves in this block in the host's memory.

        Wrap the call of one checkpointed block with its input `h`, (B, T, D). Tensors saved when
        the block is recomputed, in backward, are not affected.
        """
        shape, dtype = h.shape, h.dtype  # autograd keeps `pack`, which must not keep h

        def pack(saved: Tensor) -> Tensor | _OnHost:
            if saved.shape != shape or saved.dtype != dtype:
                return saved
            packed = _OnHost(self, saved, None if self._last is None else self._last())
            self._last = weakref.ref(packed)
            self.settle(ON_DEVICE)
            return packed

        def unpack(packed: Tensor | _OnHost) -> Tensor:
            return packed.take() if isinstance(packed, _OnHost) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def copy(self, to: Tensor, source: Tensor, on_device: Tensor) -> None:
        """Begin to copy, on the copy stream, after all work queued on the current stream;
        `on_device` is the one of the two tensors that `settle` drops."""
        streams = torch.get_device_module(on_device.device)
        if self._side is None:
            self._side = streams.Stream()
        self._side.wait_stream(streams.current_stream())
        with streams.stream(self._side):
            to.copy_(source, non_blocking=True)
        self._copied.append((on_device, self._side.record_event()))

    def settle(self, keep: int = 0) -> None:
        """Let the current stream wait for all copies but the last `keep`; drop their tensors."""
        while len(self._copied) > keep:
            on_device, done = self._copied.popleft()
            torch.get_device_module(on_device.device).current_stream().wait_event(done)

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
    """One input's copy on the host, with the one before, which backward needs next."""

    def __init__(self, inputs: InputsOnHost, saved: Tensor, before: "_OnHost | None") -> None:
        self._inputs, self._device = inputs, saved.device
        buffer = inputs.take_buffer(saved)
        weakref.finalize(self, inputs.free_buffers.append, buffer)
        self._copy = buffer[: saved.numel()].view(saved.shape)
        self._before = None if before is None else weakref.ref(before)
        inputs.copy(self._copy, saved, saved)
        self._on_device = weakref.ref(saved)  # while `inputs` or backward keeps it there

    def take(self) -> Tensor:
        """Return the input on its device, and begin to copy the one before."""
        there = self.fetch()
        self._inputs.settle()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return there

    def fetch(self) -> Tensor:
        """Return the input on its device; it is complete after `settle`."""
        there = self._on_device()
        if there is None:
            there = torch.empty(self._copy.shape, dtype=self._copy.dtype, device=self._device)
            self._on_device = weakref.ref(there)
            self._inputs.copy(there, self._copy, there)
        return there
