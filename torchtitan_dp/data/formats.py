"""The formats of records: the facts of each, and a reader of its rows.

A reader yields the rows of a file in order, each exactly once: a mapping of fields, or None for one
that is broken. A new format is a reader and an entry in `FORMATS`; no other code depends on one.

Guarantee:
    - How a row is read depends on no other row (hazard row 68), and none is left out (row 42):
      types are never inferred over rows. A value that is not UTF-8, whose offsets lead out of its
      file, or which is larger than `MOST_ROW_BYTES` once it is decoded, is `BROKEN` by itself.
    - Limits act on values that the parser has finished, so one that is too large divides a file as
      any other does (row 78).
    - A file is refused for its structure alone, which is public: columns and their types, a damaged
      footer, a CSV quote that never closes, a compressed file that ends early. Rows behind a
      damaged page of a row group read as None.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from torchtitan_dp.data.files import (
    BROKEN,
    MOST_ITEMS,
    MOST_ROW_BYTES,
    Columns,
    Fields,
    saved_files,
)
from torchtitan_dp.data.tokenizer import text_of

MOST_LINE_BYTES = 16 * 2**20  # JSON is parsed whole, in up to 30 times its size
FOLDER = "folder"  # the unit field of records without fields
OF_OWNERS = "data.unit_field, a field of owners,"  # the key of a field that may be a list of names
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# Stands for NUL, which the csv of Python 3.10 refuses; bytes other than UTF-8 are U+DC80 to U+DCFF.
_NUL = "\udc00"
_MOST_ROWS = 64  # that are decoded at once


def _pyarrow() -> Any:
    """Import pyarrow where a file needs it: a start that reads none spares its quarter second."""
    import pyarrow.parquet
    import pyarrow.types

    return pyarrow


def _errors() -> tuple[type[Exception], ...]:
    of_python = OSError, ValueError, KeyError, OverflowError, RuntimeError, TypeError
    return *of_python, _pyarrow().ArrowException


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

    def field_names(self, path: str) -> list[str]:
        """List the columns of a file, or the fields of its first row."""
        if self.columns is not None:
            return [name for name, _ in self.columns(path)]
        return [*(next(self.rows(path, ()), None) or {})]

    def check(self, path: str, keys: Mapping[str, str]) -> None:
        """Refuse, by ValueError in one line, a file without a column that a key names."""
        if self.columns is None:
            return
        columns = self.columns(path)
        for field, key in keys.items():
            kinds = [kind for name, kind in columns if name == field]
            if not kinds:
                hint = " (of UTF-8, separated by commas)" if self.rows is csv_rows else ""
                names = ", ".join(name if len(name) <= 40 else "…" for name, _ in columns[:20])
                raise ValueError(
                    f"{key} = {field!r}: {path} has no such column; its columns (not private) are "
                    f"{names}{hint}"
                )
            if len(kinds) > 1:
                count = f"{len(kinds)} columns of that name"
                raise ValueError(f"{key} = {field!r}: {path} has {count}; keep one")
            if kinds[0] is not None and (needed := misfit(kinds[0], key)):
                raise ValueError(
                    f"{key} = {field!r}: {path} has it as {kinds[0]}; name a column of {needed}"
                )


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
    """Read a JSON line: a byte that is not UTF-8 spoils its own value alone (`text_of`), as does a
    name that stands twice in an object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, item in pairs:
            found[name] = BROKEN if name in found else item
        return found

    try:
        value = json.loads(line.decode("utf-8-sig", "surrogateescape"), object_pairs_hook=once)
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
    names = next(_csv_values(path), [])
    is_binary = any(c < " " and c not in "\t\r\n" for name in names for c in name)
    if is_binary or (names and names[0].startswith("{")):
        kind = "is no text in UTF-8 (parquet?)" if is_binary else "looks like jsonl"
        raise ValueError(f"training.dataset_path: {path} {kind}: set training.dataset")
    return [(name, None) for name in names]


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
    codec = _CODECS.get(os.path.splitext(path)[1])
    if codec is None:
        return open(path, "rb", buffering=2**20)
    raw: Any = _pyarrow().input_stream(path, compression=codec)
    return io.BufferedReader(raw, buffer_size=2**20)


