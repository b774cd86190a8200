"""How well one number ranks runs by another."""

from collections.abc import Sequence

import numpy as np


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the rank correlation of two series; ties get their ranks' mean."""
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    of = np.asarray(values, dtype=float)
    return [float((of < value).sum() + ((of == value).sum() - 1) / 2) for value in of]
