"""The asynchronous collectives of the package, late on purpose: each begins when it is waited for.

On one machine gloo is done within microseconds, so that a result which is read too early is often
right, or another sample's that lay in the same memory. Here nothing is read or sent before the
wait, and what will be written is NaN until then. A program that reads it before, or overwrites or
frees an input, gets NaN, another sum or an error, every time. All ranks must wait in the same
order. `torchtitan_dp.base.collectives` begins all of them (tests/test_collectives.py).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_dp.base import collectives
from torchtitan_dp.base.collectives import Pending

_reduce_scatter, _functional = collectives._reduce_scatter, collectives._functional


def install() -> None:
    """Make the collectives of this process late."""
    collectives._reduce_scatter = _late_reduce_scatter
    collectives._functional = _Received


def _late_reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, **options: Any
) -> Any:
    if not async_op:
        return _reduce_scatter(output, input, **options)
    output.fill_(torch.nan)
    kept = _Kept(input)
    return SimpleNamespace(wait=lambda: _reduce_scatter(output, kept.tensor(), **options))


class _Received(Pending):
    """The result of a functional collective, which exists when it is waited for."""

    def __init__(self, begin: Callable[[], torch.Tensor], input: torch.Tensor) -> None:
        super().__init__(input)
        self._begin = begin

    def wait(self) -> torch.Tensor:
        super().wait()
        return Pending(self._begin()).wait()


class _Kept:
    """A tensor whose memory another object must keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "the input of a collective was freed before it was waited for"
        dtype, *layout = self._like
        return torch.empty(0, dtype=dtype).set_(storage, *layout)
