"""The privacy units of a data set: each of them one record, or what `data.unit_field` groups.

Guarantee:
    - Every record belongs to exactly one unit, so that a drawn unit brings in no records of others.
    - A record whose unit cannot be read (a row without the field; where units are folders, a file
      that lies in none) is a unit of its own, named by its place, and reads as nothing: to drop it
      would change who else can be drawn, and to use it would add to an unknown unit.
    - Units are ordered by a 128-bit hash of their names, private like the names. Which units there
      are, and how many, is public with `zero_out`, and not with a public `privacy.sample_rate`.
"""

import functools
import hashlib
import os
import re
import unicodedata
from dataclasses import dataclass

import numpy as np

HASH_BYTES = 16
_BLANK = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # categories of blanks, and of what nobody sees


@dataclass(frozen=True)
class Units:
    """Units by position, 0 <= unit < len(units). Their records lie in a row, unit by unit."""

    members: np.ndarray  # int64 (records,): the record at each place there, rising in a unit
    starts: np.ndarray  # int64 (units + 1,): where each unit begins in it
    hashes: np.ndarray  # uint64 (units,): of each unit's name

    def __len__(self) -> int:
        return len(self.hashes)

    def first(self) -> np.ndarray:
        """Return the first record of each unit, int64 (units,)."""
        return self.members[self.starts[:-1]]

    def places(self, unit: int) -> range:
        """Return the places of a unit's records in the row of all units' records."""
        if not 0 <= unit < len(self):
            raise IndexError(f"unit {unit} of {len(self)}")
        return range(int(self.starts[unit]), int(self.starts[unit + 1]))


def group(hashes_R2: np.ndarray) -> Units:
    """Group records by the hash of their unit's name, uint64 (records, 2), in its order."""
    members = np.lexsort((hashes_R2[:, 1], hashes_R2[:, 0]))  # stable: records rise within a unit
    ordered = hashes_R2[members]
    is_first = np.ones(len(members), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    return Units(members, np.append(starts, len(members)), ordered[starts, 0].copy())


def singles(hashes_R2: np.ndarray) -> Units:
    """Make a unit of each record, in order, from the hash of its name."""
    count = len(hashes_R2)
    return Units(np.arange(count), np.arange(count + 1), hashes_R2[:, 0].copy())


def split(hashes: np.ndarray, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split units into those to train on and to hold out, two sorted int64 arrays of positions.

    It depends on a unit's name and the fraction alone: units whose `hashes`, uint64 (units,), are
    below it are held out; a larger one holds out a superset. Raises ValueError if none is left.
    """
    mask = hashes < np.uint64(int(heldout_fraction * 2**64))
    if mask.all():
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction!r} leaves no record or unit to train on: "
            "lower it"
        )
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def folder_of(name: str) -> str | None:
    """Return the first folder of a file's relative name, in any locale; None if it has none."""
    folder, slash, _ = os.fsencode(name).partition(b"/")
    return folder.decode("utf-8", "surrogateescape") if slash else None


def record_hash(record_id: str, size: int = HASH_BYTES) -> bytes:
    """Hash a record that is a unit of its own, never to the hash of a named unit: the bytes of its
    file's name, since their text depends on the locale."""
    return hashlib.blake2b(os.fsencode(record_id), digest_size=size).digest()


def unit_hash(name: str) -> bytes:
    """Hash a named unit."""
    data = name.encode("utf-8", "surrogateescape")  # a folder's name need not be UTF-8
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=b"unit").digest()


@functools.lru_cache(maxsize=2**16)
def spelling_hash(name: str) -> bytes:
    """Hash a unit's name without what spellings of one name differ by: case, blanks, Unicode form,
    zeros before and behind a whole number."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    kept = "".join(c for c in folded if unicodedata.category(c) not in _BLANK)
    if number := re.fullmatch(r"0*(\d+)(\.0*)?", kept):
        kept = number[1]
    return unit_hash(kept)[:8]
