"""Which records are trained on and which are held out, by a hash of the unit's id."""

import hashlib
from itertools import islice

import numpy as np

from torchtitan_dp.data.records import RecordStore

CHUNK = 2**16


def split(store: RecordStore, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Record indices to train on and to hold out, two sorted int64 arrays.

    Each unit is held out if the 64-bit BLAKE2b hash of its id lies below `heldout_fraction`: it is
    never in both, and its side depends on its id and the fraction alone, not on other records.
    A larger fraction holds out a superset. 0 hashes nothing.

    Raises `ValueError` unless 0 <= `heldout_fraction` < 1, or if no record is left to train on.
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction!r}: give a number from 0 up to, not "
            "including, 1"
        )
    if heldout_fraction == 0:
        return np.arange(len(store)), np.empty(0, dtype=np.int64)
    threshold = np.uint64(int(heldout_fraction * 2**64))
    units, masks = iter(store.record_ids()), []
    while digests := b"".join(map(_hash, islice(units, CHUNK))):
        masks.append(np.frombuffer(digests, dtype="<u8") < threshold)
    mask = np.concatenate(masks)
    assert len(mask) == len(store)
    if mask.all():
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction!r} leaves none of {len(store)} records to "
            "train on: lower it"
        )
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def _hash(record_id: str) -> bytes:
    # surrogateescape: a file's name need not be UTF-8
    return hashlib.blake2b(record_id.encode("utf-8", "surrogateescape"), digest_size=8).digest()
