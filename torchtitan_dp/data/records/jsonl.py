"""The format "jsonl": one line, one record, a JSON object with the text in one of its fields."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import IO

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import Format, checked, decode, fingerprint
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.store import Fields, RecordStore, text_of

MAX_LINE_BYTES = 16 * 2**20  # JSON is parsed whole, in up to 30 times its size
CHUNK = 2**16
LINES_VERSION = "hashed-lines-1"  # of the index's format and name


class JsonlRecords(RecordStore):
    """Lines of files. `record_id` is "<relative path>:<line, from 1>"."""

    most_row_bytes = MAX_LINE_BYTES

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
        text = text_of((self.fields(index) or {}).get(self._text_field))
        if text is None:
            return None
        stop = None if max_bytes is None else start + max_bytes + 1
        return decode(text.encode()[start:stop], max_bytes, start, codec="utf-8")

    def fields(self, index: int) -> Fields | None:
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
                return None  # of an unknown unit, or of another one by now
        return fields

    def are_as_listed(self, indices: np.ndarray) -> bool:
        files = np.unique(np.searchsorted(self._first, indices, side="right")) - 1
        return all(self._files.is_as_listed(index) for index in files.tolist())

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._bounds[indices + 1] - self._bounds[indices]

    def record_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.names[file_index]}:{index - int(self._first[file_index]) + 1}"

    def record_ids(self) -> Iterator[str]:  # much faster than `record_id` one by one
        for name, lines in zip(self._files.names, np.diff(self._first).tolist(), strict=True):
            for line in range(1, lines + 1):
                yield f"{name}:{line}"

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:
        self._is_of = is_of

    def unit_names(
        self, count: Callable[[Fields | None], None] | None = None
    ) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self.all_fields():
            if count is not None:
                count(fields)
            yield None if fields is None else _unit_name(fields.get(self._unit_field))

    def all_fields(self) -> Iterator[Fields | None]:
        for file_index in range(len(self._files)):
            first, last = (int(x) for x in self._first[file_index : file_index + 2])
            with open(self._files.path(file_index), "rb") as file:
                for start in range(first, last, CHUNK):
                    stop = min(start + CHUNK, last)
                    for size in np.diff(self._bounds[start : stop + 1]).tolist():
                        yield _read_object(file, size)


def _read_object(file: IO[bytes], size: int) -> Fields | None:
    """Read the JSON object on the next line, of so many bytes, and pass the line in any case."""
    if size > MAX_LINE_BYTES:
        file.seek(size, os.SEEK_CUR)
        return None
    return _parse(file.read(size), size)


def _parse(line: bytes, size: int) -> Fields | None:
    """Parse the JSON object on a line; None if there is none, or if it has not `size` bytes."""
    try:
        value = json.loads(line.decode("utf-8-sig")) if len(line) == size else None
    except (ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def _unit_name(value: object) -> str | None:
    # A bool is an int in Python, and 1.0 is not 1 in other JSON readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(value) or None


def line_bounds(files: Files, folder: str) -> tuple[np.ndarray, str]:
    """Find, in one pass, where lines begin and end, and hash the files' contents.

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
    digest, _ = read_contents(files, scan=lambda block: np.flatnonzero(block == 0x0A), take=take)
    write(np.frombuffer(digest, dtype="<i8"))


def by_pandas(reader: str, stem: str) -> str:
    """Return the command that writes what `reader`, an expression, reads to `stem`.jsonl.

    >>> by_pandas("pd.read_csv('a.csv')", "a")[:36]
    'python -c "import pandas as pd; pd.r'
    """
    write = f"to_json('{stem}.jsonl', orient='records', lines=True, force_ascii=False)"
    return f'python -c "import pandas as pd; {reader}.{write}"'


# The first bytes of another format, its name, and a command that converts it.
_FOREIGN = (
    (b"PAR1", "Parquet", lambda name, stem: by_pandas(f"pd.read_parquet('{name}')", stem)),
    (b"\x1f\x8b", "gzip", lambda name, stem: f"gunzip -c '{name}' > '{stem}.jsonl'"),
    (b"\x28\xb5\x2f\xfd", "zstd", lambda name, stem: f"zstd -dc '{name}' > '{stem}.jsonl'"),
    (b"[", "one JSON array", lambda name, stem: by_pandas(f"pd.read_json('{name}')", stem)),
)


def _explain(path: str, text_field: str, lines: int) -> str:
    """Recognize another format by a file's first bytes, with the command that converts it."""
    name = PurePath(path).name
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError:
        head = b""
    for magic, format, command in _FOREIGN:
        if head.startswith(magic):
            done = command(name, name.partition(".")[0])
            return f"{name!r} is {format}, not JSON lines; convert it: {done}"
    return (
        f"none of the {lines} lines is a JSON object; 'jsonl' needs one a line, "
        f'{{"{text_field}": …}}'
    )


JSONL = Format(
    open=JsonlRecords,
    below=("**", "*.jsonl"),
    row="line",
    found_in="line in a *.jsonl file",
    record="one line of a JSON Lines file",
    named_by_position=True,
    fields="JSON field",
    content="JSON object",
    explain=_explain,
)
