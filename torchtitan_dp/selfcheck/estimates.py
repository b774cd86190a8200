"""Estimates of norms on the run's mesh, against the same projections applied to whole gradients."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan_dp.gradients.operands import Products
from torchtitan_dp.gradients.randomized_norm import RandomizedNorms, first_number
from torchtitan_dp.privacy.noise import standard_normal
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.result import Measured, worst
from torchtitan_dp.selfcheck.small import mesh
from torchtitan_dp.selfcheck.terms import Terms

_SAMPLES = 64
_KEY = bytes(range(32))  # a public one: a machine that passes goes on passing
_DEVIATIONS = 5.0
_APART = 1_000_003  # positions, as in a large data set


def norm_estimates(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Compare Hutchinson's estimates with a reference's, and with the true norms on average.

    Collective over the world, and over cp.
    """
    privacy = terms.config.privacy
    k, (_, groups) = privacy.projections, mesh(ranks.device.type, terms.degrees)
    rank = dist.get_rank(groups.cp) if groups.cp else 0
    size = 4 * k
    tokens = -(-size // groups.cp_size)  # of a rank, of samples as long as that on any mesh
    generator = torch.Generator().manual_seed(0)
    shape = (_SAMPLES, tokens * groups.cp_size, size)
    left_BTP, right_BTD = (
        torch.randn(shape, generator=generator).to(ranks.device) for _ in range(2)
    )
    mine = slice(rank * tokens, (rank + 1) * tokens)
    norms = RandomizedNorms(k, "hutchinson", groups.cp, capped=True)
    norms.start_step(_KEY)
    positions = range(0, _SAMPLES * _APART, _APART)
    norms.start_microbatch(positions)
    factors = Products(left_BTP[:, mine].contiguous(), right_BTD[:, mine].contiguous())
    assert norms.estimates(tokens * groups.cp_size, torch.Size((size, size)))
    found_B = norms.squared_norms("selfcheck", torch.Size((size, size)), [factors])
    if groups.cp is not None:
        dist.all_reduce(found_B, group=groups.cp)
    starts = [first_number(position, size * k) for position in positions]
    drawn_BN = torch.stack(
        [standard_normal(_KEY, "selfcheck/tail", at, size * k, ranks.device) for at in starts]
    )
    drawn_BPK = drawn_BN.view(_SAMPLES, size, k).double() / math.sqrt(k)
    gradient_BPD = left_BTP.double().mT @ right_BTD.double()
    expected_B = (gradient_BPD.mT @ drawn_BPK).flatten(1).square().sum(1)
    true_B = gradient_BPD.flatten(1).square().sum(1)
    ratio_B = found_B / true_B
    # Var = 2 |G^T G|^2 / (k |G|^4), of each.
    spread_B = (gradient_BPD.mT @ gradient_BPD).flatten(1).norm(dim=1) / true_B * (2 / k) ** 0.5
    off = (ratio_B - 1).sum() / spread_B.square().sum().sqrt()
    return (
        Measured("the estimates", worst((found_B / expected_B - 1).abs().tolist()), 1e-5),
        Measured("their mean, in standard errors", abs(off.item()), _DEVIATIONS),
    )
