"""The record store of `training.dataset` = "jsonl": one line, one record."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.record_format import Format, checked, decode, fingerprint
from torchtitan_dp.data.records.record_store import MAX_LINE_BYTES

CHUNK = 2**16
LINES_VERSION = "hashed-lines-1"  # of the format and of the name


class JsonlRecords:
    """Reads one line as one record: a JSON object whose `text_field` is the text."""

    reads_whole = True

    def __init__(
        self, files: Files, text_field: str, unit_field: str | None, index_folder: str
    ) -> None:
        self._files, self._text_field, self._unit_field = files, text_field, unit_field
        self._is_of: Callable[[int, str], bool] | None = None
        # (records + 1,)
        self._bounds, hashed = line_bounds(files, index_folder)
        self._first = np.searchsorted(self._bounds, files.starts)  # (files + 1,) first record
        lines = hashlib.sha256(self._bounds.data).hexdigest()  # in which order they are
        self.fingerprint = fingerprint("jsonl", files, lines, hashed)
        self.place_hash = f"jsonl-{files.place_hash}"

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def file_of(self, index: int) -> str:
        return self._files.path(self._file_of(index))

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._first, checked(index, len(self)), side="right")) - 1

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        text = self._text(index)
        if text is None:
            return None
        part = text[start:] if max_bytes is None else text[start : start + max_bytes + 1]
        return decode(part, max_bytes, start, codec="utf-8")

    def is_decodable(self, index: int) -> bool:
        return self._text(index) is not None

    def size(self, index: int) -> int:
        return len(self._text(index) or b"")

    def _text(self, index: int) -> bytes | None:
        fields = self.fields(index)
        return None if fields is None else _encode(fields.get(self._text_field))

    def fields(self, index: int) -> dict[str, object] | None:
        file_index = self._file_of(index)
        begin, end = int(self._bounds[index]), int(self._bounds[index + 1])
        try:
            with open(self._files.path(file_index), "rb") as file:
                file.seek(begin - int(self._files.starts[file_index]))
                fields = _read_object(file, end - begin)
        except OSError:
            return None
        if fields is not None and self._unit_field is not None:
            name = _unit_name(fields.get(self._unit_field))
            if name is None or (self._is_of is not None and not self._is_of(index, name)):
                return None  # nobody knows whose it is, or somebody else's by now
        return fields

    def are_as_listed(self, indices: np.ndarray) -> bool:
        files = np.unique(np.searchsorted(self._first, indices, side="right")) - 1
        return all(self._files.is_as_listed(index) for index in files.tolist())

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._bounds[indices + 1] - self._bounds[indices]

    def record_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.name(file_index)}:{index - int(self._first[file_index]) + 1}"

    def record_ids(self) -> Iterator[str]:
        for file_index in range(len(self._files)):
            name = self._files.name(file_index)
            for line in range(int(self._first[file_index + 1] - self._first[file_index])):
                yield f"{name}:{line + 1}"

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:
        self._is_of = is_of

    def unit_names(
        self, count: Callable[[dict[str, object] | None], None] | None = None
    ) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self.all_fields():
            if count is not None:
                count(fields)
            yield None if fields is None else _unit_name(fields.get(self._unit_field))

    def all_fields(self) -> Iterator[dict[str, object] | None]:
        for file_index in range(len(self._files)):
            first, last = (int(x) for x in self._first[file_index : file_index + 2])
            with open(self._files.path(file_index), "rb") as file:
                for start in range(first, last, CHUNK):
                    stop = min(start + CHUNK, last)
                    for size in np.diff(self._bounds[start : stop + 1]).tolist():
                        yield _read_object(file, size)


def _read_object(file: IO[bytes], size: int) -> dict[str, object] | None:
    """Read the JSON object on the next line, of so many bytes, and pass the line in any case."""
    if size > MAX_LINE_BYTES:
        file.seek(size, os.SEEK_CUR)
        return None
    return _parse(file.read(size), size)


def _parse(line: bytes, size: int) -> dict[str, object] | None:
    """Parse the JSON object on a line; return None if it is none, or not `size` bytes."""
    try:
        value = json.loads(line.decode("utf-8-sig")) if len(line) == size else None
    except (ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def _encode(value: object) -> bytes | None:
    """Encode as UTF-8; return `None` for other values. JSON can spell half a surrogate pair,
    which is none.
    """
    try:
        return value.encode("utf-8") if isinstance(value, str) else None
    except UnicodeError:
        return None


def _unit_name(value: object) -> str | None:
    # A bool is an int to Python, and 1.0 is not 1 to JSON's other readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and _encode(value) else None


def line_bounds(files: Files, folder: str) -> tuple[np.ndarray, str]:
    """Find, in one pass, where lines begin and end, and what all of them hold.

    Returns:
        (records + 1,) int64 bounds, as if all files lay one after the other; and the contents'
        hash, hex, private.
    """
    words = cached_words(
        os.path.join(folder, f"{LINES_VERSION}-{files.place_hash}.npy"),
        lambda write: _write_bounds(write, files),
        lambda words: words[0] == 0 and words[-DIGEST_WORDS - 1] == files.starts[-1],
    )
    return words[:-DIGEST_WORDS], digest_hex(words[-DIGEST_WORDS:])


def _write_bounds(write: WriteWords, files: Files) -> None:
    def take(index: int, newlines: np.ndarray, is_last: bool) -> None:
        begin, end = (int(x) for x in files.starts[index : index + 2])
        write(begin + 1 + newlines)
        if is_last and end > begin and (len(newlines) == 0 or newlines[-1] != end - begin - 1):
            write(np.array([end]))  # a last line that no newline ends

    write(np.zeros(1))
    contents = read_contents(files, scan=_newlines, take=take)
    write(np.frombuffer(contents.digest, dtype="<i8"))


def _newlines(block: np.ndarray) -> np.ndarray:
    return np.flatnonzero(block == 0x0A)


JSONL = Format(
    open=JsonlRecords,
    below=("**", "*.jsonl"),
    has_stdlib=False,
    row="line",
    found_in="line in a *.jsonl file",
    record="one line of a JSON Lines file",
    has_fields=True,
    named_by_position=True,
)
