"""The formats "parquet" and "hf": one row of a table, one record, read by pyarrow.

"hf" is a folder of `datasets.Dataset.save_to_disk`: Arrow files, which are mapped into memory, so
that a row is read alone. A Parquet file is read by row groups, from their beginning up to the row,
in small batches; groups that are small enough stay in memory. Only the columns that a run reads are
decoded. Their sizes are found in one pass before, and kept in the index.

Guarantee:
    How a row is read depends on no other row (hazard row 68). A row that cannot be decoded, or
    is larger than `MOST_ROW_BYTES`, reads as None by itself, and the size of a row
    (`stored_bytes`) is its own. Where a row is that large, values that pages repeat are never
    written out.
    A start is refused only for the files' structure, which is public: a missing column, one of a
    type that is not read, a damaged footer. What remains is memory: pyarrow passes no row without
    decoding it, so a machine whose memory cannot hold the pages of one row stops the run.
"""

import functools
import hashlib
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import FieldRecords, Format, fingerprint, unit_name
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.store import Fields
from torchtitan_dp.process import Fault

MOST_ROW_BYTES = 256 * 2**20
"""Of the columns that a run reads, decoded; each value in them counts `VALUE_BYTES` more."""
VALUE_BYTES = 32
GROUP_BYTES, CACHE_BYTES = 32 * 2**20, 256 * 2**20
"""Decoded bytes of the largest row group that stays in memory, and of all that do."""
LARGE_GROUP = 64 * 2**20
"""Stored bytes of a row group of Parquet from which on reading is slow."""
_BATCH_ROWS = 16
_VERSION = "tables-1"  # of the index's format and name
_SIZES_VERSION = "sizes-1"

Batches = Sequence[Any]
"""Record batches of pyarrow."""


