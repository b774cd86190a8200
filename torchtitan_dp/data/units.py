"""The privacy units of a data set: each of them one record, or what `data.unit_field` groups.

Guarantee:
    Every record belongs to exactly one unit, so that a drawn unit brings in no records of others.
    A record whose unit cannot be read (a line without the field; where units are folders, a file
    that lies in none) is a unit of its own, named by its place, and reads as nothing: to drop it
    would change who else can be drawn, and to use it would add to an unknown unit. A line that
    names another unit than when it was indexed reads as nothing too.

Neighbours:
    Which units there are, and how many, is public: with `zero_out` one unit's records are replaced
    by ones without text under the same name. Grouping by a private field publishes how many
    different values it has (by way of the sampling rate), and nothing else of it. With a public
    `privacy.sample_rate` (`add_remove`) a unit's records are there or not, and the number is not
    published. Sampling is by the unit's position; positions are ordered by hash.

The grouping is found in one pass and kept in the index. Of a unit's name a 128-bit hash is kept,
private like the name, which can be guessed from it. Grouping takes about 60 bytes a record.
"""

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.index import WriteWords, cached_words, writable_folder
from torchtitan_dp.data.records.store import RecordStore

INDEX_VERSION = "units-3"  # of the index's format, hash and name
CHUNK = 2**16
_HASH_BYTES = 16


def word(unit_field: str | None) -> str:
    """Return the word for the privacy unit, which is drawn, clipped and protected."""
    return "record" if unit_field is None else "unit"


class Units(Protocol):
    """Units by position, 0 <= unit < len(units). Their records lie in a row, unit by unit."""

    fingerprint: str
    """A hash of which records each unit has; empty if each record is a unit. PRIVATE."""

    unnamed: int
    """The number of records that name no unit, each of them a unit of its own. PRIVATE."""

    def __len__(self) -> int: ...

    def places(self, unit: int) -> range:
        """Return the places of a unit's records in the row of all units' records."""
        ...

    def record(self, place: int) -> int:
        """Return the store's index of the record at a place in that row."""
        ...

    def records(self, unit: int) -> np.ndarray:
        """List a unit's records, int64 indices in the store, rising: files by name, then lines."""
        ...

    def hashes(self) -> Iterator[np.ndarray]:
        """Yield the hash of each unit's name, uint64, in order, in chunks."""
        ...


class RecordUnits:
    """Every record as a unit."""

    fingerprint, unnamed = "", 0

    def __init__(self, store: RecordStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def places(self, unit: int) -> range:
        return range(unit, unit + 1)

    def record(self, place: int) -> int:
        return place

    def records(self, unit: int) -> np.ndarray:
        return np.array([unit])

    def hashes(self) -> Iterator[np.ndarray]:
        ids = iter(self._store.record_ids())
        while digests := b"".join(record_hash(one, size=8) for one in islice(ids, CHUNK)):
            yield np.frombuffer(digests, dtype="<u8")


class GroupedUnits:
    """Units of any number of records each, in the order of their hashes."""

    def __init__(self, words: np.ndarray, records: int) -> None:
        """
        Args:
            words: the index of these units (`_group`), memory-mapped.
            records: the number of records in the store.
        """
        units, named = int(words[0]), int(words[1])
        ends = np.cumsum([records, units + 1, 2 * units])
        self._members, self._starts, hashes, self._owners = np.split(words[2:], ends)
        self._hashes = hashes.view(np.uint64)[::2]  # the first half of each
        self.fingerprint = hashlib.sha256(words.data).hexdigest()
        self.unnamed = records - named

    def __len__(self) -> int:
        return len(self._hashes)

    def places(self, unit: int) -> range:
        assert 0 <= unit < len(self)
        return range(int(self._starts[unit]), int(self._starts[unit + 1]))

    def record(self, place: int) -> int:
        return int(self._members[place])

    def records(self, unit: int) -> np.ndarray:
        places = self.places(unit)
        return self._members[places.start : places.stop]

    def hashes(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), CHUNK):
            yield self._hashes[start : start + CHUNK]

    def is_of(self, record: int, name: str) -> bool:
        """Check whether a record belongs to the unit of a name."""
        high = np.frombuffer(unit_hash(name), dtype="<u8")[0]
        return bool(self._hashes[self._owners[record]] == high)


def open_units(
    store: RecordStore,
    unit_field: str | None,
    *,
    index_folder: str | None = None,
) -> Units:
    """Open the units of a store that was opened with the same `unit_field`.

    Args:
        index_folder: the folder for the grouping (hashes and offsets), readable by its owner only;
            by default that of `formats.open_store`.

    Raises:
        ValueError: one line, if records cannot be grouped.
    """
    if unit_field is None:
        return RecordUnits(store)
    folder = writable_folder(index_folder)
    name = hashlib.sha256(f"{store.place_hash}\0{unit_field}".encode()).hexdigest()
    try:
        words = cached_words(
            os.path.join(folder, f"{INDEX_VERSION}-{name}.npy"),
            lambda write: _group(write, store),
            lambda words: len(words) == 3 * words[0] + 2 * len(store) + 3,
        )
    except OSError as error:
        raise ValueError(
            f"data.unit_field = {unit_field!r}: the units cannot be indexed ({error}): check the "
            f"records' permissions and the space left in {folder!r}"
        ) from error
    units = GroupedUnits(words, len(store))
    store.confirm_units(units.is_of)
    return units


def split(units: Units, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split units into those to train on and to hold out, two sorted int64 arrays of positions.

    A unit is held out if a 64-bit BLAKE2b hash of its name lies below `heldout_fraction`, so its
    side depends on its name and the fraction alone, not on other units. A larger fraction holds out
    a superset. 0 reads no hash.

    Raises:
        ValueError: `heldout_fraction` is not in [0, 1), or no unit is left to train on.
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
            f"data.heldout_fraction = {heldout_fraction!r} leaves no record or unit to train on: "
            "lower it"
        )
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def record_hash(record_id: str, size: int = _HASH_BYTES) -> bytes:
    """Hash a record that is a unit of its own, never to the hash of a named unit.

    It is of the bytes of its file's name, since their text depends on the locale.
    """
    return hashlib.blake2b(os.fsencode(record_id), digest_size=size).digest()


def unit_hash(name: str) -> bytes:
    """Hash a named unit."""
    data = name.encode("utf-8", "surrogateescape")  # a folder's name need not be UTF-8
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=b"unit").digest()


def _group(write: WriteWords, store: RecordStore) -> None:
    """Write the numbers of units and of named records, members, starts, hashes and owners."""
    digests, named = bytearray(), 0
    names = iter(store.unit_names())
    progress = Progress("grouping records by unit", len(store), "records")
    while chunk := list(islice(names, CHUNK)):
        first = len(digests) // _HASH_BYTES
        digests += b"".join(
            unit_hash(name) if name is not None else record_hash(store.record_id(first + i))
            for i, name in enumerate(chunk)
        )
        named += len(chunk) - chunk.count(None)
        progress.add(len(chunk))
    progress.end()
    hashes = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    assert len(hashes) == len(store)
    members = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: records rise within a unit
    is_first = np.ones(len(members), dtype=bool)
    for start in range(0, len(members) - 1, CHUNK):
        rows = hashes[members[start : start + CHUNK + 1]]
        is_first[start + 1 : start + len(rows)] = (rows[1:] != rows[:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    owners = np.empty_like(members)
    owners[members] = np.cumsum(is_first) - 1
    write(np.array([len(starts), named]))
    write(members)
    write(np.append(starts, len(members)))
    write(hashes[members[starts]].reshape(-1).view("<i8"))
    write(owners)
