"""Stores of records with named fields: one field is the text, another may name the unit."""

from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import checked, decode
from torchtitan_dp.data.records.store import Fields, RecordStore, text_of


class FieldRecords(RecordStore):
    """Rows of files. `record_id` is "<relative path>:<row, from 1>".

    A subclass reads rows: `_row`, `all_fields` and `stored_bytes`.

    Guarantee:
        A row whose unit is missing, or another than when units were indexed, reads as None.
    """

    def __init__(
        self, files: Files, text_field: str, unit_field: str | None, first: np.ndarray
    ) -> None:
        """
        Args:
            first: int64 (files + 1,), the first record of each file, and the number of records.
        """
        self._files, self._text_field, self._unit_field = files, text_field, unit_field
        self._first = first
        self._is_of: Callable[[int, str], bool] | None = None

    @abstractmethod
    def _row(self, file_index: int, row: int) -> Fields | None:
        """Read a row of a file, from 0; None if it has no fields. Never raises for its contents."""

    def __len__(self) -> int:
        return int(self._first[-1])

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
        fields = self._row(file_index, index - int(self._first[file_index]))
        if fields is not None and self._unit_field is not None:
            name = unit_name(fields.get(self._unit_field))
            if name is None or (self._is_of is not None and not self._is_of(index, name)):
                return None
        return fields

    def are_as_listed(self, indices: np.ndarray) -> bool:
        files = np.unique(np.searchsorted(self._first, indices, side="right")) - 1
        return all(self._files.is_as_listed(index) for index in files.tolist())

    def record_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.names[file_index]}:{index - int(self._first[file_index]) + 1}"

    def record_ids(self) -> Iterator[str]:  # much faster than `record_id` one by one
        for name, rows in zip(self._files.names, np.diff(self._first).tolist(), strict=True):
            for row in range(1, rows + 1):
                yield f"{name}:{row}"

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:
        self._is_of = is_of

    def unit_names(
        self, count: Callable[[Fields | None], None] | None = None
    ) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self.all_fields():
            if count is not None:
                count(fields)
            yield None if fields is None else unit_name(fields.get(self._unit_field))


def unit_name(value: object) -> str | None:
    """Return the name of a unit in a field; None if it names none."""
    # A bool is an int in Python, and 1.0 is not 1 in other JSON readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(value) or None
