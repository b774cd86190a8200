"""One pass over the files of a data set: each record is tokenized once, into a store.

Guarantee:
    A record's ids or the reason why it has none, and its unit, are a function of that record, its
    file's name and its row's number alone (`formats`, `reading`); each row has its place in the
    store (hazard row 42). No record's content stops the pass; how long it takes, and how much room,
    follow from all of them, and are not private.
"""

import contextlib
import errno
import itertools
import json
import os
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np

from torchtitan_dp.data import store as stores
from torchtitan_dp.data.chat_template import Piece
from torchtitan_dp.data.console import MOST_CHARACTERS, MOST_NAMES, Lack, Progress, amount, say
from torchtitan_dp.data.files import Fields, Files, list_files
from torchtitan_dp.data.formats import is_pointer, unit_name
from torchtitan_dp.data.reading import EMPTY, MOST_PART, THEIR_FIELDS, Assembler, split
from torchtitan_dp.data.source import Source
from torchtitan_dp.data.store import Store
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.data.units import (
    folder_of,
    group,
    record_hash,
    singles,
    spelling_hash,
    unit_hash,
)

# Of one call: the tokenizer takes some 100 bytes a token, and a part goes to one core.
_BATCH_CHARACTERS, _BATCH_TEXTS = MOST_PART * min(max(os.cpu_count() or 1, 8), 32), 2**14
_UNPACKED = {".gz": 4, ".zst": 4, ".parquet": 2}  # bytes of rows to a byte of a file, about


def prepared(source: Source, data_store: str | None = None, files: Files | None = None) -> Store:
    """Open the store of a source, of its `files`, in `data.store`: written unless one fits.

    Raises ValueError, one line, and leaves no store: an unknown format, a field that it has not,
    records without any text or unit, a path that is missing or without records, files that fail or
    change meanwhile, a folder that fails or has no room.
    """
    files = files or source.files()
    folder = stores.private_folder(data_store)
    try:
        facts = source.facts
        target = os.path.join(folder, stores.key_of(files, source.terms))
        if (store := stores.load_if_seen(target, files)) is not None:
            return store
        can_write = os.access(folder, os.W_OK)  # if not, a store that is there may do
        with stores.writing_lock(target) if can_write else contextlib.nullcontext():
            if (store := _reusable_store(target, files, source)) is None:
                if not can_write:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), folder)
                for path in files.paths:  # those of a store that is there were checked
                    facts.check(path, source.keys)
                _require_room(folder, files, source)
                stores.write(target, lambda temporary: _make(temporary, files, source))
                store = stores.load(target)
                assert store is not None, "a store that was just written is whole"
            stores.mark_seen(store, files)
            return store
    except OSError as error:
        cannot = f"its records cannot be read, or their tokens not be written to {folder!r}"
        remedy = "check permissions and the space left, or set data.store"
        setting = f"training.dataset_path = {source.path!r}"
        raise ValueError(f"{setting}: {cannot} ({error}): {remedy}") from error


def _reusable_store(target: str, files: Files, source: Source) -> Store | None:
    """Return a store that is there, if it is whole and of these files; else None."""
    if (store := stores.load_if_seen(target, files)) is not None:  # of a process just waited for
        return store
    store, terms = stores.load(target), json.loads(json.dumps(source.terms))
    if store is None or store.facts["terms"] != terms or not stores.is_intact(store):
        if os.path.exists(target):
            say(f"the tokens in {target} are damaged, and are prepared again")
        return None
    skip = not source.facts.fields
    hashes = [stores.file_hash(path, skip_unreadable=skip) for path in files.paths]
    if stores.contents_hash(hashes) != store.contents:
        say(f"files of {source.path} changed since their tokens were prepared in {target}")
        return None
    return store


