"""Rows of tables, one after the other: Parquet by row groups, Arrow by record batches (pyarrow).

Guarantee:
    How a row is read depends on no other row (hazard row 68): a value that is not UTF-8, whose
    offsets lead out of its file, or which is larger than `MOST_ROW_BYTES`, is `BROKEN` by itself,
    and its row's other columns, such as its unit, are read. A file is refused for its structure
    alone, which is public: columns, their types, a damaged footer. Rows behind a damaged page of a
    row group read as None.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as is_

from torchtitan_dp.data.files import BROKEN, MOST_ITEMS, MOST_ROW_BYTES, Columns, Fields

_MOST_ROWS = 64
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
    reader, is_file = _reader(path)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        chosen = batch.select(list(columns))
        step = _rows_at_once(chosen.nbytes)
        for start in range(0, chosen.num_rows, step):
            yield from _rows(chosen.slice(start, step))


def columns(path: str, kind: str) -> Columns:
    """List the columns of a Parquet or an Arrow file; raise ValueError, one line, if it is none."""
    try:
        file = _reader(path)[0] if kind == "Arrow" else _read_footer(path)
        schema = file.schema if kind == "Arrow" else file.schema.to_arrow_schema()
    except _ERRORS as error:
        damaged = f"{path} is no {kind} file, or damaged ({' '.join(str(error).split())[:200]})"
        remedy = "write it again, or name the others by a glob"
        raise ValueError(f"training.dataset_path: {damaged}; {remedy}") from error
    return list(zip(schema.names, schema.types, strict=True))


def misfit(kind: Any, key: str) -> str | None:
    """Describe the types that a column which a key names may have; None if this is one of them."""
    while is_.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if is_.is_dictionary(kind) else kind.storage_type
    if key == "data.messages_field":
        fits = is_.is_null(kind) or (_is_list(kind) and _is_message(kind.value_type))
        return None if fits else "lists of structs with a role and a content"
    if key == "data.unit_field":
        return None if _is_text(kind) or is_.is_integer(kind) else "texts or whole numbers"
    return None if _is_text(kind) else "texts"


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view", "null")


def _is_list(kind: Any) -> bool:
    return bool(is_.is_list(kind) or is_.is_large_list(kind))


def _is_message(kind: Any) -> bool:
    """Return whether it is a struct without fields that are encoded by a dictionary."""
    if not is_.is_struct(kind):
        return bool(is_.is_null(kind))
    return not any(is_.is_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _rows_at_once(size: int) -> int:
    """Choose how many rows to decode at once, if each takes `size` bytes at most."""
    return max(1, min(MOST_ROW_BYTES // max(size, 1), _MOST_ROWS))


def _rows(batch: Any) -> Iterator[Fields]:
    """Yield the rows of a batch; a value that is broken or too large is `BROKEN`."""
    columns = [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: Any) -> list[object]:
    if isinstance(column, pa.ExtensionArray):
        return _values(column.storage)
    if len(column) == 1 and is_.is_dictionary(column.type):
        (at,) = column.indices.to_pylist()
        if at is None:
            return [None]
        is_there = 0 <= at < len(column.dictionary)
        return _values(column.dictionary.slice(at, 1)) if is_there else [BROKEN]
    try:
        is_whole = _is_whole(column)
        if (kind := _without_views(column.type)) != column.type:
            column = column.cast(kind)  # whose size is that of these rows alone
        if is_whole and (_size(column) if len(column) == 1 else column.nbytes) <= MOST_ROW_BYTES:
            if _is_list(column.type):
                column = pc.list_slice(column, 0, MOST_ITEMS)
            return cast("list[object]", column.to_pylist())
    except _ERRORS:
        pass
    if len(column) == 1:
        return [BROKEN]
    return [value for i in range(len(column)) for value in _values(column.slice(i, 1))]


def _without_views(kind: Any) -> Any:
    """Return a type with large values in the place of views, whose buffers rows share."""
    if is_.is_string_view(kind) or is_.is_binary_view(kind):
        return pa.large_string() if is_.is_string_view(kind) else pa.large_binary()
    if _is_list(kind):
        of_items = kind.value_field.with_type(_without_views(kind.value_type))
        return pa.list_(of_items) if is_.is_list(kind) else pa.large_list(of_items)
    if is_.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_without_views(field.type)) for field in fields])
    return kind


def _size(column: Any) -> int:
    """Count the bytes of values, never more than `nbytes`: which has some of other rows, as where
    one of them is null."""
    kind = column.type
    if is_.is_null(kind):
        return 0
    if is_.is_struct(kind):
        return sum(map(_size, column.flatten()))
    if _is_list(kind):
        return 4 * len(column) + _size(column.flatten())
    if _is_text(kind):
        return int(pc.sum(pc.binary_length(column)).as_py() or 0)
    return len(column) * kind.bit_width // 8 if is_.is_primitive(kind) else int(column.nbytes)


def _is_whole(column: Any) -> bool:
    """Return whether values (a list's items) are UTF-8 and their offsets lead to them."""
    kind = column.type
    if is_.is_dictionary(kind):
        return False  # row by row, since other rows' values lie in one place
    if is_.is_struct(kind):
        return all(map(_is_whole, column.flatten()))
    if _is_list(kind):
        ends = column.offsets.to_numpy()
        if len(column) == 0 or ends[0] < 0 or (ends[1:] < ends[:-1]).any():
            return len(column) == 0
        first, last = int(ends[0]), int(ends[-1])
        return last <= len(column.values) and _is_whole(column.values.slice(first, last - first))
    column.validate(full=True)
    return True


def _reader(path: str) -> tuple[Any, bool]:
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
