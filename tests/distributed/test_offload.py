"""Offloaded inputs of checkpointed blocks: equal gradients, little kept on the device, and no more
buffers on the host than inputs."""

import contextlib
import weakref

import pytest
import torch

from torchtitan_dp.distributed import host_memory
from torchtitan_dp.distributed.host_memory import InputsOnHost


def make_blocks(count):
    return [
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)) for _ in range(count)
    ]


def forward(blocks, around, h, inputs=None):
    """Run checkpointed blocks; `inputs` then lists weak references to their inputs' memory."""
    x = h * 1
    for block in blocks:
        if inputs is not None:
            inputs.append(weakref.ref(x.untyped_storage()))
        with around(x):
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


def tokens(length=4, batch=1):
    return torch.randn(batch, length, 8, requires_grad=True)


def plain(_):
    return contextlib.nullcontext()


def test_one_input_is_on_the_device():
    blocks, h, around, inputs = make_blocks(5), tokens(), InputsOnHost(4), []

    def alive():
        return [reference() is not None for reference in inputs]

    seen = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(sum(alive())))
    y = forward(blocks, around, h, inputs)
    assert seen == [1, 1, 1, 1, 1]
    assert not any(alive())
    expected = torch.autograd.grad(forward(blocks, plain, h).sum(), h)
    assert torch.equal(torch.autograd.grad(y.sum(), h)[0], expected[0])
    assert not any(alive())


@pytest.fixture
def allocated(monkeypatch):
    """The sizes in values of the page-locked buffers that are allocated."""
    sizes, allocate = [], host_memory.page_locked

    def page_locked(numel, *terms):
        sizes.append(numel)
        return allocate(numel, *terms)

    monkeypatch.setattr(host_memory, "page_locked", page_locked)
    return sizes


@pytest.mark.parametrize(
    ("count", "longest", "lengths", "sizes"),
    [
        (3, 6, (2, 6, 4, 6), [6 * 8] * 3),
        (1, 2, (2, 5), [2 * 8, 5 * 8]),  # longer than the longest: in the place of a buffer
    ],
)
def test_a_buffer_for_each_block_serves_every_length(allocated, count, longest, lengths, sizes):
    blocks, around = make_blocks(count), InputsOnHost(longest)
    for length in lengths:
        h = tokens(length)
        expected = torch.autograd.grad(forward(blocks, plain, h).sum(), h)
        assert torch.equal(torch.autograd.grad(forward(blocks, around, h).sum(), h)[0], expected[0])
    assert allocated == sizes
    assert around.host_bytes == count * 256  # up to 192 bytes each: the next power of two


def test_a_graph_that_is_alive_keeps_its_inputs():
    """As `ghost` in two passes, and as a pass begun before another one's backward."""
    blocks, around = make_blocks(3), InputsOnHost(4)
    h, other = tokens(), tokens()
    expected, others = (torch.autograd.grad(forward(blocks, plain, x).sum(), x) for x in (h, other))
    y = forward(blocks, around, h).sum()
    z = forward(blocks, around, other).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(y, h, retain_graph=True)[0], expected[0])
    assert torch.equal(torch.autograd.grad(z, other)[0], others[0])
    assert torch.equal(torch.autograd.grad(y, h)[0], expected[0])


@pytest.mark.cuda
def test_on_cuda_gradients_are_those_without_offloading():
    """Where inputs' memory is reused at once."""
    blocks = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]

    def gradients(around):
        h = torch.ones(1, 4096, 512, device="cuda", requires_grad=True)
        return torch.autograd.grad(forward(blocks, around, h).square().sum(), h)[0]

    expected, inputs = gradients(plain), InputsOnHost(4096)
    for _ in range(3):
        torch.testing.assert_close(gradients(inputs), expected)
