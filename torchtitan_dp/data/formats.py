"""The formats of records: the facts of each, and the readers of files whose rows are lines.

A reader yields the rows of a file in order, each exactly once: a mapping of fields, or None for one
that is broken. A new format is a reader and an entry in `FORMATS`; no other code depends on one.

Guarantee:
    - How a row is read depends on no other row (hazard row 68), and none is left out (row 42):
      types are never inferred over rows.
    - Limits act on values that the parser has finished, so one that is too large divides a file as
      any other does (row 78).
    - How a file divides into rows is public. One in which that is damaged is refused (a CSV file
      whose last quote does not close, a compressed file that ends early, a footer).
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any

from torchtitan_dp.data.files import BROKEN, MOST_ROW_BYTES, Columns, Fields, saved_files
from torchtitan_dp.data.tokenizer import text_of

MOST_LINE_BYTES = 16 * 2**20  # JSON is parsed whole, in up to 30 times its size
POINTER = b"version https://git-lfs.github.com/spec/"  # what a file of Git LFS begins with
FOLDER = "folder"  # the unit field of records without fields
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# Stands for NUL, which the csv of Python 3.10 refuses; bytes other than UTF-8 are U+DC80 to U+DCFF.
_NUL = "\udc00"


@dataclass(frozen=True)
class Format:
    """The facts of one value of `training.dataset`."""

    rows: Callable[[str, Sequence[str]], Iterator[Fields | None]]  # of a path, with named fields
    below: tuple[str, ...]  # patterns of the files to take from a folder, parts separated by "/"
    row: str  # a part of a file that is one record
    fields: str | None  # a phrase for named fields; without any, only folders are units
    columns: Callable[[str], Columns] | None = None  # of all rows; ValueError for a damaged file
    listed: Callable[[str], tuple[str, list[str], list[str]]] | None = None  # of its own list
    has_lists: bool = True  # whether a field may be a list, as of messages

    @property
    def record(self) -> str:
        """One record, for a release card."""
        file = f" of {self.below[0].rpartition('.')[2]} files" if self.fields else ""
        return f"one {self.row}{file}"

    def check(self, path: str, keys: Mapping[str, str]) -> None:
        """Refuse, by ValueError in one line, a file without a column that a key names."""
        if self.columns is None:
            return
        if is_pointer(path):
            raise ValueError(
                f"training.dataset_path: {path} is a Git LFS pointer, not the file itself; fetch "
                "it: git lfs pull"
            )
        columns = self.columns(path)
        for field, key in keys.items():
            kinds = [kind for name, kind in columns if name == field]
            if not kinds:
                hint = " (of UTF-8, separated by commas)" if self.rows is csv_rows else ""
                names = ", ".join(name for name, _ in columns)
                raise ValueError(
                    f"{key} = {field!r}: {path} has no such column; its columns are {names}{hint}"
                )
            if len(kinds) > 1:
                raise ValueError(
                    f"{key} = {field!r}: {path} has {len(kinds)} such columns; write it with one"
                )
            if kinds[0] is not None and (needed := _tables().misfit(kinds[0], key)):
                raise ValueError(
                    f"{key} = {field!r}: {path} has it as {kinds[0]}; name a column of {needed}"
                )


def format_named(name: str) -> Format:
    """Look a format up; raise ValueError, one line, if it is not known."""
    if name not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(f"training.dataset = {name!r} is not a known format: use one of {known}")
    return FORMATS[name]


def unit_name(value: object) -> str | None:
    """Return the name of a unit in a field; None if it names none."""
    # A bool is an int in Python, and 1.0 is not 1 in other JSON readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(value) or None


def text_rows(path: str, fields: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the whole text of a file, under the name of the first field."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_ROW_BYTES + 1)
        text = data.decode("utf-8-sig") if len(data) <= MOST_ROW_BYTES else None
    except (PermissionError, UnicodeError):  # another error of the disk may be gone the next time
        text = None
    yield None if text is None else {fields[0]: text}


def jsonl_rows(path: str, fields: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the JSON object on each line; a line that is blank, torn or too long is None."""
    with _opened(path) as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            is_whole = len(line) <= MOST_LINE_BYTES
            while not line.endswith(b"\n") and (more := file.readline(MOST_LINE_BYTES)):
                line, is_whole = more, False
            yield _parsed(line) if is_whole else None


