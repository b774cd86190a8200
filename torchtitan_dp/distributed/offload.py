"""`activation_checkpoint.offload_inputs`: checkpointed blocks keep their inputs on the host.

With full activation checkpointing only a block's input is kept, and at long T these inputs fill
most of a device. They are copied out when the block begins and back when its backward begins;
nothing waits for the host. Copies have a stream of their own: copies out overlap the blocks that
follow, and the input of the block before comes back while a block is recomputed.

Memory on the device: an input is always allocated on the computing stream C, and dropped once C
waits for the copy stream's event. So C's next allocation can reuse it at once, whatever the host
has queued by then. C waits for the copy out of the block two before, which has had two blocks'
time.

Memory on the host: page-locked buffers of one size, that of the longest sample, one for each live
input. A buffer is reused when its input's graph is gone; both inputs are copied on the one copy
stream, in order.
"""

import collections
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.distributed.host_memory import page_locked, page_locked_bytes

ON_DEVICE = 2
"""Inputs on the device in forward: the block's own, and the one before, which is copied out."""


class InputsOnHost:
    """The inputs of one model's checkpointed blocks, in the host's memory."""

    def __init__(self, longest: int) -> None:
        """Expect inputs (B, T, D) of up to T = `longest`; a longer one works, and may waste
        buffers."""
        self.host_bytes = 0
        """Bytes of page-locked memory in use, as `page_locked_bytes` counts them."""
        self._longest = longest
        self._free: list[Tensor] = []
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
        while self._free:
            buffer = self._free.pop()
            if buffer.numel() >= like.numel() and buffer.dtype == like.dtype:
                return buffer
            self.host_bytes -= page_locked_bytes(buffer.nbytes)
        buffer = page_locked(most, like.dtype, like.device)
        self.host_bytes += page_locked_bytes(buffer.nbytes)
        return buffer

    def return_buffer(self, buffer: Tensor) -> None:
        """Make a buffer available to another input."""
        self._free.append(buffer)


class _OnHost:
    """One input's copy on the host, with the one before, which backward needs next."""

    def __init__(self, inputs: InputsOnHost, saved: Tensor, before: "_OnHost | None") -> None:
        self._inputs, self._device = inputs, saved.device
        buffer = inputs.take_buffer(saved)
        weakref.finalize(self, inputs.return_buffer, buffer)
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
