"""Attention in fp32 by the memory-efficient kernel: the same, with no grouped queries left."""

import pytest
import torch
import torch.nn.functional as F

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from tests import build
from torchtitan_dp.distributed.attention import use_efficient_attention
from torchtitan_dp.models.llama3.model import FLAVORS
from torchtitan_dp.preflight import check

T, HEADS, KV_HEADS = 24, 4, 2


def attention():
    holder = torch.nn.Module()
    holder.inner_attention = ScaledDotProductAttentionWrapper()
    use_efficient_attention(holder)
    assert type(holder.inner_attention) is not ScaledDotProductAttentionWrapper
    return holder.inner_attention


def inputs(device="cpu", dtype=torch.float32, t=T, head_dim=8):
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [
        torch.randn(2, n, t, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in heads
    ]


def test_repeated_keys_and_values_change_nothing():
    given = inputs()
    reference = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(reference.square().sum(), given)
    actual = attention()(*given, enable_gqa=True)
    torch.testing.assert_close(actual, reference)
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), given), expected)


def test_fp32_is_offered_the_efficient_kernel_without_grouped_queries(monkeypatch):
    seen = []

    def look(q, k, v, **options):
        enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
        seen.append((q.dtype, enabled, k.shape[1], options.get("enable_gqa", False)))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    attention()(*inputs(), enable_gqa=True)
    attention()(*inputs(dtype=torch.bfloat16), enable_gqa=True)
    assert seen == [
        (torch.float32, True, HEADS, False),
        (torch.bfloat16, False, KV_HEADS, True),  # as TorchTitan has it
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_grouped_queries_in_fp32_take_no_square_memory_on_cuda():
    given = inputs("cuda", t=8192, head_dim=64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention()(*given, enable_gqa=True)
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * HEADS * 8192**2 * 4 / 4
    q, k, v = (x.detach()[:, :, :256] for x in given)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention()(q, k, v, enable_gqa=True), expected)


@pytest.mark.parametrize(
    ("flavor", "dtype", "cp", "accelerator", "refused"),
    [
        ("1B", "float32", 2, True, True),
        ("1B", "float32", 2, False, False),
        ("1B", "float32", 1, True, False),
        ("1B", "bfloat16", 2, True, False),
        ("debug", "float32", 2, True, False),  # every head has keys of its own
    ],
)
def test_a_ring_that_no_kernel_has_is_refused(monkeypatch, flavor, dtype, cp, accelerator, refused):
    monkeypatch.setattr(check, "has_accelerator", lambda: accelerator)
    config = build.config(f"--training.mixed_precision_param={dtype}", degrees=(1, 1, cp))
    if not refused:
        check._check_attention(config, FLAVORS[flavor])
        return
    with pytest.raises(ValueError, match="mixed_precision_param = 'float32'") as error:
        check._check_attention(config, FLAVORS[flavor])
    assert "\n" not in str(error.value)
    assert "set it to 'bfloat16'" in str(error.value)
