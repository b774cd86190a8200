"""One pass over the files of a data set: each record is tokenized once, into a store.

Texts are tokenized in batches by the tokenizer's own threads, while this one reads and parses the
next batch; another hashes the files' contents.

Guarantee:
    A record's ids, its unit, and the reason why it has none are a function of that record, its
    file's name and its row's number alone (`formats`, `reading`): so is whether it is in the store,
    since each row has its place there (hazard row 42). No record's content stops the pass; how long
    it takes, and how much room, follow from all of them, and are not private.
"""

import array
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np

from torchtitan_dp.data import store as stores
from torchtitan_dp.data.console import Progress, say
from torchtitan_dp.data.files import Files, list_files, locate
from torchtitan_dp.data.formats import FOLDER, Format, format_named
from torchtitan_dp.data.reading import (
    Assembler,
    Lack,
    Nothing,
    Reading,
    split,
)
from torchtitan_dp.data.store import Store
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.data.units import (
    HASH_BYTES,
    folder_of,
    group,
    record_hash,
    singles,
    unit_hash,
    unit_name,
)

_BATCH_CHARACTERS, _BATCH_TEXTS = 2**23, 2**14
_UNPACKED = {".gz": 4, ".zst": 4, ".parquet": 2}  # bytes of rows to a byte of a file, about
MOST_NAMES, MOST_CHARACTERS = 20, 60
"""Names of fields, roles or types that are kept of a lack, the first that are met, and characters
of each."""


@dataclass(frozen=True)
class Source:
    """Files, and how they are read."""

    format: str
    path: str
    reading: Reading
    tokenizer: Tokenizer
    unit_field: str | None = None

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        has_field = self.unit_field is not None and self.facts.fields
        unit = {str(self.unit_field): "data.unit_field"} if has_field else {}
        return {**self.reading.keys, **unit}

    @property
    def facts(self) -> Format:
        """The facts of the format."""
        return format_named(self.format)

    @property
    def terms(self) -> dict[str, object]:
        """What ids and units depend on besides the files."""
        return {
            "format": self.format,
            "fields": self.keys,
            "unit_field": self.unit_field,
            "tokenizer": self.tokenizer.identity,
            "template": self.reading.identity,
        }


def prepared(source: Source, place: str | None = None) -> Store:
    """Open the store of a source, after it was written unless there is one that fits.

    Args:
        place: `data.store`.

    Raises:
        ValueError: one line; an unknown format, a field that the format has not, a path that is
            missing or holds no record, files that cannot be read or change meanwhile, a place that
            cannot be written or has too little room.
    """
    _check(source)
    folder = stores.private_folder(place)
    try:
        files = _files(source)
        for index in range(len(files)):
            source.facts.check(files.path(index), source.keys)
        target = os.path.join(folder, stores.key_of(files, source.terms))
        if (store := _kept(target, files, source, quick=True)) is not None:
            return store
        if not os.access(folder, os.W_OK):  # a store may serve that this machine cannot write
            store = _kept(target, files, source, quick=False)
            if store is not None:
                return store
        with stores.alone(f"{target}.lock"):
            if (store := _kept(target, files, source, quick=False)) is not None:
                return store
            _require_room(folder, files, source)
            stores.write(target, lambda place: _write(place, files, source))
        store = stores.load(target)
        assert store is not None, "a store that was just written is whole"
        stores.mark_seen(store, files)
        return store
    except OSError as error:
        raise ValueError(
            f"training.dataset_path = {source.path!r}: its records cannot be read, or their tokens "
            f"not be written to {folder!r} ({error}): check permissions and the space left, or set "
            "data.store"
        ) from error


