"""Offloaded inputs of checkpointed blocks: equal gradients, and nothing kept on the device."""

import weakref

import pytest
import torch

from tests import build
from tests.gradients.loop import check
from torchtitan_dp.distributed.offload import inputs_on_host

OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")  # what is saved, not the kernels
GRAD_SAMPLE = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "overrides", [(), COMPILED, GRAD_SAMPLE], ids=["microbatch", "compiled", "V2"]
)
def test_equals_the_loop(degrees, overrides):
    check(degrees, *OFFLOAD, *overrides)


def test_only_the_copy_is_kept():
    block = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    h = torch.randn(2, 8, requires_grad=True)
    original = h * 1
    with inputs_on_host(original):
        y = torch.utils.checkpoint.checkpoint(block, original, use_reentrant=False)
    gone = weakref.ref(original.untyped_storage())
    expected = torch.autograd.grad(block(original).sum(), h, retain_graph=True)
    del original
    assert gone() is None
    torch.testing.assert_close(torch.autograd.grad(y.sum(), h), expected)


def test_without_full_checkpointing_it_is_refused():
    with pytest.raises(ValueError, match=r"offload_inputs = true with mode = 'none'.*'full'"):
        build.config("--activation_checkpoint.offload_inputs")
