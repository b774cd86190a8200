"""`activation_checkpoint.offload_inputs`: checkpointed blocks keep their inputs in the host's
page-locked memory.

With full activation checkpointing only a block's input is kept, and at long T these inputs fill
most of a device. Each is copied to the host when its block begins, and back when the block is
recomputed, on the computing stream: at long T a block takes ten times as long as its copies. A host
buffer, of the longest sample's size, is reused when its input's graph is gone.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor


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
            return _OnHost(self, saved) if saved.shape == shape and saved.dtype == dtype else saved

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
