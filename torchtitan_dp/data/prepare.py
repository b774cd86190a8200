"""One pass over the files of a data set: each record is tokenized once, into a store.

Texts are tokenized in batches by the tokenizer's own threads, while this one reads and parses the
next batch; another hashes the files' contents.

Guarantee:
    A record's ids, its unit, and the reason why it has none are a function of that record, its
    file's name and its row's number alone (`formats`, `reading`): so is whether it is in the store,
    since each row has its place there (hazard row 42). No record's content stops the pass; how long
    it takes, and how much room, follow from all of them, and are not private.
"""

import contextlib
import errno
import json
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_dp.data import store as stores
from torchtitan_dp.data.console import Progress, amount, printable, say
from torchtitan_dp.data.files import Files, list_files, locate
from torchtitan_dp.data.formats import FOLDER, Format, format_named, unit_name
from torchtitan_dp.data.reading import MOST_PART, Assembler, Lack, Nothing, Reading, split
from torchtitan_dp.data.store import Store
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.data.units import (
    HASH_BYTES,
    folder_of,
    group,
    record_hash,
    singles,
    unit_hash,
)

_BATCH_CHARACTERS, _BATCH_TEXTS = 2**23, 2**14
# Characters of one call: the tokenizer takes some 100 bytes a token, and a part goes to one core.
_AT_ONCE = MOST_PART * min(max(os.cpu_count() or 1, 8), 32)
T = TypeVar("T")

UNIT_FIELDS = "their fields are"
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
            "fields": self.reading.keys,
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
        facts = source.facts
        files = list_files(*locate(source.path, facts.below, has_stdlib=not facts.fields))
        if not files.names:
            raise _no_record(source)
        target = os.path.join(folder, stores.key_of(files, source.terms))
        store = stores.load(target)
        if store is not None and stores.is_seen(store, files):
            return store
        can_write = os.access(folder, os.W_OK)  # or else a store may serve that is there
        with stores.alone(target) if can_write else contextlib.nullcontext():
            if (store := _kept(target, files, source)) is None:
                if not can_write:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), folder)
                for index in range(len(files)):  # those of a store that is there were checked
                    facts.check(files.path(index), source.keys)
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


def _no_record(source: Source) -> ValueError:
    return ValueError(
        f"training.dataset_path = {source.path!r} holds no record: it needs at least one "
        f"{source.facts.found_in} (a glob must match files, not folders; '**' matches any depth)"
    )


def _kept(target: str, files: Files, source: Source) -> Store | None:
    """Return a store that is there, if it is whole and of these files; else None."""
    store = stores.load(target)
    if store is not None and stores.is_seen(store, files):
        return store
    terms = json.loads(json.dumps(source.terms))
    if store is None or store.facts["terms"] != terms or not stores.is_intact(store):
        if os.path.exists(target):
            say(f"the tokens in {target} are damaged, and are prepared again")
        return None
    if stores.contents_hash(files, skip_unreadable=not source.facts.fields) != store.contents:
        say(f"files of {source.path} changed since their tokens were prepared in {target}")
        return None
    return store


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the integers that hold the ids and their complements."""
    return np.dtype("<i2" if tokenizer.get_vocab_size() <= 2**15 else "<i4")


def _require_room(folder: str, files: Files, source: Source) -> None:
    """Say what will be written, and refuse a disk that is certain to be too small for it, and a
    place whose files are records."""
    below = os.path.relpath(os.path.realpath(folder), files.root).split(os.sep)
    is_hidden = any(part.startswith(".") for part in below)  # as "..": outside
    is_file = os.path.isfile(os.path.expanduser(source.path))
    if not (source.facts.fields or is_hidden or is_file):
        raise ValueError(
            f"data.store: {folder!r} lies within training.dataset_path = {source.path!r}, whose "
            "files are records; name a folder elsewhere"
        )
    bytes_of_token = 1 if source.tokenizer.identity == "bytes" else 4
    size = _rows_bytes(files) * _dtype(source.tokenizer).itemsize // bytes_of_token
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    say(
        f"tokenizing {amount(sum(files.sizes))} of {source.path} into {folder}: about "
        f"{amount(size)} that only you can read, of {amount(free)} free"
    )
    if size / 4 > free:  # JSON, and columns that are not read, may be most of the files
        raise ValueError(
            f"data.store: {folder!r} has {amount(free)} free, and the tokens of "
            f"training.dataset_path = {source.path!r} take about {amount(size)}: free some, or set "
            "data.store to a folder on another disk"
        )


class _Row(NamedTuple):
    """A record before its texts are tokenized."""

    path: str
    unit: bytes  # hash
    texts: list[tuple[str, bool]] | Nothing  # and whether they are targets


def _write(
    folder: str, files: Files, source: Source
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Write the tokens of all records, and return the arrays and facts of their store."""
    ended, skip = threading.Event(), not source.facts.fields
    with ThreadPoolExecutor(1, thread_name_prefix="contents") as pool:
        contents = pool.submit(stores.contents_hash, files, skip_unreadable=skip, ended=ended)
        try:
            with open(os.path.join(folder, stores.TOKENS), "xb", opener=stores.private) as output:
                arrays, facts = _tokenize(output, files, source)
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
        "dtype": _dtype(source.tokenizer).str,
        "contents": hashed,
        **facts,
    }


