"""Collectives on plain tensors, and the results of those that are still running.

What an asynchronous collective writes may hold another sample's gradient until it is done, so each
is started here (`tests/test_collectives.py` lists them), and its caller gets a `Pending`.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_dp.base.torch_private import functional_collectives as ft_c

# These have new names since torch 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_gather_traced = getattr(ft_c, "all_gather_single", None) or ft_c.all_gather_tensor


class Pending:
    """A tensor that collectives may still be writing, with their inputs.

    Guarantee:
        `wait` is the only way to the tensor's values, and returns when every collective that writes
        them is done. Assumes that callers write to no input meanwhile.
    """

    def __init__(self, output: Tensor) -> None:
        # This object's alone; complete but for the parts that collectives are to write.
        self._unfinished: Tensor | None = output
        self._running: deque[tuple[Any, Tensor]] = deque()  # work and input

    @property
    def storage(self) -> torch.UntypedStorage:
        """The tensor's memory, to be counted, not read."""
        assert self._unfinished is not None, "it was handed over already"
        return self._unfinished.untyped_storage()

    def reduce_scatter(self, part: slice, input: Tensor, group: dist.ProcessGroup) -> None:
        """Begin a `reduce_scatter_sum` of `input` into `output[part]`.

        Collective: over the group, in the order of calls.
        """
        assert self._unfinished is not None, "it was handed over already"
        output, flat = self._unfinished[part].view(-1), input.view(-1)
        work = _reduce_scatter(output, flat, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self._running.append((work, input))

    def wait_for_first(self) -> None:
        """Wait for the collective that began first, if one is running, and free its input."""
        if self._running:
            work, _ = self._running.popleft()
            work.wait()

    def wait(self) -> Tensor:
        """Wait for all, and hand the tensor over, once."""
        while self._running:
            self.wait_for_first()
        output, self._unfinished = self._unfinished, None
        assert output is not None, "it was handed over already"
        return output.wait() if isinstance(output, ft_c.AsyncCollectiveTensor) else output


def pass_on(buffer: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to send a flat buffer to the next rank, and to receive the previous rank's.

    Buffers have one size on all ranks; callers leave theirs unchanged until the result is waited
    for. Collective: over the group.
    """
    to = [*range(1, dist.get_world_size(group)), 0]
    return _functional(lambda: ft_c.permute_tensor(buffer, to, group), buffer)


def begin_all_gather(buffer: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to all-gather flat buffers, on the terms of `pass_on`: `(ranks * size,)`."""
    return _functional(lambda: _all_gather_traced(buffer, 0, group), buffer)


def exchange(
    buffer: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup
) -> Pending:
    """Begin to send the parts of a flat buffer to all ranks, and to receive such parts: so many
    elements to, and from, each rank. As `pass_on` otherwise."""
    return _functional(lambda: ft_c.all_to_all_single(buffer, from_each, to_each, group), buffer)


def _functional(begin: Callable[[], Tensor], input: Tensor) -> Pending:
    """Begin a functional collective. A traced one is waited for already."""
    output = begin()
    pending = Pending(output)
    if isinstance(output, ft_c.AsyncCollectiveTensor):
        pending._running.append((output, input))
    return pending


def reduce_scatter_sum(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `input` over the group, and write this rank's share to `output`; shares are equal and
    contiguous. Collective: over the group."""
    _reduce_scatter(output.view(-1), input.view(-1), op=dist.ReduceOp.SUM, group=group)


def all_gather(input: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather a tensor of one shape: `(ranks, *input.shape)`. Collective: over the group."""
    gathered = input.new_empty((dist.get_world_size(group), *input.shape))
    _all_gather(gathered.view(-1), input.contiguous().view(-1), group=group)
    return gathered
