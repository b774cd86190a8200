"""Ring attention on gloo equals attention in one process, forward and backward; without a ring,
attention in fp32 has no grouped queries left."""

import functools
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.experimental import _attention as rotation
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from tests.processes.ranks import on_ranks
from torchtitan_dp.distributed import attention
from torchtitan_dp.distributed.attention import use_efficient_attention
from torchtitan_dp.distributed.ring import Shard


@pytest.mark.parametrize(
    ("compiled", "running", "reason", "trusted"),
    [
        ((9, 10, 2), (9, 10, 2), None, False),
        ((9, 15, 1), (9, 20, 0), None, True),
        ((9, 10, 2), (9, 20, 0), None, False),  # PyTorch's assertion is of the headers
        ((9, 20, 0), (9, 10, 2), None, False),
        (None, None, None, True),
        ((9, 20, 0), (9, 20, 0), "asked", False),
        ((9, 20, 0), (9, 20, 0), "device", False),
        ((9, 20, 0), (9, 20, 0), "layout", False),
    ],
)
def test_a_cudnn_that_cannot_be_trusted_attends_nowhere(
    monkeypatch, compiled, running, reason, trusted
):
    cudnn = types.SimpleNamespace(
        getCompileVersion=lambda: compiled, getRuntimeVersion=lambda: running
    )
    capability = (8, 0) if reason == "device" else (9, 0)
    monkeypatch.setattr(torch._C, "_cudnn", cudnn, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: compiled is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if reason == "layout":
        monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    backends = attention._safe(attention._BACKENDS, reason != "asked")
    names = [backend.name for backend in backends]
    first = "CUDNN_ATTENTION" if trusted else "FLASH_ATTENTION"
    assert names[0] == first
    assert ("CUDNN_ATTENTION" in names) == trusted
    assert "EFFICIENT_ATTENTION" in names
    assert "MATH" not in names
    if reason in (None, "layout"):
        holder = torch.nn.ModuleList([ScaledDotProductAttentionWrapper()])
        use_efficient_attention(holder)
        assert holder[0].sdpa_backends[0].name == first


class Problem:
    """Attention over the tokens of all ranks: queries, keys, values and a gradient."""

    def __init__(self, balancer, heads, tokens):
        """heads: of queries and of keys; tokens: of each rank."""
        ranks = torch.distributed.get_world_size()
        self.mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        self.balancer, (of_queries, of_keys) = balancer, heads
        torch.manual_seed(0)
        sizes = [(2, n, ranks * tokens, 8) for n in (of_queries, of_keys, of_keys, of_queries)]
        *self.whole, self.gradient = (torch.randn(size) for size in sizes)
        self.grouped = of_keys < of_queries

    def local(self, *tensors):
        """This rank's parts, which are TorchTitan's."""
        parts = cp_shard(self.mesh, tensors, None, self.balancer, input_seq_dim=2)[0]
        shard = Shard(self.mesh.get_group(), self.balancer == "headtail")
        assert all(map(torch.equal, [shard.of(x, dim=2) for x in tensors], parts))
        return parts

    def ring(self, attend):
        """What `attend` puts out of this rank's queries, keys and values, and their gradients."""
        mine = [x.detach().requires_grad_() for x in self.local(*self.whole)]
        out = attend(*mine)
        out.backward(self.local(self.gradient)[0])
        return [out.detach(), *(x.grad for x in mine)]

    def errors(self, attend):
        """The largest difference from attention in one process."""
        whole = [x.clone().requires_grad_() for x in self.whole]
        out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=self.grouped)
        out.backward(self.gradient)
        expected = self.local(out.detach(), *(x.grad for x in whole))
        pairs = zip(self.ring(attend), expected, strict=True)
        return max((a - e).abs().max().item() for a, e in pairs)


def apply_ring(mesh, balancer, rotate, apart=False):
    """An attention module that runs as a ring."""
    shard = Shard(mesh.get_group(), balancer == "headtail", rotate == "allgather")
    attention.configure_ring(replace(shard, heads_apart_from=1) if apart else shard)
    module = ScaledDotProductAttentionWrapper()
    attention.apply_ring_attention([module], mesh, cudnn=True)
    return module