class TableRecords(FieldRecords):
    """Rows of tables, in groups of rows that are found without reading the others."""

    name: str
    """The format's name."""

    most_row_bytes = MOST_ROW_BYTES

    def __init__(
        self,
        files: Files,
        text_field: str,
        unit_field: str | None,
        index_folder: str,
        *,
        keys: Mapping[str, str],
    ) -> None:
        words = cached_words(
            os.path.join(index_folder, f"{_VERSION}-{self.name}-{files.place_hash}.npy"),
            lambda write: self._write(write, files),
            lambda words: len(words) >= DIGEST_WORDS and (len(words) - DIGEST_WORDS) % 3 == 0,
        )
        # (groups, 3): the file, rows and stored bytes of each group
        groups = words[DIGEST_WORDS:].reshape(-1, 3)
        self._group_file, self._group_bytes = groups[:, 0], groups[:, 2]
        self._group_first = np.concatenate([[0], np.cumsum(groups[:, 1])])  # its first record
        self._file_group = np.searchsorted(self._group_file, np.arange(len(files) + 1))
        super().__init__(files, text_field, unit_field, self._group_first[self._file_group])
        self._columns = list(keys)
        for index in range(len(files)):
            self._require_columns(index, keys)
        rows = hashlib.sha256(self._group_first.tobytes()).hexdigest()
        self.fingerprint = fingerprint(self.name, files, rows, digest_hex(words[:DIGEST_WORDS]))
        self.place_hash = f"{self.name}-{files.place_hash}"
        columns = hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()
        self._sizes: np.ndarray | None = None
        self._sizes = cached_words(
            os.path.join(index_folder, f"{_SIZES_VERSION}-{columns}-{self.place_hash}.npy"),
            self._measure,
            lambda words: len(words) == len(self),
        )

    @classmethod
    @abstractmethod
    def _groups(cls, path: str) -> list[tuple[int, int]]:
        """List the numbers of rows and of stored bytes of a file's groups."""

    @abstractmethod
    def _schema(self, path: str) -> Any:
        """Return the pyarrow schema of a file."""

    @abstractmethod
    def _batches(self, file_index: int, group: int, columns: list[str]) -> Iterator[Any]:
        """Yield some columns of a group's rows, in record batches."""

    def _group(self, file_index: int, group: int) -> Iterable[Any]:
        """Return a group's rows, in record batches of the columns that the run reads."""
        return self._batches(file_index, group, self._columns)

    def _row(self, file_index: int, row: int) -> Fields | None:
        index = int(self._first[file_index]) + row
        found = int(np.searchsorted(self._group_first, index, side="right")) - 1
        group = found - int(self._file_group[file_index])
        row = index - int(self._group_first[found])
        try:
            for batch in self._group(file_index, group):
                if row < batch.num_rows:
                    return _rows(batch.slice(row, 1))[0]
                row -= batch.num_rows
        except _errors():  # a damaged page
            pass
        return None

    def all_fields(self) -> Iterator[Fields | None]:
        return self._all(self._columns)

    def unit_names(self) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self._all([self._unit_field]):
            yield None if fields is None else unit_name(fields[self._unit_field])

    def _all(self, columns: list[str]) -> Iterator[Fields | None]:
        for group in range(len(self._group_file)):
            count = int(self._group_first[group + 1] - self._group_first[group])
            done = 0
            for batch in self._whole_batches(group, columns):
                rows = _rows(batch)[: count - done]
                yield from rows
                done += len(rows)
            for _ in range(count - done):
                yield None

    def _whole_batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        """Yield the batches of a group, of all files' groups, up to a damaged page."""
        file_index = int(self._group_file[group])
        try:
            yield from self._batches(file_index, group - int(self._file_group[file_index]), columns)
        except _errors():
            pass

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Return the bytes of the rows' columns that the run reads, decoded."""
        assert self._sizes is not None
        return np.asarray(self._sizes[indices])

    def _measure(self, write: WriteWords) -> None:
        """Write the decoded bytes of each row; 0 of those that a damaged page took."""
        progress = Progress("measuring rows of training.dataset_path", len(self), "rows")
        for group, rows in enumerate(np.diff(self._group_first).tolist()):
            sizes, done = np.zeros(rows, dtype=np.int64), 0
            for batch in self._whole_batches(group, self._columns):
                found = _sizes(batch)[: rows - done]
                sizes[done : done + len(found)] = found
                done += len(found)
            write(sizes)
            progress.add(rows)
        progress.end()

    def _largest(self, file_index: int, group: int) -> int:
        """Return the bytes of a group's largest row; before rows were measured any may be large."""
        if self._sizes is None:
            return MOST_ROW_BYTES + 1
        first, last = self._group_first[int(self._file_group[file_index]) + group :][:2]
        return int(self._sizes[first:last].max(initial=0))

    def _write(self, write: WriteWords, files: Files) -> None:
        digest, _ = read_contents(files)
        write(np.frombuffer(digest, dtype="<i8"))
        for index in range(len(files)):
            try:
                groups = self._groups(files.path(index))
            except _errors() as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"training.dataset_path: {files.path(index)} is no {self.name} file, or "
                    f"damaged ({reason}); write it again, or name the others by a glob"
                ) from error
            for rows, size in groups:
                write(np.array([index, rows, size]))

    def _require_columns(self, index: int, keys: Mapping[str, str]) -> None:
        """Raise ValueError unless a file has the columns that the run reads, of types it can."""
        path = self._files.path(index)
        schema = self._schema(path)
        for field, key in keys.items():
            if field not in schema.names:
                raise ValueError(
                    f"{key} = {field!r}: {path} has no such column; its columns are "
                    f"{', '.join(schema.names)}"
                )
            if (count := schema.names.count(field)) > 1:
                raise ValueError(
                    f"{key} = {field!r}: {path} has {count} such columns; write it again with one "
                    "of them"
                )
            column = schema.empty_table().column(field).combine_chunks()
            try:
                _value_sizes(column)
            except TypeError as error:
                raise ValueError(
                    f"{key} = {field!r}: {path} has it as {column.type}, and {error} is not read; "
                    "write it as text, numbers, lists or structs"
                ) from None


def _rows(batch: Any) -> list[Fields | None]:
    """Read the rows of a batch, by column; None for those that are broken or too large."""
    sizes = _sizes(batch)
    try:
        if sizes.sum() <= MOST_ROW_BYTES:
            return cast("list[Fields | None]", batch.to_pylist())
    except _errors():  # not UTF-8, for one
        pass
    if len(sizes) == 1:
        return [None]
    return [row for i in range(len(sizes)) for row in _rows(batch.slice(i, 1))]


def _sizes(batch: Any) -> np.ndarray:
    """Count the decoded bytes of each row of a batch, int64; too many where a row is broken."""
    try:
        batch.validate()
        return np.sum([_value_sizes(column) for column in batch.columns], axis=0)
    except _errors():
        if batch.num_rows <= 1:
            return np.full(batch.num_rows, MOST_ROW_BYTES + 1)
    return np.concatenate([_sizes(batch.slice(i, 1)) for i in range(batch.num_rows)])


