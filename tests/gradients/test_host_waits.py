"""Between the draw and the update of a step, the host never waits for the device.

What makes it wait is an operation whose result the host must have: a number that is read back, or a
tensor whose shape follows from values. On CPU they are the same operations, so a dispatch mode sees
them. What no operation shows is a number that becomes a tensor on the device.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.privacy.clipping import ClipPolicy

WAITS = {
    "aten::_local_scalar_dense",  # item(), bool(tensor), an index that is a tensor
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_assert_async",
}


class Waits(TorchDispatchMode):
    """Lists the operations that would make the host wait, and copies to another device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket._qualified_op_name
        mask = name.startswith("aten::index") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8)
            for x in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITS or mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def listed_tensors(found):
    """List the numbers that are made tensors meanwhile."""
    with contextlib.ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            make = getattr(torch, name)

            def listed(*args, make=make, **kwargs):
                found.append(f"torch.{make.__name__}({args[0]!r})")
                return make(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch, name, listed))
        yield


def waits_of_a_step(degrees, overrides, fault=None):
    """Of two microbatches and the sum over ranks; the first ones, which lay out, go before."""
    args = build.llama(96, vocab_size=101)  # `ghost` finds ghost norms
    built = build.build(degrees, *overrides, args=args)
    tokens_NT, labels_NT = build.data(samples=4)
    size = built.batch_size

    def microbatch(start):
        part = slice(start, start + size)
        loss_B = built.losses(tokens_NT[part], labels_NT[part])
        return built.gradients.accumulate_clipped(loss_B, torch.ones(size, dtype=torch.bool))

    microbatch(0)
    clip = ClipPolicy.clip

    def reads_the_norm(self, squared_norm_GB, *terms):
        assert squared_norm_GB.max() >= 0 or fault is None
        return clip(self, squared_norm_GB, *terms)

    waits, made = Waits(), []
    with contextlib.ExitStack() as stack:
        if fault is not None:
            stack.enter_context(mock.patch.object(ClipPolicy, "clip", reads_the_norm))
        stack.enter_context(listed_tensors(made))
        stack.enter_context(waits)
        microbatch(0)
        microbatch(size if size < 4 else 0)
        built.gradients.clipped_sum.take()
    return waits.found + made


METHODS = {
    "microbatch": ["--privacy.gradient_method=microbatch"],
    "grad_sample": ["--privacy.gradient_method=grad_sample", "--training.local_batch_size=2"],
    "ghost": ["--privacy.gradient_method=ghost", "--training.local_batch_size=2"],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_the_host_waits_for_nothing(degrees, method):
    for found in on_ranks(degrees[2], waits_of_a_step, degrees, METHODS[method]):
        assert found == []


def test_a_norm_that_is_read_back_is_seen():
    (found,) = on_ranks(1, waits_of_a_step, (1, 1, 1), METHODS["microbatch"], "a norm is read")
    assert "aten::_local_scalar_dense" in found or "aten::is_nonzero" in found
