"""The noise that AdamW is handed where nothing was summed: its law, and that nothing repeats."""

import math
from collections.abc import Sequence

import torch

from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.result import Measured, worst
from torchtitan_dp.selfcheck.small import Small
from torchtitan_dp.selfcheck.terms import Terms

_SIGMA, _C, _BATCH = 1.5, 0.5, 4.0
# Of a normal deviate, which each of these statistics nearly is: 6e-7 beyond 5, both sides. The
# keys are fixed, so that a machine that passes goes on passing.
_DEVIATIONS = 5.0
_RUN = 4  # consecutive values that must not occur together twice


def noise(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Measure the noise of two steps: moments, tails, repeats, and what another mesh would draw."""
    small = Small(terms, ranks.device, max_grad_norm=_C)
    keys = RootKey.from_debug_seed(2).stream("noise")
    scale = {"sigma": _SIGMA, "batch": _BATCH}
    differ, values = 0, []
    for step in range(2):
        key = keys.take(step)
        handed = small.update(**scale, key=key)
        for name, drawn in handed.items():
            differ += int((drawn != small.noise(name, **scale, key=key)).sum())
            values.append(drawn.flatten())
    z = torch.cat(values).double() / (_SIGMA * _C / _BATCH)
    return (
        Measured("moments", moments(z), _DEVIATIONS),
        Measured("tails", tails(z), _DEVIATIONS),
        Measured("runs that occur twice", repeats(torch.cat(values)), 0),
        Measured("values that another mesh has otherwise", differ, 0),
    )


def moments(z: torch.Tensor) -> float:
    """Return the largest deviation of mean, variance, skewness and kurtosis from N(0, 1)'s.

    Each in standard deviations of the statistic of n independent values. NaN if a value is.
    """
    n = z.numel()
    deviations = [
        z.mean().item() * n**0.5,
        (z.square().mean().item() - 1) * (n / 2) ** 0.5,
        z.pow(3).mean().item() * (n / 15) ** 0.5,
        (z.pow(4).mean().item() - 3) * (n / 96) ** 0.5,
    ]
    return worst([abs(deviation) for deviation in deviations])


def tails(z: torch.Tensor) -> float:
    """Return the largest deviation of the shares beyond 1, 2, 3 and 4, in standard deviations."""
    n = z.numel()
    deviations = []
    for edge in (1.0, 2.0, 3.0, 4.0):
        p = math.erfc(edge / 2**0.5)
        beyond = (z.abs() > edge).sum().item()
        deviations.append(abs(beyond - n * p) / (n * p * (1 - p)) ** 0.5)
    return worst(deviations)


def repeats(values: torch.Tensor) -> int:
    """Count the runs of 4 consecutive fp32 values that occur elsewhere too.

    Runs are told apart by a 64-bit sum of their bits' multiples: of a million, two that differ
    have one sum with probability 3e-8.
    """
    bits = values.view(torch.int32).long()
    runs = bits.unfold(0, _RUN, 1)
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
    signed = [number - 2**64 if number >= 2**63 else number for number in odd]
    mixed = (runs * torch.tensor(signed, device=values.device)).sum(1)
    return len(mixed) - len(torch.unique(mixed))
