"""Which units are trained on and which are held out, by a hash of the unit's id."""

import numpy as np

from torchtitan_dp.data.units import Units


def split(units: Units, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Part units into those to train on and to hold out, two sorted int64 arrays of positions.

    Each unit is held out if a 64-bit BLAKE2b hash of its id lies below `heldout_fraction`: it is
    never in both, and its side depends on its id and the fraction alone, not on other units.
    A larger fraction holds out a superset. 0 looks at no hash.

    Raises `ValueError` unless 0 <= `heldout_fraction` < 1, or if no unit is left to train on.
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction!r}: give a number from 0 up to, not "
            "including, 1"
        )
    if heldout_fraction == 0:
        return np.arange(len(units)), np.empty(0, dtype=np.int64)
    threshold = np.uint64(int(heldout_fraction * 2**64))
    mask = np.concatenate([hashes < threshold for hashes in units.hashes()])
    assert len(mask) == len(units)
    if mask.all():
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction!r} leaves none of {len(units)} records or "
            "units to train on: lower it"
        )
    return np.flatnonzero(~mask), np.flatnonzero(mask)
