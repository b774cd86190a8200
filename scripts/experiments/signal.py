"""How large noise is beside a gradient of norm C, and how well that ranks runs."""

import math
from collections.abc import Sequence

import numpy as np


def noise_norm(sigma: float, trained: int, batch: float, steps: int = 1) -> float:
    """Return the norm of a step's noise over C; with `steps`, of their noises' average.

    The sum of a batch's clipped gradients has noise of sigma C in each of the `trained` values, and
    is divided by the batch.
    """
    return sigma * math.sqrt(trained) / (batch * math.sqrt(steps))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the rank correlation of two series; ties get their ranks' mean."""
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    of = np.asarray(values, dtype=float)
    return [float((of < value).sum() + ((of == value).sum() - 1) / 2) for value in of]
