"""The lean RMSNorm is PyTorch's, and keeps its input alone."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan_dp.models.causal_lm.formulas import LeanRMSNorm, rms_norm, use_lean_norms


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 5, 24, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(24, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randn(2, 5, 24, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_output_and_gradients_are_pytorchs(dtype):
    x, weight, grad_y = inputs(dtype)
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
