"""Ring attention on gloo equals attention in one process, forward and backward."""

import types

import pytest
import torch
import torch.nn.functional as F

from tests.processes.ranks import on_ranks


def test_the_private_names_are_where_we_use_them():
    """Fails when a new PyTorch moves one: see torchtitan_dp/distributed/attention.py."""
    import torchtitan_dp.distributed  # noqa: F401
    from torchtitan_dp.distributed.attention import public_names, ring

    assert hasattr(ring._cp_options, "enable_load_balance")
    assert isinstance(ring.custom_ops, dict)
    assert callable(ring._templated_ring_attention)
    assert callable(ring._templated_ring_attention_backward)
    assert callable(public_names.set_rotate_method)


@pytest.mark.parametrize(
    ("compiled", "running", "first"),
    [
        ((9, 1, 0), (9, 1, 0), "FLASH_ATTENTION"),
        ((9, 5, 1), (9, 10, 2), "CUDNN_ATTENTION"),
        ((9, 1, 0), (9, 10, 2), "FLASH_ATTENTION"),  # PyTorch's assertion is of the headers
        ((9, 10, 2), (9, 1, 0), "FLASH_ATTENTION"),
        (None, None, "CUDNN_ATTENTION"),
    ],
)
def test_an_old_cudnn_is_not_put_on_a_ring(monkeypatch, compiled, running, first):
    import torchtitan_dp.distributed  # noqa: F401
    from torchtitan_dp.distributed import attention

    cudnn = types.SimpleNamespace(
        getCompileVersion=lambda: compiled, getRuntimeVersion=lambda: running
    )
    monkeypatch.setattr(torch._C, "_cudnn", cudnn, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: compiled is not None)
    names = [backend.name for backend in attention._backends()]
    assert names[0] == first
    assert "EFFICIENT_ATTENTION" in names
    assert "MATH" not in names


def test_pytorch_has_the_versions_of_cudnn_where_we_ask():
    """PyTorch's own module asks the same names; where cuDNN is built in they are tried as well."""
    import inspect

    import torchtitan_dp.distributed  # noqa: F401
    from torchtitan_dp.distributed import attention

    source = inspect.getsource(torch.backends.cudnn)
    assert "_cudnn.getCompileVersion()" in source
    assert "_cudnn.getRuntimeVersion()" in source
    for version in attention._cudnn_versions():
        assert len(version) == 3
        assert (8, 0, 0) < version < (20, 0, 0)


def ring_errors(balancer, rotate, kv_heads):
    """Largest differences of the output and of the gradients of q, k, v, on this rank."""
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import cp_shard
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from torchtitan_dp.distributed.attention import apply_ring_attention, configure_ring

    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    T, heads, d = 16 * world_size, 4, 8
    q, g = torch.randn(2, heads, T, d), torch.randn(2, heads, T, d)
    k, v = torch.randn(2, kv_heads, T, d), torch.randn(2, kv_heads, T, d)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=kv_heads < heads)
    out.backward(g)

    configure_ring("cpu", load_balancer=balancer, rotate_method=rotate)
    attention = ScaledDotProductAttentionWrapper()
    apply_ring_attention([attention], mesh)

    def local(*tensors):
        return cp_shard(mesh, tensors, None, balancer, input_seq_dim=2)[0]

    mine = [x.detach().requires_grad_() for x in local(q, k, v)]
    ring_out = attention(*mine, enable_gqa=kv_heads < heads)
    ring_out.backward(local(g)[0])
    expected = local(out.detach(), *(x.grad for x in whole))
    actual = [ring_out, *(x.grad for x in mine)]
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ring_equals_one_process(world_size, balancer, rotate, kv_heads):
    assert max(on_ranks(world_size, ring_errors, balancer, rotate, kv_heads)) < 5e-6


def imitate_efficient_kernels():
    """Offer PyTorch's memory-efficient kernels on CPU, as CUDA's treat logsumexp; hold the result.

    Forward pads it to a multiple of 32 rows, with infinity. Backward demands what CUDA's does: a
    stride that is a multiple of 8, and as many rows, which it loads whole.
    """
    aten = torch.ops.aten

    def forward(q, k, v, bias, needs_logsumexp, dropout=0.0, causal=False, *, scale=None):
        assert bias is None
        assert q.shape[1] == k.shape[1], "no grouped queries"
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout, causal, scale=scale
        )
        rows = -(-q.shape[2] // 32) * 32 if needs_logsumexp else 0
        padded = logsumexp.new_full((*logsumexp.shape[:2], rows), torch.inf)
        padded[..., : q.shape[2]] = logsumexp[..., :rows]
        return out, padded, torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)

    def backward(
        grad,
        q,
        k,
        v,
        bias,
        out,
        logsumexp,
        seed,
        offset,
        dropout,
        mask,
        causal=False,
        *,
        scale=None,
    ):
        rows = q.shape[2]
        assert logsumexp.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)"
        assert logsumexp.shape[2] == -(-rows // 32) * 32, "rows beyond the end are loaded"
        assert logsumexp[..., rows:].isinf().all()
        return (
            *aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, logsumexp[..., :rows].contiguous(), dropout, causal, scale=scale
            ),
            None,
        )

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_efficient_attention", forward)
    library.impl("_scaled_dot_product_efficient_attention_backward", backward)
    return library


def efficient_ring_errors(balancer, rotate, rows):
    """Largest differences from whole attention, with the kernels that fp32 has on CUDA."""
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torchtitan.distributed.context_parallel import cp_shard
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from torchtitan_dp.distributed.attention import apply_ring_attention, configure_ring

    cp = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, 2 * cp * rows, 8) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    out.backward(g)

    configure_ring("cuda", load_balancer=balancer, rotate_method=rotate)
    apply_ring_attention([ScaledDotProductAttentionWrapper()], mesh)  # turns the dispatcher on

    def local(*tensors):
        return cp_shard(mesh, tensors, None, balancer, input_seq_dim=2)[0]

    mine = [x.detach().requires_grad_() for x in local(q, k, v)]
    shards = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in mine]
    library = imitate_efficient_kernels()
    try:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        ring_out = efficient(*shards, None, True, 0.0, True)[0].to_local()
        ring_out.backward(local(g)[0])
    finally:
        library._destroy()
    expected = local(out.detach(), *(x.grad for x in whole))
    actual = [ring_out, *(x.grad for x in mine)]
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_ring_of_padded_logsumexps_equals_one_process(world_size, balancer, rotate, rows):
    """`rows` tokens in each of a rank's two parts: fp32 on CUDA has these kernels alone."""
    assert max(on_ranks(world_size, efficient_ring_errors, balancer, rotate, rows)) < 5e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("rows", [1, 16, 32, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_one_block_of_cudas_efficient_kernel(rows, causal):
    """What the ring is given, and what it gives back: the kernels' own, without their padding."""
    import torchtitan_dp.distributed  # noqa: F401
    from torchtitan_dp.distributed import attention

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
        out, logsumexp, seed, offset = attention._attend_unpadded(
            q, k, v, compute_log_sumexp=True, **terms
        )
        actual = attention._backward_padded(
            **dict(grad_out_=g, query=q, key=k, value=v, out=out, logsumexp=logsumexp),
            **dict(philox_seed=seed, philox_offset=offset),
            **terms,
            grad_input_mask=[True, True, True, False],
        )
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(actual[:3], grads, atol=1e-4, rtol=1e-4)