def _check(source: Source) -> None:
    facts, unit_field = source.facts, source.unit_field
    if unit_field == "":
        raise ValueError(f"data.unit_field = '': name the {facts.fields} of the unit, or remove it")
    if not facts.fields and unit_field not in (None, FOLDER):
        raise ValueError(
            f"data.unit_field = {unit_field!r}: {source.format} files have no fields; use "
            f"'{FOLDER}' (the first folder below training.dataset_path), or remove it: one file, "
            "one unit"
        )
    for name, key in source.reading.keys.items():
        if facts.fields and not name:
            raise ValueError(f"{key} = {name!r}: name the {facts.fields} with the text")
        if not facts.fields and key != "data.text_field":
            raise ValueError(
                f"{key} = {name!r}: {source.format} files have no fields; use training.dataset = "
                "'jsonl', or remove it"
            )
        if key == "data.messages_field" and not facts.has_lists:
            raise ValueError(
                f"{key} = {name!r}: a field of {source.format} files is a text, and no list; use "
                "training.dataset = 'jsonl' or 'parquet'"
            )


def _files(source: Source) -> Files:
    root, names = locate(source.path, source.facts.below, has_stdlib=source.format == "text")
    if not names:
        raise no_record(source)
    return list_files(root, names)


def no_record(source: Source) -> ValueError:
    """Describe a path without a record."""
    return ValueError(
        f"training.dataset_path = {source.path!r} holds no record: it needs at least one "
        f"{source.facts.found_in} (a glob must match files, not folders; '**' matches any depth)"
    )


def _kept(target: str, files: Files, source: Source, *, quick: bool) -> Store | None:
    """Return a store that is there if it fits, or None.

    Args:
        quick: whether one that was never compared with these files is left for the next call.
    """
    store = stores.load(target)
    if store is not None and stores.is_seen(store, files):
        return store
    if quick or not os.path.exists(target):
        return None
    if store is None or not stores.is_intact(store):
        say(f"the tokens in {target} are damaged, and are prepared again")
        return None
    if stores.contents_hash(files, skip_unreadable=not source.facts.fields) != store.contents:
        say(f"files of {source.path} changed since their tokens were prepared in {target}")
        return None
    stores.mark_seen(store, files)
    return store


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the integers that hold the ids and their complements."""
    return np.dtype("<i2" if tokenizer.get_vocab_size() <= 2**15 else "<i4")


def _require_room(folder: str, files: Files, source: Source) -> None:
    """Say what will be written, and refuse a disk that is certain to be too small for it."""
    per_byte = _dtype(source.tokenizer).itemsize / (
        1 if source.tokenizer.identity == "bytes" else 4
    )
    size, disk = sum(map(_weight, files.names, files.sizes)) * per_byte, os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    say(
        f"tokenizing {sum(files.sizes) / 1e6:,.1f} MB of {source.path} into {folder}: about "
        f"{size / 1e6:,.1f} MB that only you can read, of {free / 1e6:,.0f} MB free"
    )
    if size / 4 > free:  # JSON, and columns that are not read, may be most of the files
        raise ValueError(
            f"data.store: {folder!r} has {free / 1e9:,.2f} GB free, and the tokens of "
            f"training.dataset_path = {source.path!r} take about {size / 1e9:,.2f} GB: free some, "
            "or set data.store to a folder on another disk"
        )


@dataclass
class Census:
    """Records without anything to learn, by reason. PRIVATE."""

    counts: Counter[Lack] = field(default_factory=Counter)
    names: dict[Lack, dict[str, None]] = field(default_factory=dict)  # in their records
    first: dict[Lack, str] = field(default_factory=dict)  # file

    def add(self, nothing: Nothing, path: str) -> int:
        """Count a record, and return 1 + the number of its reason, in the order they were met."""
        lack = nothing.lack
        self.counts[lack] += 1
        self.first.setdefault(lack, path)
        known = self.names.setdefault(lack, {})
        for name in nothing.names:
            if len(known) <= MOST_NAMES:
                known[str(name)[:MOST_CHARACTERS]] = None
        return list(self.first).index(lack) + 1

    def facts(self) -> list[dict[str, Any]]:
        """Return what the store keeps of it."""
        return [
            {
                **lack._asdict(),
                "count": count,
                "names": list(self.names[lack]),
                "file": self.first[lack],
            }
            for lack, count in ((lack, self.counts[lack]) for lack in self.first)
        ]


class _Row(NamedTuple):
    """A record before its texts are tokenized."""

    path: str
    unit: bytes  # hash
    is_named: bool  # whether it names its unit
    texts: list[tuple[str, bool]] | Nothing
    done: int  # bytes of rows that were read since the row before, about


def _write(
    folder: str, files: Files, source: Source
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Write the tokens of all records, and return the arrays and facts of their store."""
    ended, skip = threading.Event(), not source.facts.fields
    with ThreadPoolExecutor(1, thread_name_prefix="contents") as pool:
        contents = pool.submit(stores.contents_hash, files, skip_unreadable=skip, ended=ended)
        try:
            with open(os.path.join(folder, stores.TOKENS), "xb", opener=stores.private) as output:
                arrays, census, unnamed = _tokenize(output, files, source)
            hashed = contents.result()
        finally:
            ended.set()
    now = list_files(files.root, files.names).stamps
    for name, before, after in zip(files.names, files.stamps, now, strict=True):
        if before != after:
            raise ValueError(
                f"training.dataset_path: {os.path.join(files.root, name)!r} changed while it was "
                "read: start again when nobody writes to it"
            )
    return arrays, {
        "terms": source.terms,
        "path": source.path,
        "files": len(files),
        "bytes": sum(files.sizes),
        "records": len(arrays["ends"]),
        "unnamed": unnamed,
        "dtype": _dtype(source.tokenizer).str,
        "between": len(Assembler(source.tokenizer, source.reading).between),
        "lacks": census.facts(),
        "contents": hashed,
    }


