"""The column c_0, …, c_{b-1} of noise that is correlated over steps (`banded`), found for a run.

Where z_t has unit variance, a step adds ‖c‖ (C⁻¹ z)_t, and weights that follow from the steps'
noise with the shares a_t (`checkpoint.plan`) have that of standard deviation ‖c‖ ‖C⁻ᵀ a‖. The
column minimises it, times a small power of a step's noise, by L-BFGS from the coefficients of
(1 - x)^(-1/2), cut off after b of them (Fichtenberger, Henzinger and Upadhyay 2023).

Without that power momentum would allow steps 13 times as noisy as independent noise, of which the
weights gain 2% (1,000 steps, 16 bands): AdamW divides by a step's noise, and would hardly move.

Guarantee:
    A column follows from public settings alone. Any one is private, with noise that its norm scales
    (`banded`): epsilon does not depend on it. It is found at a run's first start and recorded, and
    a resume reads it.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
OF_A_STEP = 0.1
"""The power of a step's noise in the objective: a tenth less of it is worth 1% more noise in the
weights, a heuristic."""

INDEPENDENT = (1.0,)
"""The column of noise that does not depend on earlier steps'."""

_DIGITS = 4  # of a coefficient: other processors round the search's last ones otherwise


def cut_off(bands: int) -> tuple[float, ...]:
    """Return the coefficients of (1 - x)^(-1/2), cut off.

    >>> cut_off(4)
    (1.0, 0.5, 0.375, 0.3125)
    """
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return tuple(found)


def column_norm(column: Sequence[float]) -> float:
    """Return ‖c‖, the sensitivity of C x to one draw of a unit, over the clip norm."""
    return math.sqrt(math.fsum(value**2 for value in column))


def noise_in_step(column: Sequence[float], steps: int) -> float:
    """Return the root mean square, over a chain's steps, of a step's noise over σ C."""
    first, left = _first_column(column, steps)
    return column_norm(column) * math.sqrt(float(left @ first**2) / steps)


def noise_in_weights(column: Sequence[float], shares: Sequence[float]) -> float:
    """Return the noise in weights over that of independent noise of one σ.

    `shares` are of each step's noise in the weights; all 1 for the sum of all steps.
    """
    if len(column) == 1:
        return 1.0
    a = np.array(shares)
    return column_norm(column) * float(np.linalg.norm(_transposed(column, a)) / np.linalg.norm(a))


@functools.lru_cache
def found_for(shares: Sequence[float], bands: int) -> tuple[float, ...]:
    """Find the column of so many bands for weights with these shares of each step's noise: c_0 is
    1, the others have four digits."""
    from scipy.optimize import minimize  # a second to import

    a, start = np.array(shares), np.array(cut_off(bands))
    if bands == 1 or not a.any():
        return cut_off(bands)
    # A last coefficient beyond 1 makes noise grow with each step: there the first stride of the
    # search for two bands ended, and overflowed.
    bounds = [(None, None)] * (bands - 2) + [(-1.0, 1.0)]
    found = minimize(_objective, start[1:], (a,), "L-BFGS-B", jac=True, bounds=bounds)
    return 1.0, *(round(float(value), _DIGITS) for value in found.x)


def _objective(rest: Vector, a: Vector) -> tuple[float, Vector]:
    """Return the logarithm of what is minimised, and its gradient by c_1, …, c_{b-1}.

    With u = C⁻ᵀ a and v = C⁻¹ u, |u|² / 2 has the gradient -Σ v_t u_{t+k} by c_k.
    With d the first column of C⁻¹, and r = C⁻ᵀ of (n - t) d_t, that of Σ (n - t) d_t² / 2 is
    -Σ d_t r_{t+k}.
    """
    column = np.array([1.0, *rest])
    squared = column @ column
    u = _transposed(column, a)
    first, left = _first_column(column, len(a))
    in_weights, in_steps = u @ u, left @ first**2
    value = math.log(in_weights) + OF_A_STEP * math.log(in_steps)
    slope = _products(_divided(column, u), u, column) / in_weights
    slope += OF_A_STEP * _products(first, _transposed(column, left * first), column) / in_steps
    scale = 1 + OF_A_STEP
    return (value + scale * math.log(squared)) / 2, scale * rest / squared - slope


def _divided(column: Sequence[float] | Vector, x: Vector) -> Vector:
    """Return C⁻¹ x."""
    from scipy.signal import lfilter  # a second to import

    return lfilter([1.0], column, x)  # type: ignore[no-any-return]


def _transposed(column: Sequence[float] | Vector, x: Vector) -> Vector:
    """Return C⁻ᵀ x."""
    return _divided(column, x[::-1])[::-1]


def _first_column(column: Sequence[float] | Vector, steps: int) -> tuple[Vector, Vector]:
    """Return d, the first column of C⁻¹: w_t = ‖c‖ (d_0 z_t + d_1 z_{t-1} + …), and for each entry
    in how many steps it is."""
    return _divided(column, np.eye(1, steps)[0]), np.arange(steps, 0.0, -1.0)


def _products(x: Vector, y: Vector, column: Vector) -> Vector:
    """Return Σ_t x_t y_{t+k}, for each k from 1 to b - 1."""
    size = 2 * max(len(x), len(column))  # enough that no lag comes round
    of_x, of_y = np.fft.rfft(np.stack([x, y]), size)
    return np.fft.irfft(of_x.conj() * of_y, size)[1 : len(column)]
