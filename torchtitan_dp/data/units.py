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
    by ones without text under the same name. Grouping by a private field publishes how many
    different values it has (by way of the sampling rate), and nothing else of it. With a
    public `privacy.sample_rate` (`add_remove`) a unit's records are there or not, and the number
    is not published. Sampling is by the unit's position, whose order (by hash) says nothing of it.

The grouping is found in one streaming pass and kept like line bounds. Of a unit's name a 128-bit
hash is kept, private like the name, which can be guessed from it. Records are hashed, dealt out to
files by the first bits of the hash, and each file is sorted in memory, so that ten million records
take about 100 MB (a unit of more than a million records takes 50 bytes for each).
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import IO, NamedTuple, Protocol

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.index import WriteWords, cached_words, writable_folder
from torchtitan_dp.data.records.record_store import RecordStore

INDEX_VERSION = "units-3"  # of the format, of the hash and of the name
SHARD_RECORDS = 2**20
MOST_SHARDS = 256  # open files
CHUNK = 2**16
_HASH_BYTES = 16
Count = Callable[[Mapping[str, object] | None], None]
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("record", "<i8")])


def word(unit_field: str | None) -> str:
    """Return the word for the privacy unit, which is drawn, clipped and protected."""
    return "record" if unit_field is None else "unit"


class UnitIndex(NamedTuple):
    """The units of a data set in the order of their hashes, memory-mapped."""

    members: np.ndarray  # (records,) int64: unit after unit, rising within one
    starts: np.ndarray  # (units + 1,) int64 into members
    hashes: np.ndarray  # (units,) uint64: the first half of each hash
    owners: np.ndarray  # (records,) int64: the unit of each
    named: int  # how many records name their unit
    fingerprint: str  # of all this; private

    def is_of(self, record: int, name: str) -> bool:
        """Check whether a record is of the unit of that name."""
        high = np.frombuffer(unit_hash(name), dtype="<u8")[0]
        return bool(self.hashes[self.owners[record]] == high)


class Units(Protocol):
    """Units by position, 0 <= unit < len(units), whose records lie in a row, unit by
    unit.
    """

    fingerprint: str
    """Of who has which records; empty if each record is a unit. PRIVATE."""

    unnamed: int
    """The number of records that name no unit, each of them a unit of its own. PRIVATE."""

    def __len__(self) -> int: ...

    def places(self, unit: int) -> range:
        """Return the places of a unit's records in the row of all units' records."""
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
        index_folder: the folder of the grouping, hashes and offsets only, for the owner only; by
            default that of `formats.open_store`.
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


def unit_index(
    store: RecordStore, unit_field: str, folder: str, count: Count | None = None
) -> UnitIndex:
    """Index a store whose `unit_names` are by `unit_field`.

    A record without a unit's name is a unit of its own, by its place alone.

    Args:
        count: as in `RecordStore.unit_names`; not called where the index is found.
    """
    name = hashlib.sha256(f"{store.place_hash}\0{unit_field}".encode()).hexdigest()
    words = cached_words(
        os.path.join(folder, f"{INDEX_VERSION}-{name}.npy"),
        lambda write: _build(write, store, folder, count),
        lambda words: len(words) == 3 * words[0] + 2 * len(store) + 3,
    )
    units, named = int(words[0]), int(words[1])
    ends = np.cumsum([len(store), units + 1, 2 * units])
    members, starts, hashes, owners = np.split(words[2:], ends)
    fingerprint = hashlib.sha256(words.data).hexdigest()
    return UnitIndex(members, starts, hashes.view(np.uint64)[::2], owners, named, fingerprint)


def record_hash(record_id: str, size: int = _HASH_BYTES) -> bytes:
    """Hash a record that is a unit of its own; the hash is never that of a named unit.

    Of the bytes of its file's name: what they read as depends on the locale.
    """
    return hashlib.blake2b(os.fsencode(record_id), digest_size=size).digest()


def unit_hash(name: str) -> bytes:
    """Hash a named unit."""
    data = name.encode("utf-8", "surrogateescape")  # a folder's name need not be UTF-8
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=b"unit").digest()


def _build(write: WriteWords, store: RecordStore, folder: str, count: Count | None) -> None:
    """Write the numbers of units and of named records, members, starts, hashes and owners."""
    bits = min((len(store) // SHARD_RECORDS).bit_length(), MOST_SHARDS.bit_length() - 1)
    with contextlib.ExitStack() as stack:

        def scratch() -> IO[bytes]:  # unnamed: nothing is left behind
            return stack.enter_context(tempfile.TemporaryFile(dir=folder))

        shards = [scratch() for _ in range(2**bits)]
        members, starts, hashes, owners = scratch(), scratch(), scratch(), scratch()
        owner_of = np.memmap(owners, dtype="<i8", mode="w+", shape=(len(store),))
        named = 0
        for rows, named_here in _rows(store, count):
            named += named_here
            shard_of = rows["high"] >> np.uint64(64 - bits) if bits else np.zeros(len(rows), int)
            for shard in np.unique(shard_of):
                shards[int(shard)].write(rows[shard_of == shard].tobytes())
        units = records = 0
        for shard_file in shards:
            shard_file.seek(0)
            rows = np.frombuffer(shard_file.read(), dtype=_ROW)
            rows = rows[np.lexsort((rows["record"], rows["low"], rows["high"]))]
            is_first = np.ones(len(rows), dtype=bool)
            is_first[1:] = (np.diff(rows["high"]) != 0) | (np.diff(rows["low"]) != 0)
            firsts = rows[is_first]
            members.write(rows["record"].tobytes())
            owner_of[rows["record"]] = units + np.cumsum(is_first) - 1
            starts.write((np.flatnonzero(is_first) + records).astype("<i8").tobytes())
            hashes.write(np.stack([firsts["high"], firsts["low"]], axis=1).tobytes())
            units, records = units + len(firsts), records + len(rows)
        starts.write(np.array([records], dtype="<i8").tobytes())
        owner_of.flush()
        write(np.array([units, named]))
        for part in (members, starts, hashes, owners):
            part.seek(0)
            while chunk := part.read(8 * CHUNK):
                write(np.frombuffer(chunk, dtype="<i8"))


def _rows(store: RecordStore, count: Count | None) -> Iterator[tuple[np.ndarray, int]]:
    """Yield hashes and record indices by the chunk, and how many of its records name their unit."""
    names, first = iter(store.unit_names(count)), 0
    progress = Progress("reading whose each record is", len(store), "records")
    while chunk := list(islice(names, CHUNK)):
        digests = b"".join(
            unit_hash(name) if name is not None else record_hash(store.record_id(first + i))
            for i, name in enumerate(chunk)
        )
        rows = np.empty(len(chunk), dtype=_ROW)
        pairs = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        rows["high"], rows["low"] = pairs[:, 0], pairs[:, 1]
        rows["record"] = np.arange(first, first + len(chunk))
        yield rows, len(chunk) - chunk.count(None)
        first += len(chunk)
        progress.add(len(chunk))
    progress.end()
    assert first == len(store)
