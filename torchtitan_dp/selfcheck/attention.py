"""Attention, on a ring where ranks share a sample, against the textbook's, at the run's shapes."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_dp.distributed.attention import (
    LoadBalancer,
    RotateMethod,
    apply_ring_attention,
    configure_ring,
)
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.reference import rounding
from torchtitan_dp.selfcheck.result import Measured, worst
from torchtitan_dp.selfcheck.small import mesh
from torchtitan_dp.selfcheck.terms import Terms


def attention(
    ranks: Ranks, terms: Terms, balancer: LoadBalancer, rotate: RotateMethod
) -> Sequence[Measured]:
    """Compare output and gradients with those of attention over the whole sequence in fp64."""
    kernel = ScaledDotProductAttentionWrapper()
    cp_mesh = mesh(ranks.device.type, terms.degrees)[0].get_optional_mesh("cp")
    if cp_mesh is not None:
        configure_ring(ranks.device.type, load_balancer=balancer, rotate_method=rotate)
        apply_ring_attention([kernel], cp_mesh)
    errors = []
    for length in terms.lengths:
        try:
            errors.append(_error(kernel, cp_mesh, ranks.device, terms, balancer, length))
        except RuntimeError as error:  # no kernel takes it, say
            raise RuntimeError(f"samples of {length} tokens: {error}") from error
    lengths = " to ".join(map(str, dict.fromkeys((terms.lengths[0], terms.lengths[-1]))))
    # Four times that of a whole tensor: it is the worst row's, and ranks' parts are rounded, too.
    return (Measured(f"{lengths} tokens", worst(errors), 4 * rounding(terms.dtype)),)


def _error(
    kernel: nn.Module,
    cp_mesh: DeviceMesh | None,
    device: torch.device,
    terms: Terms,
    balancer: LoadBalancer,
    length: int,
) -> float:
    """Measure how far any row of the output, or of a gradient, is off on this rank.

    As a share of the row's size and the typical size of a row together: early rows are larger than
    late ones, and one wrong row shows.
    """
    heads, kv_heads = terms.heads
    head_dim = terms.args.dim // terms.args.n_heads
    generator = torch.Generator().manual_seed(length)
    # q, k, v and the gradient of the output, in what the dtype can hold
    q, k, v, g = (
        torch.randn(2, n, length, head_dim, generator=generator).to(terms.dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    out = _plain(*whole)
    out.backward(g.double())

    def local(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = tuple(x.to(device) for x in tensors)
        if cp_mesh is None:
            return moved
        return cp_shard(cp_mesh, moved, None, balancer, input_seq_dim=2)[0]

    mine = [x.detach().clone().requires_grad_() for x in local(q, k, v)]
    its_out = kernel(*mine, enable_gqa=kv_heads < heads)
    its_out.backward(local(g)[0])
    expected = local(out.detach(), *(x.grad for x in whole if x.grad is not None))
    actual = [its_out.detach(), *(x.grad for x in mine if x.grad is not None)]
    assert len(actual) == len(expected) == 4
    errors = []
    for a, e in zip(actual, expected, strict=True):
        off, size = (a.double() - e).norm(dim=-1), e.norm(dim=-1)
        errors.append((off / (size + size.mean())).max().item())
    return worst(errors)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally, one head at a time, as the textbook says."""
    shared = q.shape[1] // k.shape[1]
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // shared].mT * q.shape[-1] ** -0.5
        weights = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        heads.append(weights @ v[:, head // shared])
    return torch.stack(heads, dim=1)
