"""Offloaded inputs of checkpointed blocks: equal gradients, and nothing kept on the device."""

import weakref

import pytest
import torch

from tests import build
from tests.gradients.loop import check
from torchtitan_dp.distributed.offload import InputsOnHost, _OnHost

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
    with InputsOnHost()(original):
        y = torch.utils.checkpoint.checkpoint(block, original, use_reentrant=False)
    gone = weakref.ref(original.untyped_storage())
    expected = torch.autograd.grad(block(original).sum(), h, retain_graph=True)
    del original
    assert gone() is None
    torch.testing.assert_close(torch.autograd.grad(y.sum(), h), expected)


def test_without_full_checkpointing_it_is_refused():
    with pytest.raises(ValueError, match=r"offload_inputs = true with mode = 'none'.*'full'"):
        build.config("--activation_checkpoint.offload_inputs")


def test_an_input_knows_the_one_before_while_that_is_alive():
    """What comes back beside a block's backward is its predecessor's, and no other pass's."""
    x = torch.randn(2, 8)
    first = _OnHost(x, None)
    second = _OnHost(x + 1, first)
    assert second._before is not None
    assert second._before() is first
    assert torch.equal(second.take(), x + 1)
    assert torch.equal(first.take(), x)
    del first
    assert second._before() is None  # a pass that is over keeps nothing for the next


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_copies_have_a_stream_of_their_own():
    """Gradients are those without offloading, where inputs' memory is reused at once."""
    blocks = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]

    def gradients(around):
        h = torch.ones(4096, 512, device="cuda", requires_grad=True)
        x = h * 1
        for block in blocks:
            with around(x):
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return torch.autograd.grad(x.square().sum(), h)[0]

    import contextlib

    expected = gradients(lambda _: contextlib.nullcontext())
    for _ in range(3):
        torch.testing.assert_close(gradients(InputsOnHost()), expected)