def _require_room(folder: str, files: Files, source: Source) -> None:
    """Announce what will be written; refuse a disk that is too small, and a folder of records."""
    below = os.path.relpath(os.path.realpath(folder), files.root).split(os.sep)
    is_hidden = any(part.startswith(".") for part in below)  # also by "..", which leads outside
    if not (source.facts.fields or is_hidden or os.path.isfile(os.path.expanduser(source.path))):
        lies = f"{folder!r} lies within training.dataset_path = {source.path!r}"
        raise ValueError(f"data.store: {lies}, whose files are records; name a folder elsewhere")
    bytes_of_token, disk = 1 if source.tokenizer.identity == "bytes" else 4, os.statvfs(folder)
    size = _rows_bytes(files) * source.dtype.itemsize // bytes_of_token
    free = disk.f_bavail * disk.f_frsize
    needed = f"about {amount(size)} and {stores.RECORD_BYTES} bytes a record"
    what = f"{amount(sum(files.sizes))} of {source.path} into {folder}"
    say(f"tokenizing {what}: {needed} that only you can read, of {amount(free)} free")
    if size / 4 > free:  # JSON, and columns that are not read, may be most of the files
        remedy = "free some, or set data.store to a folder on another disk"
        lacks = f"{folder!r} has {amount(free)} free, and the tokens take {needed}"
        raise ValueError(f"data.store: {lacks}: {remedy}")


def _rows_bytes(files: Files) -> int:
    unpacked = [_UNPACKED.get(os.path.splitext(name)[1], 1) for name in files.names]
    return sum(size * times for size, times in zip(files.sizes, unpacked, strict=True))


def _make(folder: str, files: Files, source: Source) -> tuple[bytes, dict[str, Any]]:
    """Write the tokens of all records; refuse files that change meanwhile."""
    with open(os.path.join(folder, stores.TOKENS), "xb", opener=stores.private) as output:
        made = _tokenize(output, files, source)
    now = list_files(files.root, files.names).stamps
    for path, before, after in zip(files.paths, files.stamps, now, strict=True):
        if before != after:
            changed = f"training.dataset_path: {path!r} changed while it was read"
            raise ValueError(f"{changed}: start again when nobody writes to it")
    return made


class _Row(NamedTuple):
    """A record before its texts are tokenized."""

    path: str
    unit: bytes  # hash
    spelling: bytes  # one hash for all spellings of a unit's name
    has_unit: bool  # or else it is one by itself that contributes nothing
    pieces: Sequence[Piece] = (Piece("", False),)  # not empty, which bounds a batch's rows
    lack: Lack | None = None  # why it has no text


def _tokenize(output: IO[bytes], files: Files, source: Source) -> tuple[bytes, dict[str, Any]]:
    """Tokenize all records, and return the arrays and facts of their store. Refuse those none of
    which has a text, or none a unit: of these nothing was tokenized, and no store is left."""
    assembler = Assembler(source.tokenizer, source.reading)
    ends, firsts, reasons, hashes = array("q", [0]), array("q"), bytearray(), bytearray()
    spellings = bytearray()
    lacks: dict[Lack, Lack] = {}  # by what does not differ between their records
    contents: list[str] = []
    unnamed = 0
    rows, ahead = itertools.tee(_rows(files, source, contents))
    encoded = _ids(source.tokenizer, (piece.text for row in ahead for piece in row.pieces))
    for row in rows:
        ids_of = [next(encoded) for _ in row.pieces]
        found = row.lack or assembler.record(row.pieces, ids_of)
        ids, first = (assembler.between[:0], 0) if isinstance(found, Lack) else found
        output.write(ids.astype(source.dtype).data)
        reasons.append(_count_by_reason(lacks, found, row.path) if isinstance(found, Lack) else 0)
        firsts.append(first)
        ends.append(ends[-1] + len(ids))
        hashes.extend(row.unit)
        spellings.extend(row.spelling)
        unnamed += not row.has_unit
    count = len(reasons)
    if count == 0:
        raise ValueError(source.no_record(files))
    if unnamed == count:
        source.refuse_units([*lacks.values()], count)
    if all(reasons) and EMPTY not in lacks:
        source.refuse_lacks(lacks.values(), f"none of the {count:,} records has a target to learn")
    hashes_R2 = np.frombuffer(hashes, dtype="<u8").reshape(count, -1)
    units = (singles if source.unit_field is None else group)(hashes_R2)
    _, times = np.unique(np.frombuffer(spellings, "<u8")[units.first()], return_counts=True)
    columns = np.array(ends)[1:], np.array(firsts), np.array(reasons)
    return stores.pack(*columns, units), {
        "terms": source.terms,
        "path": source.path,
        "tokenizer": source.tokenizer.describe(),
        "records": count,
        "units": len(units),
        "unnamed": unnamed,
        "alike": [int(times[times > 1].sum()), int((times > 1).sum())],  # units, and of how many
        "pointers": sum(map(is_pointer, files.paths)),
        "dtype": source.dtype.str,
        "between": len(assembler.between),
        "contents": stores.contents_hash(contents),
        "lacks": [lack._asdict() for lack in lacks.values()],
    }


