"""The interface of a store of records, by position, with bodies for a format without fields.

Guarantee, which each store keeps:
    No record's content stops the run or changes who else can be drawn: a record that cannot be
    decoded stays in the index and reads as None (hazard row 42). The bytes read for a sample are
    bounded (`max_bytes`, `most_row_bytes`), however large the record.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat

import numpy as np

Fields = Mapping[str, object]


class RecordStore(ABC):
    """Records by position, 0 <= index < len(store); any other index raises `IndexError`.

    A record is a privacy unit, unless `units` groups them. The methods with a body suit a format
    whose records have no fields and no unit of their own.
    """

    fingerprint: str
    """SHA-256, hex, of relative names, sizes, places of records and contents
    (`format.fingerprint`): equal for two copies of one data set, wherever they lie. PRIVATE: never
    published or logged."""

    place_hash: str
    """A hash of the format and of the files' absolute paths, sizes, times and inodes."""

    most_row_bytes: int | None = None
    """The size above which a record is undecodable, where a record is parsed as a whole; None where
    any part of it can be read by itself."""

    read_bytes: int = 1
    """The stored bytes that are read, at most, to reach one record among others."""

    notice: str | None = None
    """A line about the files for their owner, such as that they are slow to read."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the records, undecodable ones included."""

    @abstractmethod
    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        """Read the text of a record; None if it is undecodable. Never raises for its contents.

        A record is undecodable if its file cannot be read, if it is not UTF-8, or if its text or
        unit field is missing or of another type.

        Args:
            max_bytes: the most UTF-8 bytes to read, cut between characters; None reads to the end.
            start: a byte of the text; the first character that begins there or later is the first.
        """

    @abstractmethod
    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Count the bytes that records take in their files, int64, without reading them."""

    @abstractmethod
    def file_of(self, index: int) -> str:
        """Return the path of the file that a record lies in."""

    @abstractmethod
    def are_as_listed(self, indices: np.ndarray) -> bool:
        """Check that these records' files have the size, times and inode that were listed.

        Called after a read, to decide whether the result may be cached.
        """

    @abstractmethod
    def record_id(self, index: int) -> str:
        """Name a record, by its file's relative path and, if needed, its row from 1."""

    @abstractmethod
    def unit_names(self) -> Iterator[str | None]:
        """Yield each record's unit in index order; None where the record is a unit of its own."""

    def record_ids(self) -> Iterator[str]:
        """Yield all records' names in index order."""
        return map(self.record_id, range(len(self)))

    def is_decodable(self, index: int) -> bool:
        """Check that a whole record reads as text, however large it is."""
        return self.read(index) is not None

    def size(self, index: int) -> int:
        """Count the bytes of a record's text; 0 for one that is undecodable."""
        return len((self.read(index) or "").encode())

    def fields(self, index: int) -> Fields | None:
        """Read a whole record, by field; None if it is undecodable, if its unit is unknown, or if
        the format has no fields. Never raises for its contents."""
        return None

    def all_fields(self) -> Iterator[Fields | None]:
        """Yield each record, by field, in index order, of whatever unit; None as for `fields`."""
        return repeat(None, len(self))

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:  # noqa: B027
        """Set the test of whether a record belongs to the unit of a name, once units are indexed.

        A store that reads a unit's name from the record itself must then read as None any record
        that names another unit by now. Where the name is part of the file's path it cannot change.
        """


def text_of(value: object) -> str | None:
    """Return a value if it is text that UTF-8 can encode: JSON may hold half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeError:
        return None
    return value


def kind_of(value: object) -> str:
    """Name the type of a value in a field, with its article."""
    kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    kinds |= {dict: "an object", type(None): "null", str: "text with half a character"}
    if text_of(value) is not None:
        return "a text"
    return kinds.get(type(value), f"a {type(value).__name__}")
