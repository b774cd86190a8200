"""`activation_checkpoint.offload_inputs`: checkpointed blocks keep their inputs on the host.

With full activation checkpointing a block's input is all that is kept of it, and at long T these
inputs are most of what a device holds. They are copied out when the block begins and back when its
backward begins; nothing waits for the host. Copies have a stream of their own: those out run beside
the blocks that follow, and while a block is recomputed the input of the one before it comes back.

Memory on the device: an input is allocated on the stream C that computes, on its way back too, and
dropped once C waits for the copy stream's event of it. So its memory serves C's next allocation at
once, whatever the host has queued by then. C waits for the copy out of the block two before, which
has had two blocks' time.

Memory on the host: page-locked buffers of one size, that of the longest sample, one for each input
alive at once. A buffer serves the next input when the last one's graph is gone: both are copied on
the one copy stream, in order.
"""

import collections
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

ON_DEVICE = 2
"""Inputs that are on the device in forward: a block's own and, on its way out, the one before."""


class InputsOnHost:
    """Keeps the inputs of one model's checkpointed blocks in the host's memory."""

    def __init__(self, longest: int) -> None:
        """
        Args:
            longest: T of the longest input (B, T, D) that is expected. A longer one has its buffer
                all the same, but what shorter ones had may then be wasted.
        """
        self.host_bytes = 0
        """Bytes of page-locked memory that are taken, as PyTorch's allocator rounds them up."""
        self._longest = longest
        self._free: list[torch.Tensor] = []
        self._last: weakref.ref[_OnHost] | None = None  # of this forward pass, while it is alive
        # Tensors that the copy stream may still use, and the event after which it does not.
        self._copied: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self._side: Any = None

    @contextlib.contextmanager
    def __call__(self, h: torch.Tensor) -> Iterator[None]:
        """Keep in the host's memory what autograd saves within that is shaped as `h`.

        Wrap the call of one checkpointed block with its input `h`, (B, T, D). What the block saves
        when it is recomputed, in backward, is not affected.
        """
        shape, dtype = h.shape, h.dtype  # autograd keeps `pack`, which must not keep h

        def pack(saved: torch.Tensor) -> torch.Tensor | _OnHost:
            if saved.shape != shape or saved.dtype != dtype:
                return saved
            packed = _OnHost(self, saved, None if self._last is None else self._last())
            self._last = weakref.ref(packed)
            self.settle(ON_DEVICE)
            return packed

        def unpack(packed: torch.Tensor | _OnHost) -> torch.Tensor:
            return packed.take() if isinstance(packed, _OnHost) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def copy(self, to: torch.Tensor, source: torch.Tensor, on_device: torch.Tensor) -> None:
        """Begin to copy, on the copy stream, after all that the current one has been given.

        Args:
            on_device: the one of the two that is there; `settle` drops it.
        """
        streams = torch.get_device_module(on_device.device)
        if self._side is None:
            self._side = streams.Stream()
        self._side.wait_stream(streams.current_stream())
        with streams.stream(self._side):
            to.copy_(source, non_blocking=True)
        self._copied.append((on_device, self._side.record_event()))

    def settle(self, keep: int = 0) -> None:
        """Have the current stream wait for all copies but the last `keep`, and drop their tensors
        on the device."""
        while len(self._copied) > keep:
            on_device, done = self._copied.popleft()
            torch.get_device_module(on_device.device).current_stream().wait_event(done)

    def take_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a flat buffer, of `like`'s dtype, that holds it and any of the longest samples."""
        most = max(like.numel(), like.numel() // like.shape[1] * self._longest)
        while self._free:
            buffer = self._free.pop()
            if buffer.numel() >= like.numel() and buffer.dtype == like.dtype:
                return buffer
            self.host_bytes -= page_locked_bytes(buffer.nbytes)
        buffer = page_locked(most, like.dtype, like.device)
        self.host_bytes += page_locked_bytes(buffer.nbytes)
        return buffer

    def return_buffer(self, buffer: torch.Tensor) -> None:
        """Let a buffer serve another input."""
        self._free.append(buffer)


class _OnHost:
    """One input's copy, which knows the one copied before: backward asks for that next."""

    def __init__(self, inputs: InputsOnHost, saved: torch.Tensor, before: "_OnHost | None") -> None:
        self._inputs, self._device = inputs, saved.device
        buffer = inputs.take_buffer(saved)
        weakref.finalize(self, inputs.return_buffer, buffer)
        self._copy = buffer[: saved.numel()].view(saved.shape)
        self._before = None if before is None else weakref.ref(before)
        inputs.copy(self._copy, saved, saved)
        self._on_device = weakref.ref(saved)  # while `inputs` or backward keeps it there

    def take(self) -> torch.Tensor:
        """Return the input on its device, where the one before begins to come."""
        there = self.fetch()
        self._inputs.settle()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return there

    def fetch(self) -> torch.Tensor:
        """Return the input on its device; it is on its way there until `settle`."""
        there = self._on_device()
        if there is None:
            there = torch.empty(self._copy.shape, dtype=self._copy.dtype, device=self._device)
            self._on_device = weakref.ref(there)
            self._inputs.copy(there, self._copy, there)
        return there


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory that copies to and from the device need not wait for."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def page_locked_bytes(size: int) -> int:
    """Count what PyTorch takes for so many bytes of page-locked memory: the next power of two.

    >>> [page_locked_bytes(size) for size in (1, 3 << 20, 1 << 22)]
    [1, 4194304, 4194304]
    """
    return 1 << (size - 1).bit_length()
