"""A Llama's block by compiled regions: TorchTitan's values, each sample's own gradient, and graphs
that hold no parameter. In one process, without a mesh."""

import re

import pytest
import torch
import torch.nn as nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from tests import build
from tests.gradients.test_layers import Collected
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.models.llama3 import regions
from torchtitan_dp.models.llama3.regions import (
    RegionBlock,
    Regions,
    compiled,
    sample_copies,
    use_regions,
)

EAGER = Regions(regions.norm, regions.add_and_norm, regions.rotate, regions.swiglu)
B, T = 3, build.T


def blocks(dtype=torch.float32):
    """A model's two blocks, with norm weights that are not ones."""
    torch.manual_seed(0)
    model = build.reference_model()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0)
    model.layers.to(dtype)
    return model.layers, model.freqs_cis


def hidden(samples=B, tokens=T, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    size = (samples, tokens, build.ARGS.dim)
    return torch.randn(size, generator=generator).to(dtype).requires_grad_()


def run(layers, freqs_cis, h, positions=None):
    """The blocks' output and the gradient of h, for a loss that is a sum over samples."""
    out = h
    for block in layers.values():
        out = block(out, freqs_cis, None, positions)
    out.float().sin().sum().backward()
    return out, h.grad


def by_regions(chosen=EAGER, dtype=torch.float32):
    layers, freqs_cis = blocks(dtype)
    per_sample_layers(layers)
    use_regions(layers, chosen)
    assert all(type(block) is RegionBlock for block in layers.values())
    return layers, freqs_cis


@pytest.mark.parametrize("positions", [None, torch.arange(T).flip(0)[None]], ids=["", "positions"])
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=str)
def test_values_are_torchtitans(dtype, near, positions):
    layers, freqs_cis = by_regions(dtype=dtype)
    sink = Collected(layers)
    plain, _ = blocks(dtype)
    actual = run(layers, freqs_cis, hidden(dtype=dtype), positions)
    expected = run(plain, freqs_cis, hidden(dtype=dtype), positions)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=near, atol=near)
    assert set(sink.gradients) == {name for name, _ in plain.named_parameters()}


def test_row07_other_samples_change_nothing():
    results = []
    layers, freqs_cis = by_regions(compiled("aot_eager"))
    for others in (1.0, 100.0):
        sink = Collected(layers)
        h = hidden().detach()
        h[1:] *= others
        out, grad_h = run(layers, freqs_cis, h.requires_grad_())
        results.append((out[0], grad_h[0], *(g[0] for g in sink.gradients.values())))
        assert torch.isfinite(out).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_no_parameter_enters_a_graph():
    seen = []

    def watched(module, inputs):
        seen.extend([*inputs, *module.parameters(), *module.buffers()])
        return lookup_backend("aot_eager")(module, inputs)

    layers, freqs_cis = by_regions(compiled(watched))
    Collected(layers)
    run(layers, freqs_cis, hidden())
    tensors = [x for x in seen if isinstance(x, torch.Tensor)]
    assert len(tensors) >= 2 + 3 + 3 + 2
    assert not any(isinstance(x, nn.Parameter) for x in tensors)
    # What is as small as a weight is a sample's copy of one, or RoPE's.
    assert all(len(x) == B or x.shape[-1] == 2 for x in tensors)


@pytest.mark.thorough
@pytest.mark.slow
def test_lengths_and_validation_stay_within_the_limit_of_graphs():
    """All rungs of a ladder, with and without gradients: else `fullgraph` would end the run."""
    torch._dynamo.reset()
    layers, freqs_cis = by_regions(compiled("aot_eager"))
    Collected(layers)
    counters.clear()
    for tokens in range(4, 4 * 8 + 1, 4):
        run(layers, freqs_cis, hidden(tokens=tokens))
    with torch.no_grad():
        for tokens, samples in ((T, B), (T, 1), (8, B)):
            out = hidden(samples, tokens)
            for block in layers.values():
                out = block(out, freqs_cis, None)
    graphs = counters["stats"]["unique_graphs"]
    assert 4 * 4 <= graphs <= 4 * 6, graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_of_a_weight(dtype):
    norm = nn.RMSNorm(4, eps=1e-5, dtype=dtype)
    with pytest.raises(AssertionError, match="was not converted"):
        sample_copies(norm, 2)
    model = nn.Sequential(norm)
    per_sample_layers(model)
    sink = Collected(model)
    copies, eps = sample_copies(norm, 2)
    assert eps == 1e-5
    assert copies.dtype == torch.float32
    copies.data[0] = 7
    assert torch.equal(norm.weight, torch.ones(4, dtype=dtype))
    grad = torch.tensor([[1.0, 2, 3, 1.001], [5, 6, 7, 8]])  # 1.001 is none of bf16's
    copies.backward(grad)
    assert torch.equal(sink.gradients["0.weight"], grad)
    assert norm.weight.grad is None
    with torch.no_grad():
        assert not sample_copies(norm, 2)[0].requires_grad
    frozen, _ = sample_copies(nn.RMSNorm(4, eps=1e-5).requires_grad_(False), 3)
    assert frozen.shape == (3, 4)


def kernels(function, *inputs):
    """How many kernels Inductor's CPU backend makes of the forward pass, and of the backward."""
    from torch._inductor.utils import run_and_get_code

    def both():
        results = torch.compile(function, fullgraph=True, dynamic=True)(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.randn_like(x) for x in results])

    _, codes = run_and_get_code(both)
    return [len(set(re.findall(r"cpp_fused_\w+", code))) for code in codes]


def bf16(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("region", "shapes", "more"),
    [
        (regions.swiglu, [(2, 32, 64)] * 2, ()),
        (regions.rotate, [(2, 32, 4, 16)] * 2, (torch.randn(32, 8, 2),)),
        (regions.norm, [(2, 32, 64)], (torch.randn(2, 64, requires_grad=True), 1e-5)),
        (regions.add_and_norm, [(2, 32, 64)] * 2, (torch.randn(2, 64, requires_grad=True), 1e-5)),
    ],
)
def test_regions_are_single_kernels(region, shapes, more):
    """As far as a CPU can tell: Inductor makes one kernel of each, forward and backward."""
    assert kernels(region, *(bf16(*shape) for shape in shapes), *more) == [1, 1]