def imitated_ring_errors(balancer, name, terms, apart):
    """Largest differences from whole attention, with kernels that are CUDA's alone."""
    problem = Problem(balancer, (4, 2), 16)
    apply_ring(problem.mesh, balancer, "alltoall", apart)  # turns the dispatcher on
    kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")

    def attend(*mine):
        shards = [DTensor.from_local(x, problem.mesh, [ShardOf(2)], run_check=False) for x in mine]
        return kernel(*shards, *terms)[0].to_local()

    library = imitate_cudas_kernels()
    try:
        return problem.errors(attend)
    finally:
        library._destroy()


@pytest.mark.cuda
@pytest.mark.parametrize("keys", [32, 64, 128, 192, 256, 320])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_one_block_of_very_negative_scores(name, keys):
    """exp(-logsumexp) is infinite where a kernel takes a padded key's score for 0."""
    backends = attention._safe(attention._BACKENDS, keys % 128 == 0)
    if name == "cudnn" and attention.SDPBackend.CUDNN_ATTENTION not in backends:
        pytest.skip("cuDNN is not used here")
    torch.manual_seed(0)
    base = torch.randn(64, device="cuda")
    scale = 64**0.5 * 120 / base.square().sum()  # scores near -120
    q, k, v, g = (torch.randn(2, n, 4, 64, device="cuda") for n in (256, keys, keys, 256))
    q, k = base * scale + 0.05 * q, 0.05 * k - base
    q, k, v, g = (x.bfloat16().transpose(1, 2) for x in (q, k, v, g))
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    scores = whole[0] @ whole[1].transpose(-1, -2) / 64**0.5
    assert scores.max() < -89
    expected = scores.softmax(-1) @ whole[2]
    grads = torch.autograd.grad(expected, whole, g.double())
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")
    bias = {} if name == "flash" else {"attn_bias": None}
    logsumexps = bias and {"compute_log_sumexp": True}
    out, logsumexp, cum_q, cum_k, _, _, seed, offset, _ = forward(q, k, v, **bias, **logsumexps)
    actual = attention._backward(
        backward.default,
        **dict(grad_out=g, query=q, key=k, value=v, out=out, logsumexp=logsumexp),
        **dict(cum_seq_q=cum_q, cum_seq_k=cum_k, max_q=1, max_k=1, dropout_p=0.0),
        **dict(is_causal=False, philox_seed=seed, philox_offset=offset, **bias),
    )
    for found, wanted in zip(actual[:3], grads, strict=True):
        assert found.isfinite().all()
        # bf16 rounds each score's gradient by 2**-9. All keys share a component 20 times as large
        # as their differences; its contributions must cancel. Largest error on an H200: 0.052.
        assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16, 32, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_one_block_of_cudas_efficient_kernel(rows, causal):
    """What the ring is given, and what it gives back: the kernels' own, without their padding."""
    torch.manual_seed(0)
    keys = rows if causal else 2 * rows
    sizes = [(2, 4, n, 48) for n in (rows, keys, keys)]
    q, k, v = (torch.randn(size, device="cuda", requires_grad=True) for size in sizes)
    scores = q @ k.transpose(-1, -2) / 48**0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    g = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (q, k, v), g)
    terms = {"attn_bias": None, "dropout_p": 0.0, "is_causal": causal, "scale": None}
    with torch.no_grad():
        out, logsumexp, seed, offset = attention.attend_unpadded(
            q, k, v, compute_log_sumexp=True, **terms
        )
        actual = attention.backward_padded(
            **dict(grad_out=g, query=q, key=k, value=v, out=out, logsumexp=logsumexp),
            **dict(philox_seed=seed, philox_offset=offset),
            **terms,
            grad_input_mask=[True, True, True, False],
        )
    found = logsumexp, out, *actual[:3]
    exact = scores.logsumexp(-1), expected, *grads  # a kernel's products may be three in TF32
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


def of_pytorch(op, args, kwargs):
    """PyTorch's own ring with CPU's kernels, as a handler of its dispatcher."""
    mesh, terms = attention._named(op, args, kwargs)
    terms.pop("dropout_p", None)
    group = mesh.get_group()
    if "grad_out" not in terms:
        results = torch_ring._templated_ring_attention(group, 2, op, **terms)
    else:
        results = torch_ring._templated_ring_attention_backward(
            group, 2, op, grad_out_name="grad_out", dropout_p=0.0, **terms
        )
    return attention._on_ring(mesh, *results)