def _value_sizes(array: Any) -> np.ndarray:
    """Count the decoded bytes of each value of an array, int64, without decoding any.

    Those of a value whose offsets lead elsewhere, as in a damaged file that is mapped, are above
    `MOST_ROW_BYTES`.

    Raises:
        TypeError: names a type that is not read.
    """
    import pyarrow as pa

    kind, is_ = array.type, pa.types
    sizes = np.full(len(array), VALUE_BYTES, dtype=np.int64)
    if isinstance(kind, pa.BaseExtensionType):
        return _value_sizes(array.storage)
    if is_.is_dictionary(kind):
        # As large as where each value is written out: a null, and a number that leads elsewhere.
        words = np.append(_value_sizes(array.dictionary), [VALUE_BYTES, MOST_ROW_BYTES + 1])
        at = array.indices.cast(pa.int64()).fill_null(len(words) - 2).to_numpy()
        return words[np.where((at >= 0) & (at < len(words)), at, len(words) - 1)]
    if is_.is_struct(kind):
        return sum((_value_sizes(array.field(i)) for i in range(kind.num_fields)), start=sizes)
    if is_.is_fixed_size_list(kind):
        width = kind.list_size
        values = array.values.slice(array.offset * width, len(array) * width)
        return sizes + _value_sizes(values).reshape(len(array), width).sum(axis=1)
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(array) else (0, 0)
        values = _value_sizes(array.values.slice(first, max(last - first, 0)))
        return sizes + _spans(offsets - first, np.concatenate([[0], np.cumsum(values)]))
    is_large = is_.is_large_string(kind) or is_.is_large_binary(kind)
    if is_large or is_.is_string(kind) or is_.is_binary(kind):
        if len(array) == 0:
            return sizes
        _, starts, data = array.buffers()
        offsets = np.frombuffer(starts, np.int64 if is_large else np.int32)
        offsets = offsets[array.offset :][: len(array) + 1].astype(np.int64)
        return sizes + _spans(offsets, range(1 + (0 if data is None else data.size)))
    if is_.is_null(kind):
        return sizes
    if is_.is_primitive(kind) or is_.is_decimal(kind) or is_.is_fixed_size_binary(kind):
        return sizes + kind.bit_width // 8
    raise TypeError(str(kind))


