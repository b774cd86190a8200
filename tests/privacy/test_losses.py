"""One step's losses: against closed forms in 50 digits, both directions, far into the tails."""

import math

import mpmath
import numpy as np
import pytest

from torchtitan_dp.privacy.losses import Losses, Ratios, gaussian_losses, ratios

SETTINGS = [(0.614, 4e-5, 2.0**-13), (1.0, 0.01, 2.0**-12), (0.45, 0.014, 2.0**-10)]
SETTINGS += [(2.0, 1.0, 2.0**-8), (0.1, 0.5, 2.0**-8), (30.0, 0.3, 2.0**-16)]


def delta_of(losses: Losses, interval: float, epsilon: float) -> float:
    at = interval * (losses.first + np.arange(len(losses.masses))) + losses.drift
    above = at > epsilon
    return losses.infinite + float(losses.masses[above] @ -np.expm1(epsilon - at[above]))


def exact(sigma, q, epsilon, present, shares=((1.0, 1.0),)):
    """The hockey-stick divergence of "remove" (`present`) or "add", at the output of this loss."""
    s, q, e = mpmath.mpf(sigma), mpmath.mpf(q), mpmath.mpf(epsilon if present else -epsilon)

    def ratio(x):
        return (1 - q) + q * sum(
            mpmath.mpf(w) * mpmath.exp((z * x - mpmath.mpf(z) ** 2 / 2) / s**2) for z, w in shares
        )

    low, high = -mpmath.mpf(200) * s, mpmath.mpf(200) * s + 200
    if ratio(low) >= mpmath.exp(e):  # every output has a larger loss
        return 1 - mpmath.exp(e) if present else mpmath.mpf(0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if ratio(middle) > mpmath.exp(e) else (middle, high)

    def above(mean):
        return mpmath.erfc((low - mean) / s / mpmath.sqrt(2)) / 2

    def below(mean):
        return mpmath.erfc((mean - low) / s / mpmath.sqrt(2)) / 2

    side = above if present else below
    mixed = (1 - q) * side(0) + q * sum(mpmath.mpf(w) * side(mpmath.mpf(z)) for z, w in shares)
    growth = mpmath.exp(mpmath.mpf(epsilon))
    return mixed - growth * side(0) if present else side(0) - growth * mixed


@pytest.mark.parametrize("sigma, q, interval", SETTINGS)
def test_delta_of_a_step_is_never_below_the_exact_one_and_close_to_it(sigma, q, interval):
    mpmath.mp.dps = 50
    both = gaussian_losses(sigma, q, None, interval=interval, log_tail=-70.0)
    for present, losses in zip((True, False), both, strict=True):
        assert (losses.masses >= 0).all()
        assert losses.masses.sum() + losses.infinite == pytest.approx(1, abs=1e-11)
        ends = interval * np.array([losses.first, losses.first + len(losses.masses) - 1])
        for epsilon in np.linspace(max(ends[0], -1.0), 0.7 * ends[1], 7) + interval / 3:
            true = exact(sigma, q, epsilon, present)
            found = mpmath.mpf(delta_of(losses, interval, epsilon))
            assert found >= true, (present, epsilon)
            if true > 1e-25 and epsilon > 10 * interval:  # where the losses have many cells
                assert found <= true * (1 + 100 * interval) + 1e-29, (present, epsilon)


def test_delta_of_a_mixture_is_never_below_the_exact_one():
    mpmath.mp.dps = 40
    values = ratios(8).values[::40]
    few = Ratios(values, np.full(len(values), 1 / len(values)))
    shares = list(zip(few.values.tolist(), few.probabilities.tolist(), strict=True))
    both = gaussian_losses(1.3, 0.05, few, interval=2.0**-9, log_tail=-60.0)
    for present, losses in zip((True, False), both, strict=True):
        for epsilon in (0.01, 0.3, 2.0, 5.0):
            true = exact(1.3, 0.05, epsilon, present, shares)
            found_there = mpmath.mpf(delta_of(losses, 2.0**-9, epsilon))
            assert true <= found_there <= true * (1 + 1e-2) + 1e-24, (present, epsilon)


def test_tails_beyond_a_step_count_as_infinite():
    remove, add = gaussian_losses(1.0, 1.0, None, interval=2.0**-8, log_tail=-30.0)
    for losses in (remove, add):
        assert 0 < losses.infinite < math.exp(-30)
    assert gaussian_losses(1.0, 0.5, None, interval=2.0**-8, log_tail=-30.0)[1].infinite < 1e-290
