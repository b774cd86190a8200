"""The files of a data set, how they are read, and the one pass that tokenizes them into a store.

Guarantee:
    - A record's ids or the reason why it has none, and its unit, are a function of that record, its
      file's name and its row's number alone (`formats`, `reading`); each row has its place in the
      store (hazard row 42). No record's content stops the pass; how long it takes, and how much
      room, follow from all of them, and are not private.
    - A data set is refused for what its records hold only if none of them has a text, or none a
      unit: each refusal here compares "none at all" with "at least one" (docs/privacy.md).
    - The files that count are those that the path names; of a folder with a list of its files,
      those on the list.
"""

import errno
import itertools
import json
import os
import re
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from torchtitan_dp.base.process import private_opener, progress, say
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.files import NAMED, Fields, Files, list_files, locate, together
from torchtitan_dp.data.formats import FOLDER, FORMATS, OF_OWNERS, Format, unit_name
from torchtitan_dp.data.owners import Owners
from torchtitan_dp.data.reading import EMPTY, MOST_PART, Assembler, Lack, Piece, Reading, split
from torchtitan_dp.data.store import (
    Store,
    folder_of,
    group,
    record_hash,
    singles,
    spelling_hash,
    unit_hash,
)
from torchtitan_dp.data.tokenizer import Tokenizer

# Of one call: the tokenizer takes some 100 bytes a token, and a part goes to one core.
_BATCH_CHARACTERS, _BATCH_TEXTS = MOST_PART * min(max(os.cpu_count() or 1, 8), 32), 2**14
_PROGRESS_S = 10.0
# By format, files with a list of those that count, of which this program reads none: the others
# that lie beside them hold rows that were deleted.
_LISTS = {
    "arrow": (r"(^|/)state\.json$", "set training.dataset = 'hf'"),
    "parquet": (
        r"(^|/)_delta_log/|\.metadata\.json$",
        "write the rows of this table of Delta or Iceberg as Parquet to another folder",
    ),
}


