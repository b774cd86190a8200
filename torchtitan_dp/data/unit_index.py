"""Which records belong to which privacy unit: found in one streaming pass, kept like line bounds.

What is kept of a unit's name is a 128-bit hash; it is private like the names, which can be guessed
from it. Records are hashed, dealt out to files by the first bits of the hash, and each file is
sorted in memory, so that ten million records take about 100 MB (a unit of more than a million
records takes 50 bytes for each).
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import IO, NamedTuple

import numpy as np

from torchtitan_dp.data.contents import Progress
from torchtitan_dp.data.index import WriteWords, cached_words
from torchtitan_dp.data.store import RecordStore

INDEX_VERSION = "units-3"  # of the format, of the hash and of the name
SHARD_RECORDS = 2**20
MOST_SHARDS = 256  # open files
CHUNK = 2**16
_HASH_BYTES = 16
Count = Callable[[Mapping[str, object] | None], None]
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("record", "<i8")])


class UnitIndex(NamedTuple):
    """Holds units in the order of their hashes, memory-mapped."""

    members: np.ndarray  # (records,) int64: unit after unit, rising within one
    starts: np.ndarray  # (units + 1,) int64 into members
    hashes: np.ndarray  # (units,) uint64: the first half of each hash
    owners: np.ndarray  # (records,) int64: the unit of each
    named: int  # how many records name their unit
    fingerprint: str  # of all this; private

    def is_of(self, record: int, name: str) -> bool:
        """Tell whether a record is of the unit of that name."""
        high = np.frombuffer(unit_hash(name), dtype="<u8")[0]
        return bool(self.hashes[self.owners[record]] == high)


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