def ring_results(balancer, rotate, theirs, apart):
    """Output and gradients on this rank, by our ring or PyTorch's."""
    problem = Problem(balancer, (6, 2), 24)
    kernels = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    changed = {kernels.default: of_pytorch, backward.default: of_pytorch} if theirs else {}
    torch_ring._cp_options.enable_load_balance = balancer == "headtail"
    rotation.set_rotate_method(rotate)
    module = apply_ring(problem.mesh, balancer, rotate, apart)
    with mock.patch.dict(torch_ring.custom_ops, changed):
        return problem.ring(functools.partial(module, enable_gqa=True))


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ring_is_pytorchs_bit_by_bit(world_size, balancer, rotate):
    theirs = on_ranks(world_size, ring_results, balancer, rotate, True, False)
    ours = on_ranks(world_size, ring_results, balancer, rotate, False, False)
    apart = on_ranks(world_size, ring_results, balancer, rotate, False, True)
    for expected, whole, by_heads in zip(theirs, ours, apart, strict=True):
        assert all(map(torch.equal, whole, expected))
        # One rounding more: sigmoid's vectors end elsewhere.
        torch.testing.assert_close(by_heads, expected, atol=5e-7, rtol=1e-6)


def imitate_cudas_kernels():
    """Offer flash attention and cuDNN's on CPU, with CUDA's arguments and results."""
    aten = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    seed = torch.zeros(2, dtype=torch.uint64)

    def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
        out, logsumexp = forward_op(q, k, v, dropout, causal, scale=scale)
        return out, logsumexp, None, None, q.shape[2], k.shape[2], seed, seed[:0], seed[:0]

    def flash_backward(grad, q, k, v, out, logsumexp, *rest, scale=None):
        cum_q, _, max_q, max_k, dropout, causal, *_ = rest
        assert logsumexp.is_contiguous()
        assert cum_q is None
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert grad.stride(1) < grad.stride(2), "heads within tokens"
        assert out.stride(1) < out.stride(2)
        return backward_op(grad, q, k, v, out, logsumexp, dropout, causal, scale=scale)

    def cudnn(
        q, k, v, bias, needs_logsumexp, dropout=0.0, causal=False, debug=False, *, scale=None
    ):
        assert needs_logsumexp
        out, logsumexp = forward_op(q, k, v, dropout, causal, scale=scale)
        more = None, None, q.shape[2], k.shape[2], seed[0].clone(), seed[1].clone(), seed[:0]
        return out, logsumexp.unsqueeze(-1), *more

    def cudnn_backward(grad, q, k, v, out, logsumexp, *rest, scale=None):
        *_, max_q, max_k, dropout, causal = rest
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        logsumexp = logsumexp.squeeze(-1)
        assert logsumexp.is_contiguous()
        return backward_op(grad, q, k, v, out, logsumexp, dropout, causal, scale=scale)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", flash)
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward)
    library.impl("_scaled_dot_product_cudnn_attention", cudnn)
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
    return library


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ring_with_the_interfaces_of_cudas_kernels(world_size, balancer, name, apart):
    # No bias, logsumexp, no dropout, causal; or no dropout, causal.
    terms = (None, True, 0.0, True) if name == "cudnn" else (0.0, True)
    assert max(on_ranks(world_size, imitated_ring_errors, balancer, name, terms, apart)) < 5e-6


# Without a ring.

HEADS, KV_HEADS = 4, 2


def efficient():
    holder = torch.nn.Module()
    holder.inner_attention = ScaledDotProductAttentionWrapper()
    use_efficient_attention(holder)
    assert type(holder.inner_attention) is not ScaledDotProductAttentionWrapper
    return holder.inner_attention


def inputs(dtype):
    return [torch.randn(2, n, 24, 8, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


def test_fp32_is_offered_the_efficient_kernel_without_grouped_queries(monkeypatch):
    seen = []

    def look(q, k, v, **options):
        enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
        seen.append((q.dtype, enabled, k.shape[1], options.get("enable_gqa", False)))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    efficient()(*inputs(torch.float32), enable_gqa=True)
    efficient()(*inputs(torch.bfloat16), enable_gqa=True)
    assert seen == [
        (torch.float32, True, HEADS, False),
        (torch.bfloat16, False, KV_HEADS, True),  # as TorchTitan has it
    ]