@dataclass(frozen=True)
class Source:
    """Files, and how they are read."""

    format: str
    paths: Sequence[str]
    reading: Reading
    tokenizer: Tokenizer
    unit_field: str | Sequence[str] | None = None  # several: each names owners (`owners`)
    not_owners: Sequence[str] = ()

    @property
    def path(self) -> str:
        """The paths, in words."""
        return ", ".join(self.paths)

    @property
    def facts(self) -> Format:
        return FORMATS[self.format]

    @property
    def unit_word(self) -> str:
        """The one-word name of the privacy unit, which is drawn, clipped and protected."""
        return "record" if self.unit_field is None else "unit"

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        by, has_fields = self.unit_field or (), self.facts.fields
        unit = {by: "data.unit_field"} if isinstance(by, str) else dict.fromkeys(by, OF_OWNERS)
        return {**self.reading.keys, **(unit if has_fields else {})}

    @property
    def owners(self) -> Sequence[str] | None:
        """The fields that name owners; None where a record has one at most."""
        return None if isinstance(self.unit_field, str) else self.unit_field

    @property
    def terms(self) -> dict[str, object]:
        """The terms, besides the files, that decide ids and units."""
        template = self.reading.template.identity if self.reading.template else ""
        read = {"format": self.format, "fields": self.reading.keys, "unit_field": self.unit_field}
        if self.not_owners:
            read["not_owners"] = sorted(self.not_owners)
        return {**read, "tokenizer": self.tokenizer.identity, "template": template}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integers that hold the ids and their complements."""
        return np.dtype("<i2" if self.tokenizer.get_vocab_size() <= 2**15 else "<i4")

    def check(self) -> None:
        """Refuse, by ValueError in one line, fields that the format has not."""
        facts = self.facts
        by = [(name, "data.unit_field") for name in self.owners or (self.unit_field,)]
        for name, key in [*self.reading.keys.items(), *by]:
            if facts.fields and name == "":
                raise ValueError(f"{key} = '': name the {facts.fields}")
            if not facts.fields and name == FOLDER and len(self.paths) > 1:
                raise ValueError(f"{key} = '{FOLDER}': of several paths it is unclear; name one")
            is_folder = self.owners is None and name in (None, FOLDER)
            if not facts.fields and key == "data.unit_field" and not is_folder:
                raise ValueError(
                    f"{key} = {name!r}: {self.format} files have no fields; use '{FOLDER}', the "
                    "first folder below training.dataset_path, or remove it"
                )
            lists = key == "data.messages_field" and not facts.has_lists
            if lists or (key == "data.prompt_field" and not facts.fields):
                raise ValueError(f"{key} = {name!r}: {self.format} has none; use jsonl or omit it")

    def refuse_names_by_position(self, heldout_fraction: float, in_groups: bool) -> None:
        """Refuse units whose names depend on other records, where their number is secret."""
        if self.unit_field is not None or not self.facts.fields:  # a file goes by its own name
            return
        if in_groups or heldout_fraction > 0:
            held = f"data.heldout_fraction = {heldout_fraction}"
            raise ValueError(
                f"{'privacy.noise = banded' if in_groups else held}: with a public "
                f"privacy.sample_rate, one {self.facts.row} more would change which are held out, "
                "or take turns; set data.unit_field, or remove privacy.sample_rate"
            )

    def files(self) -> Files:
        """List the files that the path names; ValueError, one line, if there are none, or the
        format has not the fields that are read."""
        if not self.path:
            raise ValueError("training.dataset_path is not set: give a file, a folder or a glob")
        self.check()
        facts = self.facts
        try:
            if facts.listed is not None:
                found = [facts.listed(path) for path in self.paths]
            else:
                named = not facts.fields
                found = [locate(path, facts.below, has_named=named) for path in self.paths]
            files = list_files(*together(found))
        except OSError as error:
            raise ValueError(
                f"training.dataset_path = {self.path!r}: cannot be read ({error})"
            ) from error
        mark, remedy = _LISTS.get(self.format, ("$^", ""))
        if own := next((name for name in files.passed if re.search(mark, name)), None):
            raise ValueError(
                f"training.dataset_path = {self.path!r}: {own} lists the files that count, and "
                f"others may be left over; {remedy}, or name files by a glob"
            )
        for path, (_, names, _) in zip(self.paths, found, strict=True):
            if not names:
                raise ValueError(self.no_record(path, files))
        return files

    def no_record(self, path: str, files: Files) -> str:
        """Describe a path without a record."""
        there = f" (not private: there is {files.passed[0]})" if files.passed else ""
        return (
            f"training.dataset_path = {path!r} holds no record: it needs at least one "
            f"{self.facts.row} in a file like {' or '.join(self.facts.below)}{there}"
        )

    def notices(self, files: Files) -> Iterator[str]:
        """Describe files that are left out, and fields that may name people. NOT PRIVATE."""
        if files.passed:
            every = len(files.passed) + len(files.names)
            yield (
                f"{len(files.passed):,} of {every:,} files in training.dataset_path are not read "
                f"({files.passed[0]}, say), since '{self.format}' takes those that match "
                f"{', '.join(self.facts.below)}, of a saved data set those of its state.json; if "
                "they hold records, rename them, save the set again, or name files by a glob"
            )
        folders = {folder_of(name) for name in files.names} - {None}
        is_own = not self.facts.fields and not {*self.paths} & {*NAMED}
        if self.unit_field is None and is_own and len(folders) > 1:
            yield (
                f"the files lie in {len(folders):,} folders, and epsilon protects one file: if a "
                f"folder is one person's, set data.unit_field = '{FOLDER}'"
            )
        if self.unit_field is None and self.facts.fields:
            names = self.facts.field_names(files.paths[0])
            if others := [repr(one[:40]) for one in names if one not in self.reading.keys][:20]:
                yield (
                    f"data.unit_field is not set: epsilon protects one {self.facts.row}, not all "
                    f"of a person's; if one of these names the person, set it: {', '.join(others)}"
                )

    def fields_of(self, files: Files) -> str:
        """Describe the fields of the first record, for the end of a clause. NOT PRIVATE."""
        known = self.facts.field_names(files.paths[0])[:20] if self.facts.fields else []
        return f" (not private: the first has {', '.join(known)})" if known else ""

    def refuse_lacks(self, lacks: Iterable[Lack], none: str, records: str = "") -> NoReturn:
        """Refuse a data set for what its records lack, the most frequent first."""
        first, *others = sorted(lacks, key=lambda lack: -lack.number)
        also = "".join(f"; {one.number:,} {one.what} ({one.setting})" for one in others)
        raise ValueError(
            f"{first.setting}: {none}: {first.number:,} {records}{first.what}{also}; {first.remedy}"
        )


def prepared(source: Source, data_store: str | None = None, files: Files | None = None) -> Store:
    """Open the store of a source, of its `files`, in `data.store`: written unless one fits.

    Raises ValueError, one line, and leaves no store: records without any text or unit, files that
    fail or change meanwhile, a folder that fails or has no room.
    """
    files = files or source.files()
    folder = stores.private_folder(data_store)
    try:
        target = os.path.join(folder, stores.key_of(files, source.terms))
        if isinstance(store := _reusable_store(target, files, source), Store):
            return store
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), folder)
        with stores.writing_lock(target):
            if isinstance(store := _reusable_store(target, files, source), Store):
                return store  # of a process that was just waited for
            if store:
                say(store)
            for path in files.paths:  # those of a store that is there were checked
                source.facts.check(path, source.keys)
            below = os.path.relpath(os.path.realpath(folder), files.root).split(os.sep)
            is_hidden = any(part.startswith(".") for part in below)  # or "..", which leads outside
            is_file = all(map(os.path.isfile, source.paths))
            if not (source.facts.fields or is_hidden or is_file):
                raise ValueError(f"data.store: {folder!r} is in training.dataset_path; move it")
            say(f"tokenizing {sum(files.sizes) / 1e6:,.1f} MB of {source.path} into {folder}")
            stores.write(target, lambda temporary: _make(temporary, files, source))
            written = stores.load(target)
            assert written is not None, "a store that was just written is whole"
            stores.note_compared(written, stores.stamp_of(written, files))
            return written
    except OSError as error:
        raise ValueError(
            f"training.dataset_path = {source.path!r}: its records cannot be read, or their tokens "
            f"not be written to {folder!r} ({error}): check both, or set data.store"
        ) from error


def _reusable_store(target: str, files: Files, source: Source) -> Store | str:
    """Return a store that is there, if it is whole and of these files; else why not, in a line."""
    store, terms = stores.load(target), json.loads(json.dumps(source.terms))
    damaged = f"the tokens in {target} are damaged, and are prepared again"
    if store is None or store.facts["terms"] != terms:
        return damaged if os.path.exists(target) else ""
    stamp = stores.stamp_of(store, files)
    if stores.was_compared(store, stamp):
        return store
    if not stores.is_intact(store):
        return damaged
    skip = not source.facts.fields
    hashes = [stores.file_hash(path, skip_unreadable=skip) for path in files.paths]
    if stores.contents_hash(hashes) != store.contents:
        return f"files of {source.path} changed since their tokens were prepared in {target}"
    stores.note_compared(store, stamp)
    return store


def _make(folder: str, files: Files, source: Source) -> tuple[bytes, dict[str, Any]]:
    """Write the tokens of all records; refuse files that change meanwhile."""
    # The pool is not the generator's, `_ids`: garbage collection of one that an error's traceback
    # kept would wait for its thread, in any thread, and hang where that one is being started.
    with (
        open(os.path.join(folder, stores.TOKENS), "xb", opener=private_opener) as output,
        ThreadPoolExecutor(1, thread_name_prefix="tokens") as pool,
    ):
        made = _tokenize(output, files, source, pool)
    now = list_files(files.root, files.names).stamps
    for path, before, after in zip(files.paths, files.stamps, now, strict=True):
        if before != after:
            raise ValueError(f"training.dataset_path: {path!r} changed while read: start again")
    return made


class _Row(NamedTuple):
    unit: bytes  # hash
    spelling: bytes  # one hash for all spellings of a unit's name
    has_unit: bool  # or else it is one by itself that contributes nothing
    pieces: Sequence[Piece] = (Piece("", False),)  # not empty, which bounds a batch's rows
    lack: Lack | None = None  # why it has no text


def _tokenize(
    output: IO[bytes], files: Files, source: Source, pool: ThreadPoolExecutor
) -> tuple[bytes, dict[str, Any]]:
    """Tokenize all records, and return the arrays and facts of their store. Refuse those none of
    which has a text, or none a unit: of these nothing was tokenized, and no store is left."""
    assembler = Assembler(source.tokenizer, source.reading)
    ends, firsts, reasons, hashes = array("q", [0]), array("q"), bytearray(), bytearray()
    spellings = bytearray()
    lacks: dict[Lack, int] = {}  # and how many records have it
    contents: list[str] = []
    unnamed = 0
    owners = None if source.owners is None else Owners(source.owners, source.not_owners)
    rows, ahead = itertools.tee(_rows(files, source, contents, owners))
    encoded = _ids(pool, source.tokenizer, (piece.text for row in ahead for piece in row.pieces))
    for row in rows:
        ids_of = [next(encoded) for _ in row.pieces]
        found = row.lack or assembler.record(row.pieces, ids_of)
        ids, first = (assembler.between[:0], 0) if isinstance(found, Lack) else found
        output.write(ids.astype(source.dtype).data)
        if isinstance(found, Lack):
            lacks[found] = lacks.get(found, 0) + 1
        reasons.append([*lacks].index(found) + 1 if isinstance(found, Lack) else 0)
        firsts.append(first)
        ends.append(ends[-1] + len(ids))
        hashes.extend(row.unit)
        spellings.extend(row.spelling)
        unnamed += not row.has_unit
    count = len(reasons)
    if count == 0:
        raise ValueError(source.no_record(source.path, files))
    if unnamed == count and any(one.setting.startswith("data.unit_field") for one in lacks):
        raise ValueError(
            f"data.unit_field = {source.unit_field!r}: none of the {count} records has a text "
            "or a whole number there (1.0 is neither): name another field; of text files, give a "
            f"path above the units' folders{source.fields_of(files)}"
        )
    if all(reasons) and EMPTY not in lacks:
        counted = [lack._replace(number=number) for lack, number in lacks.items()]
        none = f"none of the {count:,} records has a target to learn{source.fields_of(files)}"
        source.refuse_lacks(counted, none)
    hashes_R2 = np.frombuffer(hashes, dtype="<u8").reshape(count, -1)
    if owners is not None:
        owners.check()
        units, spelled = owners.units(hashes_R2), owners.spellings()
    else:
        units = (singles if source.unit_field is None else group)(hashes_R2)
        spelled = np.frombuffer(spellings, "<u8")[units.members[units.starts[:-1]]]
    _, times = np.unique(spelled, return_counts=True)
    columns = np.array(ends)[1:], np.array(firsts), np.array(reasons)
    return stores.pack(*columns, units), {
        "version": stores.VERSION,
        "terms": source.terms,
        "path": source.path,
        "tokenizer": source.tokenizer.describe(),
        "records": count,
        "units": len(units),
        "members": len(units.members),
        "owners": owners and owners.facts(units),
        "unnamed": unnamed,
        "alike": [int(times[times > 1].sum()), int((times > 1).sum())],  # units, and of how many
        "dtype": source.dtype.str,
        "between": len(assembler.between),
        "contents": stores.contents_hash(contents),
        "lacks": [lack._asdict() for lack in lacks],
    }


def _ids(
    pool: ThreadPoolExecutor, tokenizer: Tokenizer, texts: Iterator[str]
) -> Iterator[np.ndarray | None]:
    """Tokenize texts in batches, of which one is read while another is tokenized."""
    ahead: deque[Future[list[np.ndarray | None]]] = deque()
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            ahead.append(pool.submit(tokenizer.encode_each, batch))
            batch, characters = [], 0
            if len(ahead) > 1:
                yield from ahead.popleft().result()
    ahead.append(pool.submit(tokenizer.encode_each, batch))
    for last in ahead:
        yield from last.result()


def _rows(files: Files, source: Source, hashes: list[str], owners: Owners | None) -> Iterator[_Row]:
    """Yield the records of all files; hash each file before its records, and enter `owners`."""
    facts, by = source.facts, source.unit_field
    remedy = f"write them again (jq -c '.[]', iconv), or set training.dataset for {files.names[0]}"
    broken = Lack("training.dataset_path", f"are no {facts.row}s of '{source.format}'", remedy)
    unknown = Lack(f"data.unit_field = {by!r}", "have no usable one", "name each unit")
    said = time.monotonic()
    show, every_s = (progress, 1.0) if sys.stderr.isatty() else (say, _PROGRESS_S)
    for place, (name, path) in enumerate(zip(files.names, files.paths, strict=True), 1):
        hashes.append(stores.file_hash(path, skip_unreadable=not facts.fields))
        for number, fields in enumerate(_naming_file(path, facts.rows(path, [*source.keys])), 1):
            if time.monotonic() - said >= every_s:
                said = time.monotonic()
                show(f"tokenizing file {place:,} of {len(files.names):,}, its record {number:,}")
            record = f"{name}:{number}" if facts.fields else name
            found: list[Piece] | Lack = broken
            if fields is not None:
                found = source.reading.pieces(fields, facts.fields or "text")
            if by is None:
                hashed = record_hash(record, size=8)
                row = _Row(hashed + bytes(8), hashed, True)
            elif owners is not None:
                of = owners.enter(fields or {})
                row = _Row(of or record_hash(record), b"", of is not None)
                if of is None and fields is not None:
                    found = unknown
            else:
                unit = unit_name((fields or {}).get(str(by))) if facts.fields else folder_of(name)
                hashed = record_hash(record) if unit is None else unit_hash(unit)
                spelling = hashed[:8] if unit is None or len(unit) > 256 else spelling_hash(unit)
                row = _Row(hashed, spelling, unit is not None)
                if unit is None and fields is not None:
                    found = unknown
            if isinstance(found, Lack):
                yield row._replace(lack=found)
                continue
            parts = [Piece(part, of.is_target) for of in found for part in split(of.text) if part]
            yield row._replace(pieces=parts)


def _naming_file(path: str, rows: Iterator[Fields | None]) -> Iterator[Fields | None]:
    from pyarrow import ArrowException

    try:
        yield from rows
    except MemoryError:
        raise ValueError(
            f"training.dataset_path: a row of {path} (not private) exceeds this machine's memory"
        ) from None
    except (OSError, EOFError, ArrowException) as error:
        raise ValueError(
            f"training.dataset_path: {path} cannot be read to its end ({error}): restore it"
        ) from error
