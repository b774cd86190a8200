"""Modules of transformers are taken for ours by what they compute, and by nothing else."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan_dp.models.causal_lm.formulas import (
    LeanRMSNorm,
    OffsetRMSNorm,
    gated_feed_forwards,
    rms_norm,
    use_lean_norms,
    use_our_norms,
)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-3

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class OfTheRoot(Norm):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Squared(Norm):
    def forward(self, x):
        return self.weight * super().forward(x)


class WithMore(Norm):
    def forward(self, x, residual):
        return super().forward(x) + residual


class Gemmas(Norm):
    def forward(self, x):
        return super().forward(x) / self.weight * (1 + self.weight)


@pytest.mark.parametrize(
    "kind, ours",
    [(Norm, nn.RMSNorm), (Gemmas, OffsetRMSNorm)]
    + [(kind, kind) for kind in (OfTheRoot, Centred, Squared, WithMore)],
)
def test_norms(kind, ours):
    model = nn.Sequential(kind())
    weight, x = model[0].weight, torch.randn(3, 4)
    nn.init.normal_(weight)
    expected = None if kind is WithMore else model(x)
    use_our_norms(model)
    assert type(model[0]) is ours
    assert model[0].weight is weight
    if expected is not None:
        torch.testing.assert_close(model(x), expected)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.down_proj = nn.Linear(6, 4, bias=False)
        self.act_fn = nn.GELU("tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Biased(Gated):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Linear(6, 4)


class Scaled(Gated):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [Gated, Swapped, Biased, Scaled])
def test_feed_forwards(kind):
    model = nn.Sequential(kind())
    assert gated_feed_forwards(model) == [model[0]] * (kind is Gated)


# The lean RMSNorm is PyTorch's, and keeps its input alone.


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 5, 24, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(24, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randn(2, 5, 24, generator=generator).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_output_and_gradients_are_pytorchs(dtype, device):
    x, weight, grad_y = (x.detach().to(device).requires_grad_() for x in inputs(dtype))
    results = []
    for function in (rms_norm, F.rms_norm):
        y = function(x, (24,), weight, 1e-5)
        results.append((y, *torch.autograd.grad(y, (x, weight), grad_y)))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype == dtype
        tolerance = 4 * torch.finfo(dtype).eps
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_what_is_kept():
    kept = []
    x, weight, _ = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, (24,), weight, 1e-5)
    large = [tensor for tensor in kept if tensor.numel() == x.numel()]
    assert [tensor.data_ptr() for tensor in large] == [x.data_ptr()]


def test_modules_stay_what_they_are():
    model = nn.Sequential(nn.RMSNorm(24, eps=1e-3), nn.Linear(24, 24))
    names, x = list(model.state_dict()), torch.randn(3, 24)
    expected = model[0](x)
    use_lean_norms(model)
    assert type(model[0]) is LeanRMSNorm
    assert isinstance(model[0], nn.RMSNorm)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model[0](x), expected)
    others = nn.Sequential(nn.RMSNorm(24), nn.RMSNorm(24, eps=1e-3, elementwise_affine=False))
    use_lean_norms(others)
    assert {type(norm) for norm in others} == {nn.RMSNorm}
