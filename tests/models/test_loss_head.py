"""The chunked loss head equals the plain one, and holds the logits of one chunk only."""

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_dp.models import loss
from torchtitan_dp.models.loss import LossHead, per_sample_loss


def head_and_inputs(samples=1, tokens=33, dim=24, vocabulary=37):
    generator = torch.Generator().manual_seed(0)
    output = nn.Linear(dim, vocabulary, bias=False)
    nn.init.normal_(output.weight, std=dim**-0.5, generator=generator)
    h = torch.randn(samples, tokens, dim, generator=generator)
    labels = torch.randint(0, vocabulary, (samples, tokens), generator=generator)
    labels[:, 20:] = -100
    return output, h, labels, (labels >= 0).sum(1)


@pytest.mark.parametrize("chunk", [1, 5, 33, 1000])
def test_loss_and_gradients_are_the_plain_ones(chunk):
    output, h, labels, targets = head_and_inputs()
    chunked = LossHead.over(output, chunk)

    def results(loss_of):
        x = h.clone().requires_grad_()
        output.weight.grad = None
        loss = loss_of(x)
        (2.5 * loss).sum().backward()
        return loss, x.grad, output.weight.grad

    expected = results(lambda x: per_sample_loss(output(x), labels, targets))
    actual = results(lambda x: chunked(x, labels, targets))
    for one, other, rel in zip(actual, expected, (1e-6, 1e-5, 1e-5), strict=True):
        assert (one - other).norm() <= rel * other.norm()


def test_samples_are_never_merged():
    """Without gradients there may be any number."""
    output, h, labels, targets = head_and_inputs(samples=3)
    head = LossHead.over(output, 7)
    with torch.no_grad():
        expected = per_sample_loss(output(h), labels, targets)
        torch.testing.assert_close(head(h, labels, targets), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError, match="merged"):
        head(h, labels, targets)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("chunk", [400, 40])
def test_the_logits_of_one_chunk_exist(chunk):
    """Forward and backward."""
    output, h, labels, targets = head_and_inputs(tokens=400, dim=4, vocabulary=64)
    with Largest() as largest:
        LossHead.over(output, chunk)(h.requires_grad_(), labels, targets).sum().backward()
    assert largest.numel == chunk * 64


def logits_labels_scales(dtype, vocabulary):
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(70, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (70,), generator=generator)
    labels[5:9] = -100
    return logits, labels, torch.linspace(0.1, 1, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [37, 40_000])  # many rows a block; one
def test_both_ways_to_losses_and_gradients(dtype, vocabulary):
    logits, labels, scales = logits_labels_scales(dtype, vocabulary)
    wide = logits.float().requires_grad_()
    expected = nn.functional.cross_entropy(wide, labels, reduction="none") * scales
    (expected_grad,) = torch.autograd.grad(expected.sum(), wide)
    for way in (loss.losses_to_gradients_, loss._by_comparison):
        grad = logits.clone()
        torch.testing.assert_close(way(grad, labels, scales), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=1e-2, atol=1e-6)
        assert grad[5:9].abs().max() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [264, 128_256])
def test_on_cuda_losses_and_gradients_are_the_cpus(dtype, vocabulary):
    logits, labels, scales = logits_labels_scales(dtype, vocabulary)
    on_cuda = logits.cuda()
    losses = loss.losses_to_gradients_(on_cuda, labels.cuda(), scales.cuda())
    expected = loss.losses_to_gradients_(logits, labels, scales)
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(on_cuda.cpu(), logits, rtol=1e-2, atol=1e-6)
