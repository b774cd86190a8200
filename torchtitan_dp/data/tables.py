"""Rows of tables, one after the other: Parquet by row groups, Arrow by record batches (pyarrow).

Guarantee:
    - How a row is read depends on no other row (hazard row 68): a value that is not UTF-8, whose
      offsets lead out of its file, or which is larger than `MOST_ROW_BYTES` once it is decoded, is
      `BROKEN` by itself, and its row's other columns, such as its unit, are read.
    - A file is refused for its structure alone, which is public: columns, their types, a damaged
      footer. Rows behind a damaged page of a row group read as None.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as is_

from torchtitan_dp.data.files import BROKEN, MOST_ITEMS, MOST_ROW_BYTES, Columns, Fields

_MOST_ROWS = 64  # that are decoded at once
# Of a table that cannot be read:
_ERRORS = (OSError, ValueError, KeyError, OverflowError, RuntimeError, TypeError, pa.ArrowException)


def parquet_rows(path: str, columns: Sequence[str]) -> Iterator[Fields | None]:
    """Yield the rows of a Parquet file. As many are decoded at once as fit if each has the largest
    value: a page may hold it once and repeat its number, but each row takes its whole size."""
    footer, starts = _read_footer(path), tuple(f"{name}." for name in columns)
    how: dict[str, Any] = {"binary_type": pa.large_binary(), "list_type": pa.LargeListType}
    with pq.ParquetFile(path, metadata=footer, buffer_size=2**20, **how) as file:
        for number in range(footer.num_row_groups):
            group, done = footer.row_group(number), 0
            chunks = [group.column(i) for i in range(group.num_columns)]
            read = [c for c in chunks if f"{c.path_in_schema}.".startswith(starts)]
            largest = sum(chunk.total_uncompressed_size for chunk in read)
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
                except _ERRORS as error:  # a damaged page
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
    """Decode a column: at once where all of it is whole, else value by value."""
    if isinstance(column, pa.ExtensionArray):
        return _values(column.storage)
    try:
        if is_.is_dictionary(column.type):  # whose words may be large, and are all rows'
            raise ValueError
        column.validate(full=True)
        found = column.to_pylist()
    except _ERRORS:
        found = [_value(column.slice(i, 1)) for i in range(len(column))]
    return [value if _size(value) <= MOST_ROW_BYTES else BROKEN for value in found]


def _value(one: Any) -> object:
    """Decode a column of one value, whatever lies beside it in the buffers."""
    try:
        if is_.is_dictionary(one.type):
            (at,) = one.indices.to_pylist()
            if at is None:
                return None
            return _value(one.dictionary.slice(at, 1)) if 0 <= at < len(one.dictionary) else BROKEN
        if not (_is_list(one.type) or is_.is_struct(one.type)):
            one.validate(full=True)
            return one.to_pylist()[0]
        if one.null_count:
            return None
        if is_.is_struct(one.type):
            names = [one.type.field(i).name for i in range(one.type.num_fields)]
            return dict(zip(names, map(_value, one.flatten()), strict=True))
        first, last = one.offsets.to_pylist()
        if not 0 <= first <= last <= len(one.values):
            return BROKEN
        kept = range(first, min(last, first + MOST_ITEMS))
        return [_value(one.values.slice(i, 1)) for i in kept]
    except _ERRORS:
        return BROKEN


def _size(value: object) -> int:
    """Count the bytes of a value, and of all that it holds."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict | list):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, bytes) else 8 * (value is not None)


def columns(path: str, kind: str) -> Columns:
    """List the columns of a Parquet or an Arrow file; raise ValueError, one line, if it is none."""
    try:
        file = _arrow_reader(path)[0] if kind == "Arrow" else _read_footer(path)
        schema = file.schema if kind == "Arrow" else file.schema.to_arrow_schema()
    except _ERRORS as error:
        raise ValueError(
            f"training.dataset_path: {path} is no {kind} file, or damaged "
            f"({' '.join(str(error).split())[:200]}); write it again, or name the others by a glob"
        ) from error
    return list(zip(schema.names, schema.types, strict=True))


def misfit(kind: Any, key: str) -> str | None:
    """Describe the types that a column which a key names may have; None if this is one of them."""
    while is_.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if is_.is_dictionary(kind) else kind.storage_type
    is_text = str(kind) in ("string", "large_string", "string_view", "null")
    if key == "data.messages_field":
        of = kind.value_type if _is_list(kind) else None
        fits = is_.is_null(kind) or (of is not None and is_.is_null(of))
        if of is not None and is_.is_struct(of):  # no dictionaries, whose words messages repeat
            fits = not any(is_.is_dictionary(of.field(i).type) for i in range(of.num_fields))
        return None if fits else "lists of structs with a role and a content"
    if key == "data.unit_field":
        return None if is_text or is_.is_integer(kind) else "texts or whole numbers"
    return None if is_text else "texts"


def _is_list(kind: Any) -> bool:
    return bool(is_.is_list(kind) or is_.is_large_list(kind))


def _arrow_reader(path: str) -> tuple[Any, bool]:
    """Open an Arrow stream or file, and return whether it is a file."""
    source = pa.memory_map(path)
    try:
        return pa.ipc.open_stream(source), False
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source), True


def _read_footer(path: str) -> Any:
    """Read the footer of a Parquet file without the Arrow types that it was written from, which
    would decide how columns are read: of dictionaries, with 32-bit offsets."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, os.SEEK_END)
        footer = file.read()
    plain = footer.replace(b"ARROW:schema", b"arrow schema")  # a name that pyarrow does not know
    return pq.read_metadata(pa.BufferReader(b"PAR1" + plain))
