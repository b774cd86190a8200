"""A privacy filter: segments that are chosen after seeing results, within a budget fixed before.

Guarantee
---------
Fully adaptive composition (Feldman & Zrnic, NeurIPS 2021; Lecuyer 2021): fix an order alpha and a
budget before the first step. If each step's mechanism may depend on all results so far, but the sum
of the steps' Renyi divergences at that alpha never exceeds the budget, then all results together
satisfy (alpha, budget)-RDP. By the conversion that `rdp` uses, at that alpha, they are (epsilon,
delta)-DP, for neighbours in both directions. What must hold:

- alpha, epsilon and delta are fixed at the first start, by the planned run alone (`fix_order`).
  Choosing the best order for what was spent in the end is *not* sound here: that choice depends on
  results, and its number is smaller than what is guaranteed.
- each step's noise and sample rate are fixed before the step; when to stop may depend on results.
- no segment begins that does not fit (`remaining_steps`).

The epsilon to publish is the *budget's*, also when less was spent. `adaptive_epsilon` is the
spent part on the same scale, to be compared with it and no guarantee by itself: what was spent
depends on results, and only the budget does not. Numerical accountants (PRV, PLD) have no such
theorem: the budget is in RDP, so it admits fewer steps than the same epsilon planned by them.
"""

import math
from collections.abc import Sequence

import numpy as np

from torchtitan_dp.privacy.rdp import ORDERS, divergence, to_epsilon
from torchtitan_dp.privacy.segments import Segment, merged


def fix_order(planned: Sequence[Segment], delta: float) -> float:
    """Find the order alpha that is best for a planned run; call it once, at the first start.

    Args:
        planned: the segments as planned before any result, with noise.
        delta: of (epsilon, delta), in (0, 1).

    Raises:
        ValueError: nothing is planned, a step has no noise, or delta is no probability.

    >>> fix_order([Segment(1.0, 0.01, 1_000)], 1e-5)
    7.8
    """
    _check(delta)
    segments = merged(planned)
    if not segments or segments[0].noise_multiplier == 0:  # they are sorted
        raise ValueError(
            "privacy.noise_multiplier: an adaptive budget needs a planned run with steps and with "
            "noise; set privacy.noise_multiplier above 0"
        )
    return float(ORDERS[int(np.argmin(to_epsilon(divergence(segments), delta)))])


def adaptive_epsilon(segments: Sequence[Segment], alpha: float, delta: float) -> float:
    """Compute what segments spend at the order fixed beforehand. It is allowed up to the budget's
    epsilon.

    Args:
        segments: all that ran and the one to come, chosen however.
        alpha: from `fix_order`, at the first start.
        delta: the one that `alpha` was fixed with.

    Returns:
        epsilon >= 0: never less than RDP's for the same segments planned, which takes the best
        order; inf if a step has no noise.

    Raises:
        ValueError: `alpha` is none that `fix_order` gives, or delta is no probability.

    >>> halves = [Segment(1.0, 0.01, 500), Segment(1.0, 0.01, 500)]
    >>> round(adaptive_epsilon(halves, 7.8, 1e-5), 3)
    2.101
    """
    _check(delta)
    spent = _spent(segments, alpha)
    order = np.array([alpha])
    return max(0.0, float(to_epsilon(np.array([spent]), delta, order)[0]))


def remaining_steps(
    segments: Sequence[Segment],
    *,
    noise_multiplier: float,
    sample_rate: float,
    alpha: float,
    epsilon: float,
    delta: float,
) -> int:
    """Count how many more steps of the given noise and rate the budget allows.

    Args:
        segments: all that ran, chosen however.
        noise_multiplier, sample_rate: of the steps to come, as in `Segment`.
        alpha, epsilon, delta: the order and the budget, both fixed at the first start.

    Returns:
        The most steps with which `adaptive_epsilon` is at most `epsilon`; 0 if nothing is left.

    Raises:
        ValueError: a value is out of its range, or the steps to come spend nothing, so that there
            is no most.
    """
    _check(delta)
    if not 0 < epsilon < math.inf:
        raise ValueError(
            f"privacy.target_epsilon = {epsilon} is not positive and finite; choose one such as 8.0"
        )
    one = _spent([Segment(noise_multiplier, sample_rate, 1)], alpha)
    if one == 0:
        raise ValueError(
            f"privacy.sample_rate = {sample_rate}, privacy.noise_multiplier = {noise_multiplier}: "
            "such steps spend nothing; choose a rate above 0 and finite noise"
        )
    converted = float(to_epsilon(np.zeros(1), delta, np.array([alpha]))[0])
    left = epsilon - converted - _spent(segments, alpha)  # in RDP: the conversion only adds
    steps = max(0, int(left / one))

    def fits(count: int) -> bool:
        coming = Segment(noise_multiplier, sample_rate, count)
        return adaptive_epsilon([*segments, coming], alpha, delta) <= epsilon

    while steps > 0 and not fits(steps):  # by rounding only
        steps -= 1
    return steps


def _spent(segments: Sequence[Segment], alpha: float) -> float:
    """Compute the Renyi divergence of all segments at order `alpha`."""
    at = np.flatnonzero(np.asarray(ORDERS) == alpha)
    if len(at) == 0:
        raise ValueError(
            f"alpha = {alpha} is not one of our orders; take it from the first start's ledger"
        )
    fewest = merged(segments)
    if fewest and fewest[0].noise_multiplier == 0:
        return math.inf
    return float(divergence(fewest)[at[0]])


def _check(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(
            f"privacy.delta = {delta} is outside (0, 1); choose less than 1 / number of records"
        )
