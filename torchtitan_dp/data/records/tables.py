"""The formats "parquet" and "hf": one row of a table, one record, read by pyarrow.

"hf" is a folder of `datasets.Dataset.save_to_disk`: Arrow files, which are mapped into memory, so
that a row is read alone. A Parquet file is read by row groups, from their beginning up to the row,
in small batches; groups that are small enough stay in memory. Only the columns that a run reads are
decoded.

Guarantee:
    No cell's content stops the run: a row that cannot be decoded, or is larger than
    `MOST_ROW_BYTES`, reads as None. A start is refused only for the files' structure, which is
    public: a missing column, a damaged footer, a row group above `LARGEST_GROUP`.
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

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import FieldRecords, Format, fingerprint, unit_name
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.store import Fields

MOST_ROW_BYTES = 256 * 2**20
GROUP_BYTES, CACHE_BYTES = 32 * 2**20, 256 * 2**20
"""Decoded bytes of the largest row group that stays in memory, and of all that do."""
LARGE_GROUP, LARGEST_GROUP = 64 * 2**20, 2 * 2**30
"""Stored bytes of a row group of Parquet from which on reading is slow, and refused."""
_BATCH_ROWS = 16
_VERSION = "tables-1"  # of the index's format and name

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

    @classmethod
    @abstractmethod
    def _groups(cls, path: str) -> list[tuple[int, int]]:
        """List the numbers of rows and of stored bytes of a file's groups."""

    @abstractmethod
    def _names(self, path: str) -> list[str]:
        """List the columns of a file."""

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
                    return _cells(batch, row)
                row -= batch.num_rows
        except _errors():
            pass
        return None

    def all_fields(self) -> Iterator[Fields | None]:
        return self._all(self._columns)

    def unit_names(self) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self._all([self._unit_field]):
            yield None if fields is None else unit_name(fields[self._unit_field])

    def _all(self, columns: list[str]) -> Iterator[Fields | None]:
        for group, file_index in enumerate(self._group_file.tolist()):
            count = int(self._group_first[group + 1] - self._group_first[group])
            number = group - int(self._file_group[file_index])
            done = 0
            try:
                for batch in self._batches(file_index, number, columns):
                    rows = _all_cells(batch)[: count - done]
                    yield from rows
                    done += len(rows)
            except _errors():
                pass
            for _ in range(count - done):
                yield None

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Count the mean bytes of a row of its group: sizes of rows are not stored."""
        group = np.searchsorted(self._group_first, indices, side="right") - 1
        rows = self._group_first[group + 1] - self._group_first[group]
        return np.asarray(self._group_bytes[group] // rows)

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
        """Raise ValueError unless a file has the columns that the run reads."""
        names = self._names(self._files.path(index))
        for field, key in keys.items():
            if field not in names:
                raise ValueError(
                    f"{key} = {field!r}: {self._files.path(index)} has no such column; its columns "
                    f"are {', '.join(names)}"
                )
            if names.count(field) > 1:
                raise ValueError(
                    f"{key} = {field!r}: {self._files.path(index)} has {names.count(field)} such "
                    "columns; write it again with one of them"
                )


def _cells(batch: Any, row: int) -> Fields | None:
    """Read the cells of a row, by column; None if they are broken or too large."""
    import pyarrow as pa

    try:
        cells = {name: batch.column(name).slice(row, 1) for name in batch.schema.names}
        for name, cell in cells.items():
            if pa.types.is_dictionary(cell.type):
                cells[name] = cell.dictionary_decode()
        for cell in cells.values():
            cell.validate(full=True)  # offsets of a mapped file may lead anywhere
        if sum(cell.nbytes for cell in cells.values()) > MOST_ROW_BYTES:
            return None
        return {name: cell[0].as_py() for name, cell in cells.items()}
    except _errors():  # not UTF-8, for one
        return None


def _all_cells(batch: Any) -> list[Fields | None]:
    """Read the cells of all rows of a batch."""
    if batch.get_total_buffer_size() <= MOST_ROW_BYTES:
        try:
            batch.validate(full=True)
            return cast("list[Fields | None]", batch.to_pylist())
        except _errors():  # of some rows
            pass
    return [_cells(batch, row) for row in range(batch.num_rows)]


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
        import pyarrow.parquet as pq

        self._footer = functools.lru_cache(maxsize=64)(pq.read_metadata)
        super().__init__(*args, **options)
        self.read_bytes = int(self._group_bytes.max(initial=1))
        largest = int(np.argmax(self._group_bytes)) if len(self._group_bytes) else 0
        if len(self) and (size := int(self._group_bytes[largest])) > LARGE_GROUP:
            path = self._files.path(int(self._group_file[largest]))
            slow = f"{path} has a row group of {size / 2**20:,.0f} MiB"
            if size > LARGEST_GROUP:
                raise ValueError(
                    f"training.dataset_path: {slow}, too large to read one row of it; "
                    f"{_regroup(path)}"
                )
            self.notice = f"{slow}, of which half is decoded to read one row; {_regroup(path)}"
        self._decoded: OrderedDict[tuple[int, int], Batches] = OrderedDict()
        self._lock = threading.Lock()  # samples and counts are read by two threads

    @classmethod
    def _groups(cls, path: str) -> list[tuple[int, int]]:
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def _names(self, path: str) -> list[str]:
        import pyarrow.parquet as pq

        return list(pq.read_schema(path).names)

    def _batches(self, file_index: int, group: int, columns: list[str]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        path = self._files.path(file_index)
        with pq.ParquetFile(path, metadata=self._footer(path), buffer_size=2**20) as file:
            yield from file.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
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

    def _names(self, path: str) -> list[str]:
        import pyarrow as pa

        with pa.memory_map(path) as source:
            return list(pa.ipc.open_stream(source).schema.names)

    def _batches(self, file_index: int, group: int, columns: list[str]) -> Iterator[Any]:
        if file_index not in self._mapped:
            self._mapped[file_index] = _read_arrow(self._files.path(file_index))
        yield self._mapped[file_index][group].select(columns)


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
