"""How noise is added to the clipped sum, and what the sum's fp32 rounding adds to its sensitivity.

Guarantee
---------
One record moves the fp32 sum of n samples on one rank by at most C (1 + fp32_sum_excess(n)):
negligible for a few hundred samples, and far from the bound unless thousands of gradients and their
order are made for it. `privacy.json` has the number as a caveat.
"""

from collections.abc import Sequence

from torch import Tensor

from torchtitan_dp.privacy.banded import WeightedKey
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.secure_noise import add_secure_gaussian_noise_

_ROUNDING = 2.0**-24  # of fp32: an addition's result is off by at most this share


def add_noise_(
    flat: Tensor,
    *,
    std: float,
    keys: Sequence[WeightedKey],
    name: str,
    start: int,
    secure: bool = False,
) -> None:
    """Add N(0, std^2), times its weight, of each key in place to one shard of the sum.

    Args:
        keys: with `secure`, one of weight 1.
        secure: with the noise of `secure_noise`.
        flat, std, name, start: those of `noise.add_gaussian_noise_`; a std of 0 adds nothing.

    Raises:
        ValueError: `flat` is not a vector of fp32, or `std` is negative or not finite.
    """
    if secure:
        ((key, weight),) = keys
        assert weight == 1.0, "correlated noise is not proven on a grid"
        add_secure_gaussian_noise_(flat, std=std, key=key, name=name, start=start)
        return
    for key, weight in keys:
        add_gaussian_noise_(flat, std=std, key=key, name=name, start=start, weight=weight)


def fp32_sum_excess(samples: int, ranks: int = 1) -> float:
    """Bound by how much more than C a record can move an fp32 sum, as a share of C.

    Args:
        samples: n, the most that one data-parallel rank adds up in a step. A draw is random: take
            a number that it hardly ever exceeds, not the expected one.
        ranks: W, the data-parallel ranks whose sums are added up, in any order.

    Derivation. An addition in fp32 gives (a + b) (1 + d) in each value with |d| <= u = 2^-24, so
    its error is a vector of norm at most u |a + b| (Higham 2002, section 2.2; nothing is lost to
    underflow in an addition). After k additions the partial sum has a norm of at most
    k C (1 + u)^k, since each sample has at most C. The first addition, to 0, is exact. On the rank
    of the record that differs, the errors of the other n - 1 add up to at most

        u C (1 + u)^n (2 + 3 + ... + n)  =  u C (1 + u)^n (n (n + 1) / 2 - 1).

    Over ranks, the sums of n samples each are added in a tree of W - 1 additions, of which the one
    with m ranks below it errs by at most u m n C (1 + u)^(n + m). Their sizes m add up to most when
    the tree is a chain: 2 + 3 + ... + W. What other ranks add up is the same in both runs. The two
    runs' errors may point in opposite directions: each counts. Together, as a share of C,

        u (1 + u)^(n + W) (n (n + 1) - 2 + n (W (W + 1) - 2)),

    about n^2 u for one rank. Gradients and an order made for it reach two ninths of that (tests:
    3,073 samples move the sum by 0.125 C, 12,289 by 2.001 C, with a record whose own norm is below
    C / 1000). Samples that nobody arranged round in directions of their own, and stay far below.

    >>> [round(fp32_sum_excess(n), 6) for n in (1, 256, 3_073, 12_289)]
    [0.0, 0.003921, 0.563152, 9.008794]
    """
    assert samples >= 0, samples
    assert ranks >= 1, ranks
    local = max(samples * (samples + 1) - 2, 0)
    across = samples * (ranks * (ranks + 1) - 2)
    return _ROUNDING * (1 + _ROUNDING) ** (samples + ranks) * (local + across)
