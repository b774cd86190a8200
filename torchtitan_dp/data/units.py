"""The privacy units of a data set: each of them one record, or what `data.unit_field` groups.

Guarantee:
    Every record belongs to exactly one unit, so that a unit that is drawn brings in nobody else's
    records, and nobody else brings in its own. A record whose unit cannot be read is a unit of its
    own, known by its place, and reads as nothing: it is neither dropped, which would change who
    else can be drawn, nor used, since nobody knows whose it is. That is a line without the field,
    and, where units are folders, a file that lies in none. So does a line of a file that was
    changed meanwhile, if it names another unit now.

Neighbours:
    Which units there are, and how many, is public: with `zero_out` one unit's records are replaced
    by ones without text under the same name. Whoever groups by a private field publishes how
    many different values it has (by way of the sampling rate), and nothing else of it. With a
    public `privacy.sample_rate` (`add_remove`) a unit's records are there or not, and the number
    is not published. Sampling is by the unit's position, whose order (by hash) says nothing of it.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from torchtitan_dp.data.index import writable_folder
from torchtitan_dp.data.store import RecordStore
from torchtitan_dp.data.unit_index import Count, UnitIndex, record_hash, unit_index

CHUNK = 2**16


def word(unit_field: str | None) -> str:
    """Call what is drawn, clipped and protected by its name, in a word."""
    return "record" if unit_field is None else "unit"


class Units(Protocol):
    """Offers units by position, 0 <= unit < len(units), whose records lie in a row, unit by
    unit.
    """

    fingerprint: str
    """Of who has which records; empty if each record is a unit. PRIVATE."""

    unnamed: int
    """The number of records that name no unit, each of them a unit of its own. PRIVATE."""

    def __len__(self) -> int: ...

    def places(self, unit: int) -> range:
        """Tell where in the row of all units' records this unit's lie."""
        ...

    def record(self, place: int) -> int:
        """Return the index in the store of the record at a place in that row."""
        ...

    def records(self, unit: int) -> np.ndarray:
        """List a unit's records, int64 indices in the store, rising: files by name, then lines."""
        ...

    def hashes(self) -> Iterator[np.ndarray]:
        """Yield the hash of each unit's identity, uint64, in order, by the chunk."""
        ...


class RecordUnits:
    """Makes every record a unit."""

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
    """Groups any number of records into a unit."""

    def __init__(self, index: UnitIndex) -> None:
        self._index, self.fingerprint = index, index.fingerprint
        self.unnamed = len(index.members) - index.named

    def __len__(self) -> int:
        return len(self._index.hashes)

    def places(self, unit: int) -> range:
        assert 0 <= unit < len(self)
        return range(int(self._index.starts[unit]), int(self._index.starts[unit + 1]))

    def record(self, place: int) -> int:
        return int(self._index.members[place])

    def records(self, unit: int) -> np.ndarray:
        places = self.places(unit)
        return self._index.members[places.start : places.stop]

    def hashes(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), CHUNK):
            yield self._index.hashes[start : start + CHUNK]


def open_units(
    store: RecordStore,
    unit_field: str | None,
    *,
    index_folder: str | None = None,
    count: Count | None = None,
) -> Units:
    """Open the units of a store that was opened with the same `unit_field`.

    Args:
        index_folder: as of `records.open_store`; where the grouping is kept, hashes and offsets
            only, for the owner only.
        count: as in `RecordStore.unit_names`; not called where the grouping is found.

    Raises:
        ValueError: one line, if the grouping cannot be made.
    """
    if unit_field is None:
        return RecordUnits(store)
    folder = writable_folder(index_folder)
    try:
        index = unit_index(store, unit_field, folder, count)
    except OSError as error:
        raise ValueError(
            f"data.unit_field = {unit_field!r}: the units cannot be indexed ({error}): check the "
            f"records' permissions and the space left in {folder!r}"
        ) from error
    store.confirm_units(index.is_of)
    return GroupedUnits(index)