def _tokenize(
    output: IO[bytes], files: Files, source: Source
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokenize all records, in batches of which one is read while another is tokenized.

    Returns:
        the arrays of the store, and facts: reasons why records have nothing to learn, say.
    """
    put = Assembler(source.tokenizer, source.reading, _dtype(source.tokenizer))
    ends, firsts, reasons, units = array("q", [0]), array("q"), bytearray(), bytearray()
    lacks: dict[Lack, dict[str, Any]] = {}

    def reason(nothing: Nothing, path: str) -> int:
        known = lacks.setdefault(nothing.lack, {"count": 0, "names": [], "file": path})
        known["count"] += 1
        for name in (str(name)[:MOST_CHARACTERS] for name in nothing.names):
            if len(known["names"]) <= MOST_NAMES and name not in known["names"]:
                known["names"].append(name)
        return min(list(lacks).index(nothing.lack) + 1, 255)

    def take(row: _Row, encoded: Iterator[np.ndarray | None]) -> np.ndarray:
        found: tuple[np.ndarray, int] | Nothing
        if isinstance(row.texts, Nothing):
            found = row.texts
        else:
            found = put.record([(next(encoded), is_target) for _, is_target in row.texts])
        ids, first = (put.between[:0], 0) if isinstance(found, Nothing) else found
        reasons.append(reason(found, row.path) if isinstance(found, Nothing) else 0)
        firsts.append(first)
        ends.append(ends[-1] + len(ids))
        units.extend(row.unit)
        return ids

    def write(rows: list[_Row], encoded: list[np.ndarray | None]) -> None:
        parts = iter(encoded)
        output.writelines(take(row, parts).data for row in rows)

    with ThreadPoolExecutor(1, thread_name_prefix="tokens") as pool:
        before: tuple[list[_Row], Future[list[np.ndarray | None]]] | None = None
        for rows in _batched(_rows(files, source)):
            texts = [row.texts for row in rows if not isinstance(row.texts, Nothing)]
            parts = [text for pieces in texts for text, _ in pieces]
            ahead = rows, pool.submit(_encoded, source.tokenizer, parts)
            if before is not None:
                write(before[0], before[1].result())
            before = ahead
        if before is not None:
            write(before[0], before[1].result())
    if not reasons:
        raise _no_record(source)
    hashes_R2 = np.frombuffer(units, dtype="<u8").reshape(-1, HASH_BYTES // 8)
    found = (singles if source.unit_field is None else group)(hashes_R2)
    arrays: dict[str, np.ndarray] = {
        "ends": np.frombuffer(ends, dtype=np.int64)[1:],
        "firsts": np.frombuffer(firsts, dtype=np.int64),
        "reasons": np.frombuffer(reasons, dtype=np.uint8),
        "members": found.members,
        "starts": found.starts,
        "hashes": found.hashes,
    }
    unnamed = sum(known["count"] for lack, known in lacks.items() if lack.is_unnamed)
    facts = [{**lack._asdict(), **known} for lack, known in lacks.items()]
    return arrays, {"between": len(put.between), "unnamed": unnamed, "lacks": facts}


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray | None]:
    """Tokenize texts, not too many at once for the tokenizer's memory: ids as they are stored."""
    found: list[np.ndarray | None] = []
    ends = np.cumsum([len(text) for text in texts])
    while len(found) < len(texts):
        begun = int(ends[len(found) - 1]) if found else 0
        stop = int(np.searchsorted(ends, begun + _AT_ONCE, side="right"))
        for ids in tokenizer.encode_each(texts[len(found) : max(stop, len(found) + 1)]):
            found.append(None if ids is None else ids.astype(_dtype(tokenizer)))
    return found


def _batched(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """Yield rows in batches of bounded size."""
    batch: list[_Row] = []
    characters = texts = 0
    for row in rows:
        batch.append(row)
        if not isinstance(row.texts, Nothing):
            characters += sum(len(text) for text, _ in row.texts)
            texts += len(row.texts)
        if characters >= _BATCH_CHARACTERS or max(texts, len(batch)) >= _BATCH_TEXTS:
            yield batch
            batch, characters, texts = [], 0, 0
    if batch:
        yield batch


def _rows(files: Files, source: Source) -> Iterator[_Row]:
    """Yield the records of all files, with the texts that are to be tokenized."""
    facts, by = source.facts, source.unit_field
    broken = Lack("training.dataset_path", f"are no {facts.content}s")
    what = "have no usable one" if facts.fields else "lie in no folder of training.dataset_path"
    unknown = Lack(
        f"data.unit_field = {by!r}", what, "name each unit", UNIT_FIELDS, is_unnamed=True
    )
    progress = Progress("tokenizing training.dataset_path", _rows_bytes(files))
    for name, size in zip(files.names, files.sizes, strict=True):
        path, left = os.path.join(files.root, name), size * _unpacked(name)
        for number, fields in enumerate(_named(path, facts.rows(path, [*source.keys])), start=1):
            record = name if facts.fields is None else f"{name}:{number}"
            texts = Nothing(broken) if fields is None else _texts(source, fields)
            if by is None:
                hashed = record_hash(record, size=8) + bytes(8)
            else:
                unit = unit_name((fields or {}).get(by)) if facts.fields else folder_of(name)
                hashed = record_hash(record) if unit is None else unit_hash(unit)
                if unit is None and fields is not None:
                    texts = Nothing(unknown, fields)
                elif unit is None:
                    texts = Nothing(broken._replace(is_unnamed=True))
            done = 0 if isinstance(texts, Nothing) else min(sum(len(t) for t, _ in texts), left)
            left -= done
            progress.add(done)
            yield _Row(path, hashed, texts)
    progress.end()


def _named(path: str, rows: Iterator[T]) -> Iterator[T]:
    """Name the file in the error of one that ends early, or cannot be read."""
    import pyarrow as pa

    try:
        yield from rows
    except (OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(
            f"training.dataset_path: {path} cannot be read to its end ({error}): restore it, or "
            "name the others by a glob"
        ) from error


def _texts(source: Source, fields: Mapping[str, object]) -> list[tuple[str, bool]] | Nothing:
    """Return the texts of a row that are tokenized one by one, and whether they are targets."""
    pieces = source.reading.pieces(fields, source.facts.fields or "text")
    if isinstance(pieces, Nothing):
        return pieces
    return [(part, piece.is_target) for piece in pieces for part in split(piece.text) if part]


def _unpacked(name: str) -> int:
    """Estimate the bytes of rows to a byte of a file."""
    return {".gz": 4, ".zst": 4, ".parquet": 2}.get(os.path.splitext(name)[1], 1)


def _rows_bytes(files: Files) -> int:
    """Estimate the bytes of all rows."""
    return sum(s * _unpacked(name) for name, s in zip(files.names, files.sizes, strict=True))


def listed(names: Sequence[str]) -> str:
    """List names, in bounded space.

    >>> listed(["note", "date", "note"])
    'date, note'
    """
    several = list(dict.fromkeys(printable(name[:MOST_CHARACTERS]) for name in names))
    more = ", …" if len(several) > MOST_NAMES else ""
    return ", ".join(sorted(several[:MOST_NAMES])) + more
