"""`activation_checkpoint.offload_inputs`: checkpointed blocks keep their inputs on the host.

With full activation checkpointing a block's input is all that is kept of it, and at long T these
inputs are most of what a device holds. They are copied out when the block has run and back when
its backward begins, on the stream that computes: nothing waits for the host.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class _OnHost(NamedTuple):
    copy: torch.Tensor
    device: torch.device


@contextlib.contextmanager
def inputs_on_host(h: torch.Tensor) -> Iterator[None]:
    """Keep in the host's memory what autograd saves within that is shaped as `h`.

    Wrap the call of one checkpointed block with its input `h`. What the block saves when it is
    recomputed, in backward, is not affected.
    """
    shape, dtype = h.shape, h.dtype  # autograd keeps `pack`, which must not keep h

    def pack(saved: torch.Tensor) -> torch.Tensor | _OnHost:
        if saved.shape != shape or saved.dtype != dtype:
            return saved
        return _OnHost(to_host(saved), saved.device)

    def unpack(packed: torch.Tensor | _OnHost) -> torch.Tensor:
        return from_host(*packed) if isinstance(packed, _OnHost) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy to page-locked memory, so that the copy back need not wait either."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return copy.copy_(x, non_blocking=x.is_cuda)


def from_host(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the tensor back to `device`."""
    return copy.to(device, non_blocking=True)
