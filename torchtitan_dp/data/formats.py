"""The formats of records: the facts of each, and the readers of files whose rows are lines.

A reader yields the rows of a file in order, each exactly once: a mapping of fields, or None for one
that is broken. A new format is a reader and an entry in `FORMATS`; no other code depends on one.

Guarantee:
    How a row is read depends on no other row (hazard row 68), and none is left out (row 42): types
    are never inferred over rows. Limits act on values that the parser has finished, so one that is
    too large divides a file as any other does (row 78). How a file divides into rows is public; one
    in which that is damaged (a CSV file whose last quote does not close, a compressed file that
    ends early) is refused.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
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
Sign = tuple[bytes, str, str]  # first bytes of a file, what they show that it is, and a remedy


@dataclass(frozen=True)
class Format:
    """The facts of one value of `training.dataset`."""

    rows: Callable[[str, Sequence[str]], Iterator[Fields | None]]  # of a path, with named fields
    below: tuple[str, ...]  # patterns of the files to take from a folder, parts separated by "/"
    row: str  # a part of a file that is one record
    found_in: str  # what a path without records lacks
    record: str  # one record, for a release card
    content: str  # what a record must be
    remedy: str  # for files none of whose records are that
    signs: tuple[Sign, ...] = ()  # of other formats
    fields: str | None = None  # a phrase for named fields; without any, only folders are units
    listed: Callable[[str], tuple[str, list[str], list[str]]] | None = None  # of its own list
    columns: Callable[[str], Columns] | None = None  # of all rows; ValueError for a damaged file
    named_by_position: bool = True  # whether names, and so who is held out, depend on other records
    has_lists: bool = True  # whether a field may be a list, as of messages

    def check(self, path: str, keys: Mapping[str, str]) -> None:
        """Refuse, by ValueError in one line, a file without a column that a key names."""
        if self.columns is None:
            return
        try:
            columns = self.columns(path)
        except ValueError:
            if found := _recognized(path, _SIGNS[:1]):
                raise ValueError(f"training.dataset_path: {found}") from None
            raise
        for field, key in keys.items():
            kinds = [kind for name, kind in columns if name == field]
            mistake = None
            if not kinds:
                is_csv = [kind for _, kind in columns] == [None]
                if is_csv and (found := _recognized(path, _SIGNS)):
                    raise ValueError(f"training.dataset_path: {found}")
                hint = "; its columns must be separated by commas" if is_csv else ""
                names = ", ".join(name for name, _ in columns)
                mistake = f"has no such column; its columns are {names}{hint}"
            elif len(kinds) > 1:
                mistake = f"has {len(kinds)} such columns; write it again with one"
            elif kinds[0] is not None and (needed := _tables().misfit(kinds[0], key)):
                mistake = f"has it as {kinds[0]}; name a column of {needed}"
            if mistake:
                raise ValueError(f"{key} = {field!r}: {path} {mistake}")

    def explain(self, path: str, text_field: str) -> str:
        """Describe a file none of whose records are readable, with a remedy."""
        name = PurePath(path).name
        terms = {"name": name, "path": path, "stem": name.partition(".")[0], "field": text_field}
        return _recognized(path, self.signs) or self.remedy.format(**terms)


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

    with _csv_text(path) as file:
        rows, first = csv.reader(lines(file)), 1
        for values in rows:
            if is_over:  # the reader asked for more lines to end a row
                opens = f"a quote opens in the row at line {first} (not private) and never closes"
                remedy = "write it again, with each text in quotes and quotes in it doubled"
                raise ValueError(f"training.dataset_path: {path}: {opens}; {remedy}")
            yield [value.replace(_NUL, "\0") for value in values]
            first = rows.line_num + 1


def _csv_text(path: str) -> IO[str]:
    return io.TextIOWrapper(_opened(path), "utf-8-sig", errors="surrogateescape", newline="")


def _opened(path: str) -> IO[bytes]:
    """Open a file, decompressed if its name ends in .gz or .zst."""
    codec = _CODECS.get(os.path.splitext(path)[1])
    if codec is None:
        return open(path, "rb", buffering=2**20)
    raw: Any = _tables().pa.input_stream(path, compression=codec)
    return io.BufferedReader(raw, buffer_size=2**20)


def _recognized(path: str, signs: Iterable[Sign]) -> str:
    """Describe a file of another format by its first bytes, with a remedy; "" if it is none."""
    name = PurePath(path).name
    stem, dot, ending = name.partition(".")
    try:
        with _opened(path) as file:
            head = file.read(2**16).lstrip()
    except OSError as error:
        return f"{name!r} cannot be read ({error.strerror or error})"
    for mark, found, remedy in signs:
        if head.startswith(mark):
            return f"{name!r} {found}; {remedy.format(name=name, stem=stem, ending=dot + ending)}"
    return ""


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
    from torchtitan_dp.data import tables  # pyarrow takes half a second of a start

    return tables


_ICONV = "convert it: iconv -f {} -t UTF-8 '{{name}}' > '{{stem}}_utf8{{ending}}'"
_SIGNS: tuple[Sign, ...] = (
    (POINTER, "is a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
    (b"PAR1", "is Parquet", "set training.dataset = 'parquet'"),
    (b"ARROW1", "is Arrow", "set training.dataset = 'arrow'"),
    (b"\x1f\x8b", "is gzip", "unpack it, or name it {name}.gz for 'jsonl'"),
    (b"\x28\xb5\x2f\xfd", "is zstd", "unpack it, or name it {name}.zst for 'jsonl'"),
    (b"%PDF", "is PDF", "extract its text: pdftotext '{name}' '{stem}.txt'"),
    (b"PK\x03\x04", "is a zip archive or an Office document", "extract its text"),
    (b"\xd0\xcf\x11\xe0", "is an old Office document", "extract its text"),
    (b"\xff\xfe", "is UTF-16", _ICONV.format("UTF-16")),
    (b"\xfe\xff", "is UTF-16", _ICONV.format("UTF-16")),
    (b"{\0", "is UTF-16", _ICONV.format("UTF-16LE")),
    (b"\0{", "is UTF-16", _ICONV.format("UTF-16BE")),
)
_LINES = (
    "convert it: python -c \"import pandas as pd; pd.read_json('{name}').to_json("
    "'{stem}_lines.jsonl', orient='records', lines=True, force_ascii=False)\""
)
_ON_LINES = "write one a line: jq -c . '{name}' > '{stem}_lines.jsonl'"
_SEVERAL = "has an object that goes on over several lines"
_JSON_SIGNS = (*_SIGNS, (b"[", "is one JSON array", _LINES), (b"{", _SEVERAL, _ON_LINES))
_TABLE: dict[str, Any] = {"row": "row", "fields": "column", "content": "readable row"}
_TABLE |= {"remedy": "write '{path}' again"}
_ARROW = {"rows": lambda path, columns: _tables().arrow_rows(path, columns), **_TABLE}
_ARROW |= {"columns": lambda path: _tables().columns(path, "Arrow")}

FORMATS: dict[str, Format] = {
    "text": Format(
        rows=text_rows,
        below=("**",),
        row="file",
        found_in="file",
        record="one file",
        content="UTF-8 text",
        signs=_SIGNS,
        remedy="convert them (iconv -f LATIN1 -t UTF-8, if Latin-1), or name text files by a glob",
        named_by_position=False,
        has_lists=False,
    ),
    "jsonl": Format(
        rows=jsonl_rows,
        below=("**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"),
        row="line",
        found_in="line in a *.jsonl, *.jsonl.gz or *.jsonl.zst file",
        record="one line of a JSON Lines file",
        fields="JSON field",
        content="JSON object",
        signs=_JSON_SIGNS,
        remedy="'jsonl' needs one a line, {{\"{field}\": …}}",
    ),
    "csv": Format(
        rows=csv_rows,
        columns=csv_columns,
        below=("**/*.csv",),
        found_in="row behind the names of columns in a *.csv file",
        record="one row of a CSV file",
        has_lists=False,
        **_TABLE,
    ),
    "parquet": Format(
        rows=lambda path, columns: _tables().parquet_rows(path, columns),
        columns=lambda path: _tables().columns(path, "Parquet"),
        below=("**/*.parquet",),
        found_in="row in a *.parquet file",
        record="one row of a Parquet file",
        **_TABLE,
    ),
    "arrow": Format(
        below=("**/*.arrow", "**/*.feather"),
        found_in="row in an *.arrow or *.feather file",
        record="one row of an Arrow file",
        **_ARROW,
    ),
    "hf": Format(
        below=("data-*.arrow",),
        listed=saved_files,
        found_in="row in a file that state.json names",
        record="one row of a Hugging Face data set",
        **_ARROW,
    ),
}