def _tokenize(
    output: IO[bytes], files: Files, source: Source
) -> tuple[dict[str, np.ndarray], Census, int]:
    """Tokenize all records, in batches of which one is read while another is tokenized."""
    census, put, kind = (
        Census(),
        Assembler(source.tokenizer, source.reading),
        _dtype(source.tokenizer),
    )
    ends, firsts, reasons, units = array.array("q"), array.array("q"), bytearray(), bytearray()
    progress = Progress(
        "tokenizing training.dataset_path", sum(map(_weight, files.names, files.sizes))
    )
    unnamed = 0

    def finish(rows: list[_Row], encoded: list[np.ndarray | None]) -> None:
        nonlocal unnamed
        at, pieces = 0, []
        for row in rows:
            progress.add(row.done)
            unnamed += not row.is_named
            units.extend(row.unit)
            found: Nothing | tuple[np.ndarray, int]
            if isinstance(row.texts, Nothing):
                found = row.texts
            else:
                parts = zip(encoded[at : at + len(row.texts)], row.texts, strict=True)
                made = put.record([(ids, is_target) for ids, (_, is_target) in parts])
                found = Nothing(made) if isinstance(made, Lack) else made
                at += len(row.texts)
            length, first, reason = 0, 0, 0
            if isinstance(found, Nothing):
                reason = census.add(found, row.path)
            else:
                ids, first = found
                pieces += [put.between, ids]
                length = len(put.between) + len(ids)
            ends.append((ends[-1] if ends else 0) + length)
            firsts.append(first)
            reasons.append(min(reason, 255))
        output.write(np.concatenate([put.between[:0], *pieces]).astype(kind).tobytes())

    with ThreadPoolExecutor(1, thread_name_prefix="tokens") as pool:
        ahead: list[tuple[list[_Row], Future[list[np.ndarray | None]]]] = []
        for rows in _batched(_rows(files, source)):
            texts = [
                text for row in rows if not isinstance(row.texts, Nothing) for text, _ in row.texts
            ]
            ahead.append((rows, pool.submit(source.tokenizer.encode_each, texts)))
            if len(ahead) > 1:
                before, future = ahead.pop(0)
                finish(before, future.result())
        for before, future in ahead:
            finish(before, future.result())
    progress.end()
    if not ends:
        raise no_record(source)
    hashes_R2 = np.frombuffer(units, dtype="<u8").reshape(-1, HASH_BYTES // 8)
    made = (singles if source.unit_field is None else group)(hashes_R2)
    arrays: dict[str, np.ndarray] = {
        "ends": np.frombuffer(ends, dtype=np.int64),
        "firsts": np.frombuffer(firsts, dtype=np.int64),
        "reasons": np.frombuffer(reasons, dtype=np.uint8),
        "members": made.members,
        "starts": made.starts,
        "hashes": made.hashes,
    }
    return arrays, census, unnamed


def _batched(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    characters = texts = 0
    for row in rows:
        batch.append(row)
        if not isinstance(row.texts, Nothing):
            characters += sum(len(text) for text, _ in row.texts)
            texts += len(row.texts)
        if characters >= _BATCH_CHARACTERS or texts >= _BATCH_TEXTS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, characters, texts = [], 0, 0
    if batch:
        yield batch


def _rows(files: Files, source: Source) -> Iterator[_Row]:
    """Yield the records of all files, with the texts that are to be tokenized."""
    facts, keys = source.facts, list(source.keys)
    for index, name in enumerate(files.names):
        path, left = files.path(index), _weight(files.names[index], files.sizes[index])
        for number, fields in enumerate(facts.rows(path, keys), start=1):
            record = name if facts.fields is None else f"{name}:{number}"
            texts, unit = _texts(source, fields), None
            if source.unit_field is None:
                hashed = record_hash(record, size=8) + bytes(8)
            else:
                unit = _unit(source, name, fields)
                hashed = record_hash(record) if unit is None else unit_hash(unit)
                if unit is None and fields is not None:
                    texts = Nothing(_unknown_unit(source), fields if facts.fields else ())
            size = 0 if isinstance(texts, Nothing) else sum(len(text) for text, _ in texts)
            done = min(size, left)
            left -= done
            is_named = unit is not None or source.unit_field is None
            yield _Row(path, hashed, is_named, texts, done)


def _weight(name: str, size: int) -> int:
    """Estimate the bytes of a file's rows."""
    return size * _UNPACKED.get(os.path.splitext(name)[1], 1)


def _unit(source: Source, name: str, fields: Any) -> str | None:
    """Return the name of a row's unit, or None."""
    assert source.unit_field is not None
    if not source.facts.fields:
        return folder_of(name)
    return None if fields is None else unit_name(fields.get(source.unit_field))


def _unknown_unit(source: Source) -> Lack:
    where, remedy = f"data.unit_field = {source.unit_field!r}", "name the unit of each"
    if not source.facts.fields:
        return Lack(where, "lie in no folder below training.dataset_path", remedy)
    return Lack(where, "have no usable one", remedy, "their fields are")


def _texts(source: Source, fields: Any) -> list[tuple[str, bool]] | Nothing:
    """Return the texts of a row that are tokenized one by one, and whether they are targets."""
    facts = source.facts
    if fields is None:
        return Nothing(Lack("training.dataset_path", f"are no {facts.content}s"))
    pieces = source.reading.pieces(fields, facts.fields or "text")
    if isinstance(pieces, Nothing):
        return pieces
    return [(part, piece.is_target) for piece in pieces for part in split(piece.text) if part]


def listed(names: Sequence[str]) -> str:
    """List names, in bounded space.

    >>> listed(["note", "date", "note"])
    'date, note'
    """
    several = list(dict.fromkeys(name[:MOST_CHARACTERS] for name in names))
    more = ", …" if len(several) > MOST_NAMES else ""
    return ", ".join(sorted(several[:MOST_NAMES])) + more