def _parsed(line: bytes) -> Fields | None:
    try:
        value = json.loads(line.decode("utf-8-sig"))
        return value if isinstance(value, dict) else None
    except (ValueError, RecursionError, MemoryError):
        return None


def csv_rows(path: str, fields: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the rows behind the first, which names the columns, as texts; a value that is too large
    is `BROKEN`, and None stands for a row with another number of values."""
    rows = _csv_values(path)
    names = next(rows)
    for values in rows:
        read = [value if len(value) <= MOST_ROW_BYTES else BROKEN for value in values]
        yield dict(zip(names, read, strict=True)) if len(read) == len(names) else None


def csv_columns(path: str) -> Columns:
    """List the columns of a CSV file, which have no types."""
    return [(name, None) for name in next(_csv_values(path), [])]


def _csv_values(path: str) -> Iterator[list[str]]:
    """Yield the values of each row, whole. Bytes other than UTF-8 are surrogates, and what follows
    a closed quote is part of the value. Raises ValueError for a quote that is open at the end of
    the file, since nobody can tell its rows apart."""
    csv.field_size_limit(sys.maxsize)
    is_over = False

    def lines(file: IO[str]) -> Iterator[str]:
        nonlocal is_over
        yield from (line.replace("\0", _NUL) for line in file)
        is_over = True

    text = io.TextIOWrapper(_opened(path), "utf-8-sig", errors="surrogateescape", newline="")
    with text as file:
        rows, first = csv.reader(lines(file)), 1
        for values in rows:
            if is_over:  # the reader asked for more lines to end a row
                raise ValueError(
                    f"training.dataset_path: {path}: a quote opens in the row at line {first} (not "
                    "private) and never closes; write it again, with each text in quotes and "
                    "quotes in it doubled"
                )
            yield [value.replace(_NUL, "\0") for value in values]
            first = rows.line_num + 1


def _opened(path: str) -> IO[bytes]:
    """Open a file, decompressed if its name ends in .gz or .zst."""
    codec = _CODECS.get(os.path.splitext(path)[1])
    if codec is None:
        return open(path, "rb", buffering=2**20)
    raw: Any = _tables().pa.input_stream(path, compression=codec)
    return io.BufferedReader(raw, buffer_size=2**20)


def is_pointer(path: str) -> bool:
    """Return whether a file is one of Git LFS, which stands for another."""
    try:
        if os.path.getsize(path) > 1024:
            return False
        with open(path, "rb") as file:
            return file.read(len(POINTER)) == POINTER
    except PermissionError:
        return False


def _tables() -> ModuleType:
    from torchtitan_dp.data import tables  # pyarrow: half a second of a start, and threads

    return tables


def _arrow_rows(path: str, fields: Sequence[str]) -> Iterator[Fields | None]:
    yield from _tables().arrow_rows(path, fields)


def _arrow_columns(path: str) -> Columns:
    return list(_tables().columns(path, "Arrow"))


def _parquet_rows(path: str, fields: Sequence[str]) -> Iterator[Fields | None]:
    yield from _tables().parquet_rows(path, fields)


def _parquet_columns(path: str) -> Columns:
    return list(_tables().columns(path, "Parquet"))


_LINES = "**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"
_ARROWS = "**/*.arrow", "**/*.feather"
FORMATS: dict[str, Format] = {
    "text": Format(text_rows, ("**",), "file", None, has_lists=False),
    "jsonl": Format(jsonl_rows, _LINES, "line", "JSON field"),
    "csv": Format(csv_rows, ("**/*.csv",), "row", "column", csv_columns, has_lists=False),
    "parquet": Format(_parquet_rows, ("**/*.parquet",), "row", "column", _parquet_columns),
    "arrow": Format(_arrow_rows, _ARROWS, "row", "column", _arrow_columns),
    "hf": Format(_arrow_rows, ("data-*.arrow",), "row", "column", _arrow_columns, saved_files),
}
