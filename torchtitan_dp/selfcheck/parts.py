"""Parts of a step, each against the textbook's: attention, and estimates of norms."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_dp.distributed import attention as ring
from torchtitan_dp.gradients.operands import Products
from torchtitan_dp.gradients.randomized_norm import RandomizedNorms, first_number
from torchtitan_dp.privacy.noise import standard_normal
from torchtitan_dp.selfcheck.reference import rounding
from torchtitan_dp.selfcheck.run import DEVIATIONS, Measured, Ranks, worst
from torchtitan_dp.selfcheck.small import Small, Terms, mesh


def attention(
    ranks: Ranks, terms: Terms, balancer: ring.LoadBalancer, rotate: ring.RotateMethod, apart: bool
) -> Measured:
    """Compare output and gradients with those of attention over the whole sequence in fp64."""
    holder = nn.ModuleList([ScaledDotProductAttentionWrapper()])
    cp_mesh = mesh(ranks.device.type, terms.degrees)[0].get_optional_mesh("cp")
    if cp_mesh is None and apart:
        cp_mesh, balancer = ring.mesh_of_this_rank(ranks.device.type, "cp"), None
    if cp_mesh is not None:
        at = 1 if apart else ring.HEADS_APART_FROM
        ring.configure_ring(load_balancer=balancer, rotate_method=rotate, heads_apart_from=at)
        ring.apply_ring_attention([*holder], cp_mesh, cudnn=terms.cudnn)
    elif ranks.device.type != "cpu":  # as in training
        ring.use_efficient_attention(holder)

    def local(*tensors: Tensor) -> tuple[Tensor, ...]:
        moved = tuple(x.to(ranks.device) for x in tensors)
        if cp_mesh is None:
            return moved
        return cp_shard(cp_mesh, moved, None, balancer, input_seq_dim=2)[0]

    errors = []
    for length in terms.lengths:
        try:
            errors += _attention_errors(holder[0], local, terms, length)
        except RuntimeError as error:  # for example, no kernel takes this length
            raise RuntimeError(f"samples of {length} tokens: {error}") from error
    lengths = " to ".join(map(str, dict.fromkeys((terms.lengths[0], terms.lengths[-1]))))
    # Four times a whole tensor's: it is the worst row's, and ranks' partial results are rounded.
    return {f"{lengths} tokens": (worst(errors), 4 * rounding(terms.dtype))}


def _attention_errors(
    kernel: nn.Module, local: Callable[..., tuple[Tensor, ...]], terms: Terms, length: int
) -> list[float]:
    """Return the largest error of any row of the output, and of each gradient, on this rank, as a
    share of the row's norm plus rows' mean: early rows are larger than late ones."""
    heads, kv_heads = terms.heads
    generator = torch.Generator().manual_seed(length)
    # q, k, v and the gradient of the output, rounded to the dtype before either side computes
    *inputs, g = (
        torch.randn(2, n, length, terms.args.head_size, generator=generator).to(terms.dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    true = [x.double().requires_grad_() for x in inputs]
    true_out = _textbook_attention(*true)
    true_grads = torch.autograd.grad(true_out, true, g.double())

    def heads_last(x: Tensor) -> Tensor:  # in memory, as the layers around have them
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)

    mine = [heads_last(x).requires_grad_() for x in local(*inputs)]
    out = kernel(*mine, enable_gqa=kv_heads < heads)
    actual = out.detach(), *torch.autograd.grad(out, mine, heads_last(local(g)[0]))
    errors = []
    for a, e in zip(actual, local(true_out.detach(), *true_grads), strict=True):
        off, size = (a.double() - e).norm(dim=-1), e.norm(dim=-1)
        errors.append((off / (size + size.mean())).max().item())
    return errors


def _textbook_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
    return F.softmax(scores, dim=-1) @ v


def norm_estimates(ranks: Ranks, terms: Terms) -> Measured:
    """Compare Hutchinson's estimates with a reference's, and with the true norms on average.

    The reference multiplies whole gradients by the same random matrices. Collective over the world.
    """
    samples, apart = 64, 1_000_003  # as many positions lie between two units of a large data set
    key, generator = bytes(range(32)), torch.Generator().manual_seed(0)
    small = Small(terms.but(norm_estimator="hutchinson"), ranks.device, max_grad_norm=1.0)
    groups, norms = small.groups, small.gradients.norms  # type: ignore[attr-defined]
    assert isinstance(norms, RandomizedNorms)
    k, rank = norms.k, dist.get_rank(groups.cp) if groups.cp else 0
    size = 4 * k
    T, shape = -(-size // groups.cp_size) * groups.cp_size, torch.Size((size, size))
    left_BTP, right_BTD = sides = [
        torch.randn(samples, T, size, generator=generator).to(ranks.device) for _ in range(2)
    ]
    positions = range(0, samples * apart, apart)
    norms.start_step(key)
    norms.start_microbatch(positions)
    assert norms.estimates(T, shape)
    mine = (side.chunk(groups.cp_size, dim=1)[rank].contiguous() for side in sides)
    found_B = norms.squared_norms("selfcheck", shape, [Products(*mine)])
    if groups.cp is not None:
        dist.all_reduce(found_B, group=groups.cp)
    starts = (first_number(position, size * k) for position in positions)
    drawn = (standard_normal(key, "selfcheck/tail", at, size * k, ranks.device) for at in starts)
    drawn_BPK = torch.stack([*drawn]).view(samples, size, k).double() / math.sqrt(k)
    gradient_BPD = left_BTP.double().mT @ right_BTD.double()
    expected_B = (gradient_BPD.mT @ drawn_BPK).flatten(1).square().sum(1)
    true_B = gradient_BPD.flatten(1).square().sum(1)
    # The variance of each is 2 |G^T G|^2 / (k |G|^4).
    spread_B = (gradient_BPD.mT @ gradient_BPD).flatten(1).norm(dim=1) / true_B * (2 / k) ** 0.5
    off = (found_B / true_B - 1).sum() / spread_B.square().sum().sqrt()
    return {
        "the estimates": (worst((found_B / expected_B - 1).abs().tolist()), 1e-5),
        "their mean, in standard errors": (abs(off.item()), DEVIATIONS),
    }