def _spans(offsets: np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """Count the bytes between offsets in a column whose values end at `ends`."""
    begins, stops = offsets[:-1], offsets[1:]
    inside = (begins >= 0) & (begins <= stops) & (stops < len(ends))
    begins, stops = np.where(inside, begins, 0), np.where(inside, stops, 0)
    if isinstance(ends, np.ndarray):
        begins, stops = ends[begins], ends[stops]
    return np.where(inside, stops - begins, MOST_ROW_BYTES + 1)


def _errors() -> tuple[type[Exception], ...]:
    """List the errors of a table that cannot be read."""
    import pyarrow as pa

    return (
        OSError,
        ValueError,
        KeyError,
        OverflowError,
        MemoryError,
        RuntimeError,
        pa.ArrowException,
    )


class ParquetRecords(TableRecords):
    """Rows of Parquet files."""

    name = "parquet"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._footer = functools.lru_cache(maxsize=64)(_read_footer)
        super().__init__(*args, **options)
        self.read_bytes = int(self._group_bytes.max(initial=1))
        largest = int(np.argmax(self._group_bytes)) if len(self._group_bytes) else 0
        if len(self) and (size := int(self._group_bytes[largest])) > LARGE_GROUP:
            path = self._files.path(int(self._group_file[largest]))
            self.notice = (
                f"{path} has a row group of {size / 2**20:,.0f} MiB, of which half is decoded to "
                f"read one row; {_regroup(path)}"
            )
        self._decoded: OrderedDict[tuple[int, int], Batches] = OrderedDict()
        self._lock = threading.Lock()  # samples and counts are read by two threads

    @classmethod
    def _groups(cls, path: str) -> list[tuple[int, int]]:
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def _schema(self, path: str) -> Any:
        return self._footer(path).schema.to_arrow_schema()

    def _batches(self, file_index: int, group: int, columns: list[str]) -> Iterator[Any]:
        """Yield some columns of a group's rows, in record batches.

        A batch that fails is read again row by row, since a row must not take others along.
        """
        largest, done = self._largest(file_index, group), 0
        rows = max(min(GROUP_BYTES // max(largest, 1), _BATCH_ROWS), 1)
        for way in ((None,) if largest > MOST_ROW_BYTES else ()) + (rows, 1):
            seen = 0
            try:
                for batch in self._decoded_batches(file_index, group, columns, way):
                    seen += batch.num_rows
                    if seen > done:  # it has one row, if any was yielded before
                        done = seen
                        yield batch
                return
            except _errors() as error:
                if way != 1:
                    continue
                if isinstance(error, MemoryError):
                    raise Fault(
                        f"training.dataset_path: this machine's memory cannot hold a row of "
                        f"{self._files.path(file_index)} (not private); take one with more"
                    ) from error
                raise

    def _decoded_batches(
        self, file_index: int, group: int, columns: list[str], rows: int | None
    ) -> Iterator[Any]:
        """Decode a group.

        Args:
            rows: in a batch; None: all, and values that pages repeat as numbers of a dictionary.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._files.path(file_index)
        footer = self._footer(path)
        facts = footer.row_group(group)
        how: dict[str, Any] = {"binary_type": pa.large_binary()}  # which excludes dictionaries
        if rows is None:
            chunks = [facts.column(i) for i in range(facts.num_columns)]
            repeated = [c.path_in_schema for c in chunks if c.has_dictionary_page]
            how = {"read_dictionary": repeated}
            rows = max(facts.num_rows, 1)
        with pq.ParquetFile(
            path, metadata=footer, buffer_size=2**20, list_type=pa.LargeListType, **how
        ) as file:
            yield from file.iter_batches(
                batch_size=rows, row_groups=[group], columns=columns, use_threads=False
            )

    def _group(self, file_index: int, group: int) -> Iterable[Any]:
        with self._lock:
            kept = self._decoded.get((file_index, group))
            if kept is None:
                kept = self._keep(file_index, group)
            else:
                self._decoded.move_to_end((file_index, group))
        return kept or super()._group(file_index, group)

    def _keep(self, file_index: int, group: int) -> Batches:
        """Decode a group to keep it in memory; empty if it is too large for that, or broken."""
        batches, size = [], 0
        try:
            for batch in self._batches(file_index, group, self._columns):
                batches.append(batch)
                size += batch.nbytes
                if size > GROUP_BYTES:
                    batches = []
                    break
        except _errors():
            batches = []  # the rows before the broken one are read without it
        self._decoded[file_index, group] = batches
        while sum(b.nbytes for kept in self._decoded.values() for b in kept) > CACHE_BYTES:
            self._decoded.popitem(last=False)
        return batches


class HuggingFaceRecords(TableRecords):
    """Rows of the Arrow files of a saved `datasets.Dataset`."""

    name = "hf"

    def __init__(self, *args: Any, **options: Any) -> None:
        self._mapped: dict[int, list[Any]] = {}
        super().__init__(*args, **options)

    @classmethod
    def _groups(cls, path: str) -> list[tuple[int, int]]:
        return [(batch.num_rows, batch.get_total_buffer_size()) for batch in _read_arrow(path)]

    def _schema(self, path: str) -> Any:
        import pyarrow as pa

        with pa.memory_map(path) as source:
            return pa.ipc.open_stream(source).schema

    def _batches(self, file_index: int, group: int, columns: list[str]) -> Iterator[Any]:
        if file_index not in self._mapped:
            self._mapped[file_index] = _read_arrow(self._files.path(file_index))
        yield self._mapped[file_index][group].select(columns)


def _read_footer(path: str) -> Any:
    """Read the footer of a Parquet file, without the Arrow types that it was written from.

    They would decide how columns are read, of dictionaries or with 32-bit offsets.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, os.SEEK_END)
        footer = file.read()
    plain = footer.replace(b"ARROW:schema", b"arrow schema")  # a name that pyarrow does not know
    return pq.read_metadata(pa.BufferReader(b"PAR1" + plain))


def _regroup(path: str) -> str:
    """Return the command that writes a Parquet file in groups of 100 rows."""
    stem, dot, ending = path.rpartition(".")
    return (
        'to write small ones: python -c "import pyarrow.parquet as pq; '
        f"file = pq.ParquetFile('{path}'); "
        f"out = pq.ParquetWriter('{stem}_regrouped{dot}{ending}', file.schema_arrow); "
        '[out.write_batch(rows) for rows in file.iter_batches(100)]; out.close()"'
    )


def _read_arrow(path: str) -> list[Any]:
    """Map the record batches of an Arrow stream into memory, without reading their values."""
    import pyarrow as pa

    return list(pa.ipc.open_stream(pa.memory_map(path)))


def _explain(path: str, text_field: str) -> str:
    return f"write {path!r} again"


PARQUET = Format(
    open=ParquetRecords,
    below=("**", "*.parquet"),
    row="row",
    found_in="row in a *.parquet file",
    record="one row of a Parquet file",
    named_by_position=True,
    fields="column",
    content="readable row",
    explain=_explain,
)

HF = Format(
    open=HuggingFaceRecords,
    below=("data-*.arrow",),
    row="row",
    found_in="row in a data-*.arrow file of a folder that datasets.Dataset.save_to_disk wrote; for "
    "a DatasetDict, name the folder of one split",
    record="one row of a Hugging Face data set",
    named_by_position=True,
    fields="column",
    content="readable row",
    explain=_explain,
)
