"""Renyi accounting of the Poisson-subsampled Gaussian mechanism: a bound at every setting.

Guarantee:
    `rdp_epsilon` is an upper bound on epsilon for neighbours in both directions: Renyi DP of the
    sampled Gaussian (Mironov, Talwar & Zhang 2019; computed by Opacus, with an allowance for its
    rounding), added over steps, by the conversion of Balle et al. 2020. A step of estimated norms
    counts as one whose units all add the most that any can, and a round of random allocation as one
    Gaussian mechanism without sampling: true, and loose (`losses`). `loss_bound` is a bound on the
    privacy loss's tails by the same divergences.
"""

import functools
import importlib.util
import math
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchtitan_dp.privacy.segments import GaussianSteps

# Renyi orders: near 1 for a large epsilon, far for a small one. Above 1,000 binomials overflow.
ORDERS = np.array(
    [1 + 10 ** (-k / 4) for k in range(20, 2, -1)]
    + [1 + k / 10 for k in range(2, 100)]
    + [*range(11, 64), *(int(64 * 1.15**k) for k in range(20))]
    + [10 ** (k / 4) for k in range(12, 33)]
)
_LARGEST_COMPUTED_ORDER = 1_000
# What compute_rdp's series and cancellation may lose of (order - 1) * RDP: e^-30 a term.
_RDP_SLACK = 1e-12


@functools.cache
def opacus_rdp() -> types.ModuleType:
    """Load Opacus' file of Renyi divergences alone: its package takes a second or two."""
    package = importlib.util.find_spec("opacus")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "accountants", "analysis", "rdp.py")
    spec = importlib.util.spec_from_file_location("opacus_rdp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=2**16)
def _rdp(sigma: float, q: float, order: float) -> float:
    """Compute an upper bound on one step's Renyi divergence."""
    divergence = float(order) / (2 * sigma**2)  # without sampling: always a bound
    if q == 1 or order > _LARGEST_COMPUTED_ORDER:
        return divergence
    try:
        terms = {"q": q, "noise_multiplier": sigma, "steps": 1, "orders": order}
        computed = float(opacus_rdp().compute_rdp(**terms))
    except (ValueError, OverflowError):  # the series failed: keep the bound
        return divergence
    sampled = max(computed, 0.0) + _RDP_SLACK / (float(order) - 1)
    return divergence if math.isnan(computed) else min(divergence, sampled)


def divergence(segments: Sequence[GaussianSteps], orders: np.ndarray = ORDERS) -> np.ndarray:
    """Compute the Renyi divergence of all segments together at each order: float64."""
    each = [(s.steps, s.least_noise, s.bounding_rate) for s in segments]
    return np.array([sum(n * _rdp(sigma, q, a) for n, sigma, q in each) for a in orders])


def _least(segments: Sequence[GaussianSteps], terms: np.ndarray) -> float:
    """Return the least sum, over `ORDERS`, of the divergence and `terms`, which has one valley:
    down from the largest order, by twelves and then by one, since orders near 1 take longest."""

    def total(at: int) -> float:
        return float(divergence(segments, ORDERS[at : at + 1])[0] + terms[at])

    at = len(ORDERS) - 1
    for stride in (-12, -1, 1):
        while 0 <= at + stride < len(ORDERS) and total(at + stride) <= total(at):
            at += stride
    return total(at)


def may_be_smaller(segments: Sequence[GaussianSteps]) -> bool:
    """Return whether RDP's bound may be below PLD's: where rounds of allocation are composed."""
    return any(part.round_steps > 1 for part in segments)


def rdp_epsilon(segments: Sequence[GaussianSteps], delta: float) -> float:
    """Compute RDP's bound (Balle et al. 2020, theorem 21): that of the best order, which follows
    from the fixed segments."""
    terms = np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, _least(segments, terms))


def rdp_delta(segments: Sequence[GaussianSteps], epsilons: np.ndarray) -> np.ndarray:
    """Compute RDP's bound on delta at each epsilon: `rdp_epsilon` solved for delta."""
    log_delta = np.zeros_like(epsilons)
    for order, total in zip(ORDERS, divergence(segments), strict=True):
        of_order = (order - 1) * (total + math.log1p(-1 / order) - epsilons) - math.log(order)
        log_delta = np.minimum(log_delta, of_order + 1e-15 * order * (1 + total + epsilons))
    return np.exp(log_delta)


def loss_bound(segments: Sequence[GaussianSteps], probability: float) -> float:
    """Return a loss that all segments together exceed, up or down, with at most `probability`.

    Chernoff: E[exp((order - 1) * loss)] = exp((order - 1) * divergence).
    """
    return _least(segments, -math.log(probability) / (ORDERS - 1))
