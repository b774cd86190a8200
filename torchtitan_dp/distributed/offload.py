"""`activation_checkpoint.offload_inputs`: checkpointed blocks keep their inputs on the host.

With full activation checkpointing a block's input is all that is kept of it, and at long T these
inputs are most of what a device holds. They are copied out when the block has run and back when
its backward begins; nothing waits for the host. On CUDA copies have a stream of their own: those
out run beside the blocks that follow, and while a block is recomputed the input of the one before
it comes back.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch


class _OnHost:
    """Holds one input's copy, and knows which was copied before: backward asks for that next."""

    def __init__(self, saved: torch.Tensor, before: "_OnHost | None") -> None:
        self._copy, self._device = to_host(saved), saved.device
        self._before = None if before is None else weakref.ref(before)
        self._fetched: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the input on its device, where the one before begins to come."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        before = None if self._before is None else self._before()
        if self._device.type == "cuda":
            on_arrival(fetched)
            if before is not None:
                before.fetch()
        return fetched

    def fetch(self) -> None:
        """Begin to copy the input back, unless that has begun."""
        if self._fetched is None:
            self._fetched = from_host(self._copy, self._device)


class InputsOnHost:
    """Keeps the inputs of one model's checkpointed blocks in the host's memory."""

    def __init__(self) -> None:
        self._last: weakref.ref[_OnHost] | None = None  # of this forward pass, while it is alive

    @contextlib.contextmanager
    def __call__(self, h: torch.Tensor) -> Iterator[None]:
        """Keep in the host's memory what autograd saves within that is shaped as `h`.

        Wrap the call of one checkpointed block with its input `h`. What the block saves when it is
        recomputed, in backward, is not affected.
        """
        shape, dtype = h.shape, h.dtype  # autograd keeps `pack`, which must not keep h

        def pack(saved: torch.Tensor) -> torch.Tensor | _OnHost:
            if saved.shape != shape or saved.dtype != dtype:
                return saved
            packed = _OnHost(saved, None if self._last is None else self._last())
            self._last = weakref.ref(packed)
            return packed

        def unpack(packed: torch.Tensor | _OnHost) -> torch.Tensor:
            return packed.take() if isinstance(packed, _OnHost) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy to page-locked memory, so that the copy back need not wait either."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    if not x.is_cuda:
        return copy.copy_(x)
    side = _stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))  # x may still be computed
    with torch.cuda.stream(side):
        copy.copy_(x, non_blocking=True)
    x.record_stream(side)  # its memory serves nobody else before it is copied
    return copy


def from_host(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy the tensor back to `device`; on CUDA wait with `on_arrival` before its use."""
    if device.type != "cuda":
        return copy.to(device)
    with torch.cuda.stream(_stream(device)):  # after the copy out, which was queued there
        return copy.to(device, non_blocking=True)


def on_arrival(x: torch.Tensor) -> None:
    """Have what is computed from here on wait for a tensor that `from_host` fetches."""
    current = torch.cuda.current_stream(x.device)
    current.wait_stream(_stream(x.device))
    x.record_stream(current)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's copies."""
    return torch.cuda.Stream(device)
