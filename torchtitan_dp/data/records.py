"""Map-style stores of private text records that keep offsets, never the records.

A record is a privacy unit. One that cannot be decoded stays in the index and reads as `None`, so
that its content changes nothing about who else can be drawn (hazard row 42).
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from torchtitan_dp.data.files import Files, list_files, locate
from torchtitan_dp.data.index import line_bounds, writable_folder

MAX_LINE_BYTES = 256 * 2**20
"""A longer jsonl line is undecodable: JSON is parsed whole, in a few times its size of memory."""
_BLOCK_BYTES = 16 * 2**20


class RecordStore(Protocol):
    """Records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes and the number of records: tells that a data
    set is the same one, wherever it lies. PRIVATE: never published, never logged."""

    def __len__(self) -> int:
        """The number of records, undecodable ones included."""
        ...

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        """The text of a record, or `None` if it is undecodable: not UTF-8, not JSON, its field
        missing or not a string, its file unreadable. Never raises for what a record holds.

        With `max_bytes`, a prefix of at most that many UTF-8 bytes, cut between characters; a
        text file is not read (nor checked) beyond it, a JSON line is parsed whole first.
        """
        ...

    def is_decodable(self, index: int) -> bool:
        """Whether all of a record reads as text, however large it is."""
        ...

    def unit_id(self, index: int) -> str:
        """A stable identity: "<relative path>" (text) or "<relative path>:<line, from 1>"."""
        ...

    def unit_ids(self) -> Iterator[str]:
        """All identities in index order, much faster than `unit_id` one by one."""
        ...


def open_records(
    format: str, path: str, *, text_field: str = "text", index_folder: str | None = None
) -> RecordStore:
    """Open the records of `training.dataset` = `format` at `training.dataset_path` = `path`.

    `text`: one file, one record; `path` is a file, a glob, a folder (all files below it), or
    "python-stdlib". `jsonl`: one line, one record; `path` is a file, a glob, or a folder of
    *.jsonl. Hidden files, `__pycache__` and .pyc are skipped; symbolic links are followed, but no
    folder is entered twice, and a link to a file listed anyway is dropped (one file, one unit).

    The lines of jsonl files are found in one streaming pass, kept in `index_folder` (default:
    `$XDG_CACHE_HOME` or ~/.cache, torchtitan_dp/index) and found again while the files' absolute
    paths, sizes and modification times stay the same.

    Raises `ValueError`, one line, for an unknown format, an empty text field, a path that is
    missing or cannot be listed or holds no record, an index folder that cannot be written.
    """
    if format not in ("text", "jsonl"):
        planned = " is not built yet" if format in ("parquet", "hf") else " is not a known format"
        raise ValueError(f"training.dataset = {format!r}{planned}: use 'text' or 'jsonl'")
    if format == "jsonl" and not (isinstance(text_field, str) and text_field):
        raise ValueError(f"data.text_field = {text_field!r}: name the JSON field with the text")
    folder = writable_folder(index_folder)
    try:
        root, names = locate(format, path)
        files = list_files(root, names, folder)
        store = TextRecords(files) if format == "text" else JsonlRecords(files, text_field, folder)
    except OSError as error:
        raise ValueError(
            f"training.dataset_path = {path!r} cannot be listed or indexed ({error}): check "
            f"its permissions and the space left in {folder!r}"
        ) from error
    if len(store) == 0:
        wanted = "file" if format == "text" else "line in a *.jsonl file"
        raise ValueError(
            f"training.dataset_path = {path!r} holds no record: it needs at least one {wanted} "
            "(a glob must match files, not folders; '**' matches any depth)"
        )
    return store


class TextRecords:
    """One file, one record."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.fingerprint = _fingerprint("text", files, len(files))

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        path = os.path.join(self._files.root, self.unit_id(index))
        try:
            with open(path, "rb") as file:
                data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            return _decode(data, max_bytes)
        except (OSError, UnicodeError):
            return None

    def is_decodable(self, index: int) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            with open(os.path.join(self._files.root, self.unit_id(index)), "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    decoder.decode(block)
            decoder.decode(b"", final=True)
        except (OSError, UnicodeError):
            return False
        return True

    def unit_id(self, index: int) -> str:
        return self._files.name(_checked(index, len(self)))

    def unit_ids(self) -> Iterator[str]:
        return map(self._files.name, range(len(self)))


class JsonlRecords:
    """One line, one record: a JSON object whose `text_field` is the text."""

    def __init__(self, files: Files, text_field: str, index_folder: str) -> None:
        self._files, self._text_field = files, text_field
        self._bounds = line_bounds(files, index_folder)  # (records + 1,)
        self._first = np.searchsorted(self._bounds, files.starts)  # (files + 1,) first record
        self.fingerprint = _fingerprint("jsonl", files, len(self))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._first, _checked(index, len(self)), side="right")) - 1

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        file_index = self._file_of(index)
        start, end = int(self._bounds[index]), int(self._bounds[index + 1])
        if end - start > MAX_LINE_BYTES:
            return None
        try:
            with open(os.path.join(self._files.root, self._files.name(file_index)), "rb") as file:
                file.seek(start - int(self._files.starts[file_index]))
                line = file.read(end - start)
            if len(line) != end - start:
                return None
            value = json.loads(_decode(line, None))
            text = value.get(self._text_field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                return None
            # JSON can spell half a surrogate pair, which is not text: encoding tells.
            return _decode(text.encode("utf-8"), max_bytes, codec="utf-8")
        except (OSError, ValueError, RecursionError):
            return None

    def is_decodable(self, index: int) -> bool:
        return self.read(index) is not None

    def unit_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.name(file_index)}:{index - int(self._first[file_index]) + 1}"

    def unit_ids(self) -> Iterator[str]:
        for file_index in range(len(self._files)):
            name = self._files.name(file_index)
            for line in range(int(self._first[file_index + 1] - self._first[file_index])):
                yield f"{name}:{line + 1}"


def _checked(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def _decode(data: bytes, max_bytes: int | None, codec: str = "utf-8-sig") -> str:
    """UTF-8 text of the first `max_bytes`; a character that the cut splits is dropped."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    return codecs.getincrementaldecoder(codec)().decode(data[:max_bytes], final=not is_cut)


def _fingerprint(format: str, files: Files, records: int) -> str:
    text = f"{format}\0{files.content_hash}\0{records}"
    return hashlib.sha256(text.encode()).hexdigest()