def _count_by_reason(lacks: dict[Lack, Lack], lack: Lack, path: str) -> int:
    """Count a record that has nothing to learn, and return 1 + the index of its reason."""
    kind = lack._replace(names=())
    known = lacks.get(kind, kind._replace(file=path))
    names = dict.fromkeys([*known.names, *(name[:MOST_CHARACTERS] for name in lack.names)])
    lacks[kind] = known._replace(number=known.number + 1, names=tuple(names)[: MOST_NAMES + 1])
    return min(list(lacks).index(kind) + 1, 255)


def _ids(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[np.ndarray | None]:
    """Tokenize texts in batches, of which one is read while another is tokenized."""
    ahead: deque[Future[list[np.ndarray | None]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="tokens") as pool:
        while batch := _batch(texts):
            ahead.append(pool.submit(tokenizer.encode_each, batch))
            if len(ahead) > 1:
                yield from ahead.popleft().result()
        for last in ahead:
            yield from last.result()


def _batch(texts: Iterator[str]) -> list[str]:
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            break
    return batch


def _rows(files: Files, source: Source, hashes: list[str]) -> Iterator[_Row]:
    """Yield the records of all files; hash each file before its records."""
    facts, by = source.facts, source.unit_field
    broken = Lack("training.dataset_path", f"are no {facts.content}s")
    what = "have no usable one" if facts.fields else "lie in no folder of training.dataset_path"
    unknown = Lack(f"data.unit_field = {by!r}", what, "name each unit", THEIR_FIELDS)
    progress = Progress("tokenizing training.dataset_path", _rows_bytes(files))
    for name, path in zip(files.names, files.paths, strict=True):
        hashes.append(stores.file_hash(path, skip_unreadable=not facts.fields))
        for number, fields in enumerate(_naming_file(path, facts.rows(path, [*source.keys])), 1):
            record = f"{name}:{number}" if facts.fields else name
            found: list[Piece] | Lack = broken
            if fields is not None:
                found = source.reading.pieces(fields, facts.fields or "text")
            if by is None:
                hashed = record_hash(record, size=8)
                row = _Row(path, hashed + bytes(8), hashed, True)
            else:
                unit = unit_name((fields or {}).get(by)) if facts.fields else folder_of(name)
                hashed = record_hash(record) if unit is None else unit_hash(unit)
                spelling = hashed[:8] if unit is None else spelling_hash(unit)
                row = _Row(path, hashed, spelling, unit is not None)
                if unit is None and fields is not None:
                    found = unknown._replace(names=tuple(fields))
            if isinstance(found, Lack):
                yield row._replace(lack=found)
                continue
            progress.add(sum(len(piece.text) for piece in found))
            parts = [Piece(part, of.is_target) for of in found for part in split(of.text) if part]
            yield row._replace(pieces=parts)
    progress.end()


def _naming_file(path: str, rows: Iterator[Fields | None]) -> Iterator[Fields | None]:
    """Name the file in the error of one that ends early, or cannot be read."""
    from pyarrow import ArrowException

    try:
        yield from rows
    except MemoryError:
        lacks = f"memory cannot hold a row of {path} (not private); take one with more"
        raise ValueError(f"training.dataset_path: this machine's {lacks}") from None
    except (OSError, EOFError, ArrowException) as error:
        damaged = f"training.dataset_path: {path} cannot be read to its end ({error})"
        remedy = "restore it, or name the others by a glob"
        if "too much memory" in str(error):  # zstd's words
            again = f"zstd -dc --long=31 '{path}' | zstd -o SMALLER.zst"
            remedy = (
                f"its zstd window is above 128 MiB (--long=28 to 31), so write it again: {again}"
            )
        raise ValueError(f"{damaged}: {remedy}") from error
