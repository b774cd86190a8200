"""Ring attention on gloo equals attention in one process, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import on_ranks


def test_the_private_names_are_where_we_use_them():
    """Fails when a new PyTorch moves one: see torchtitan_dp/distributed/ring_attention.py."""
    import torchtitan_dp.distributed  # noqa: F401
    from torchtitan_dp.distributed.ring_attention import public_names, ring

    assert hasattr(ring._cp_options, "enable_load_balance")
    assert isinstance(ring.custom_ops, dict)
    assert callable(ring._templated_ring_attention)
    assert callable(ring._templated_ring_attention_backward)
    assert callable(public_names.set_rotate_method)


def ring_errors(balancer, rotate, kv_heads):
    """Largest differences of the output and of the gradients of q, k, v, on this rank."""
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import cp_shard
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from torchtitan_dp.distributed.ring_attention import apply_ring_attention, configure_ring

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