def parquet_rows(path: str, columns: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the rows of a Parquet file. As many are decoded at once as fit if each has the largest
    value: a page may hold it once and repeat its number, but each row takes its whole size. Lists
    are decoded one at a time."""
    pa = _pyarrow()
    footer, starts = _read_footer(path), tuple(f"{name}." for name in columns)
    how: dict[str, Any] = {"binary_type": pa.large_binary(), "list_type": pa.LargeListType}
    with pa.parquet.ParquetFile(path, metadata=footer, buffer_size=2**20, **how) as file:
        for number in range(footer.num_row_groups):
            group, done = footer.row_group(number), 0
            chunks = [group.column(i) for i in range(group.num_columns)]
            read = [c for c in chunks if f"{c.path_in_schema}.".startswith(starts)]
            largest = sum(chunk.total_uncompressed_size for chunk in read)
            if any(chunk.num_values > group.num_rows for chunk in read):  # a list repeats a text
                largest = MOST_ROW_BYTES
            for step in (_rows_at_once(largest), 1):  # a row that fails takes none before it along
                seen, how = 0, {"batch_size": step, "columns": list(columns)}
                try:
                    for batch in file.iter_batches(row_groups=[number], use_threads=False, **how):
                        for row in _rows(batch):
                            seen += 1
                            if seen > done:
                                done = seen
                                yield row
                    break
                except MemoryError:
                    raise
                except _errors() as error:  # a damaged page
                    if isinstance(error, OSError) and error.errno:  # or a failing disk
                        raise
            yield from [None] * (group.num_rows - done)


def arrow_rows(path: str, columns: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the rows of an Arrow file, or of a stream as `datasets` saves it."""
    reader, is_file = _arrow_reader(path)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        chosen = batch.select(list(columns))
        step = _rows_at_once(chosen.nbytes)
        for start in range(0, chosen.num_rows, step):
            yield from _rows(chosen.slice(start, step))


def _rows_at_once(size: int) -> int:
    """Choose how many rows to decode at once, if each takes `size` bytes at most."""
    return max(1, min(MOST_ROW_BYTES // max(size, 1), _MOST_ROWS))


def _rows(batch: Any) -> Iterator[Fields]:
    """Yield the rows of a batch; a value that is broken or too large is `BROKEN`."""
    for values in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: Any) -> list[object]:
    """Decode a column: at once where all of it is whole, else value by value; lists, of which the
    first items alone are decoded, always so: a broken row must not decide how another is cut."""
    pa = _pyarrow()
    if isinstance(column, pa.ExtensionArray):
        return _values(column.storage)
    try:
        # A dictionary's words may be large, and are all rows'.
        if pa.types.is_nested(column.type) or pa.types.is_dictionary(column.type):
            raise ValueError
        column.validate(full=True)
        found = column.to_pylist()
    except _errors():
        found = [_value(column.slice(i, 1)) for i in range(len(column))]
    return [value if _size(value) <= MOST_ROW_BYTES else BROKEN for value in found]


def _value(one: Any) -> object:
    """Decode a column of one value, independent of its neighbours in the buffers."""
    pa = _pyarrow()
    try:
        if pa.types.is_dictionary(one.type):
            (at,) = one.indices.to_pylist()
            if at is None:
                return None
            return _value(one.dictionary.slice(at, 1)) if 0 <= at < len(one.dictionary) else BROKEN
        if not (_is_list(one.type) or pa.types.is_struct(one.type)):
            one.validate(full=True)
            return one.to_pylist()[0]
        if one.null_count:
            return None
        if pa.types.is_struct(one.type):
            names = [one.type.field(i).name for i in range(one.type.num_fields)]
            return dict(zip(names, map(_value, one.flatten()), strict=True))
        first, last = one.offsets.to_pylist()
        if not 0 <= first <= last <= len(one.values):
            return BROKEN
        return [_value(one.values.slice(i, 1)) for i in range(first, min(last, first + MOST_ITEMS))]
    except _errors():
        return BROKEN


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict | list):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, bytes) else 8 * (value is not None)


def columns(kind: str, path: str) -> Columns:
    """List the columns of a Parquet or an Arrow file; raise ValueError, one line, if it is none."""
    try:
        file = _arrow_reader(path)[0] if kind == "Arrow" else _read_footer(path)
        schema = file.schema if kind == "Arrow" else file.schema.to_arrow_schema()
    except _errors() as error:
        raise ValueError(
            f"training.dataset_path: {path} is no {kind} file, or damaged "
            f"({' '.join(str(error).split())[:200]}): write it again (of a Git LFS pointer: git "
            "lfs pull), set training.dataset, or name others by a glob"
        ) from error
    return list(zip(schema.names, schema.types, strict=True))


def misfit(kind: Any, key: str) -> str | None:
    """Describe the types that a column which a key names may have; None if this is one of them."""
    pa = _pyarrow()
    while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    is_text = str(kind) in ("string", "large_string", "string_view", "null")
    if key == "data.messages_field":
        of = kind.value_type if _is_list(kind) else None
        fits = pa.types.is_null(kind) or (of is not None and pa.types.is_null(of))
        if of is not None and pa.types.is_struct(of):
            fits = "dictionary<" not in str(of)  # at any depth: their words repeat
        return None if fits else "lists of structs with a role and a content"
    if key in ("data.unit_field", OF_OWNERS):
        if key == OF_OWNERS and _is_list(kind):
            return misfit(kind.value_type, "data.unit_field")
        owners = "; of lists of owners, name the field in a list: ['owners']" * _is_list(kind)
        return None if is_text or pa.types.is_integer(kind) else f"texts or whole numbers{owners}"
    return None if is_text else "texts"


def _is_list(kind: Any) -> bool:
    pa = _pyarrow()
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _arrow_reader(path: str) -> tuple[Any, bool]:
    """Open an Arrow stream or file, and return whether it is a file."""
    pa = _pyarrow()
    source = pa.memory_map(path)
    try:
        return pa.ipc.open_stream(source), False
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source), True


def _read_footer(path: str) -> Any:
    """Read the footer of a Parquet file without the Arrow types that it was written from, which
    would decide how columns are read: of dictionaries, with 32-bit offsets."""
    pa = _pyarrow()
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
        footer = file.read()
    plain = footer.replace(b"ARROW:schema", b"arrow schema")  # a name that pyarrow does not know
    return pa.parquet.read_metadata(pa.BufferReader(b"PAR1" + plain))


_LINES = "**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"
_ARROWS = "**/*.arrow", "**/*.feather"
_PARQUET, _ARROW = partial(columns, "Parquet"), partial(columns, "Arrow")
FORMATS: dict[str, Format] = {
    "text": Format(text_rows, ("**",), "file", None, has_lists=False),
    "jsonl": Format(jsonl_rows, _LINES, "line", "JSON field"),
    "csv": Format(csv_rows, ("**/*.csv",), "row", "column", csv_columns, has_lists=False),
    "parquet": Format(parquet_rows, ("**/*.parquet",), "row", "column", _PARQUET),
    "arrow": Format(arrow_rows, _ARROWS, "row", "column", _ARROW),
    "hf": Format(arrow_rows, ("data-*.arrow",), "row", "column", _ARROW, listed=saved_files),
}
