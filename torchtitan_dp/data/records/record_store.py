"""The interface of a store of records.

A record is a privacy unit, unless `units` groups them. One that cannot be decoded stays in the
index and reads as `None`, so that its content changes nothing about who else can be drawn (hazard
row 42).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is undecodable: JSON is parsed whole, in up to 30 times its size."""


class RecordStore(Protocol):
    """Records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes, where records begin and of the contents'
    hash: equal for two copies of one data set, wherever they lie.
    PRIVATE: never published, never logged."""

    place_hash: str
    """Of format, absolute paths, sizes, times and inodes."""

    reads_whole: bool
    """Whether `read` parses a whole record, however small the part that is asked for."""

    def __len__(self) -> int:
        """Count the records, undecodable ones included."""
        ...

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        """Read the text of a record, or `None` if it is undecodable.

        It is if it is not UTF-8, not JSON, its text or unit field is missing or of another type, or
        its file is unreadable. This never raises for what a record holds.

        With `max_bytes`, at most that many UTF-8 bytes, cut between characters; with `start`, from
        the first character that begins at that byte or behind. A text file is not read (nor
        checked) elsewhere, a JSON line is parsed whole first.
        """
        ...

    def fields(self, index: int) -> Mapping[str, object] | None:
        """Read a whole record, by field; `None` if it is undecodable, or nobody
        knows whose it is, or its format has no fields. This never raises for what a record holds.
        """
        ...

    def is_decodable(self, index: int) -> bool:
        """Check that all of a record reads as text, however large it is."""
        ...

    def size(self, index: int) -> int:
        """Count the bytes of a record's text; 0 for one that is undecodable."""
        ...

    def are_as_listed(self, indices: np.ndarray) -> bool:
        """Compare these records' files with those that were listed, by size, times and inode.

        Asked after a read: whether the result may be cached.
        """
        ...

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Count the bytes that records take in their files, int64, reading nothing."""
        ...

    def all_fields(self) -> Iterator[Mapping[str, object] | None]:
        """Yield each record, by field, in index order; whose it is does not matter.

        `None`: it is undecodable, or its format has no fields.
        """
        ...

    def unit_names(
        self, count: Callable[[Mapping[str, object] | None], None] | None = None
    ) -> Iterator[str | None]:
        """Yield the name that `unit_field` gives each record, in index order; `None`: its own unit.

        Args:
            count: is called with what each record holds, as `all_fields` yields it, by a format
                that parses records for their units.
        """
        ...

    def file_of(self, index: int) -> str:
        """Return the path of the file that a record lies in."""
        ...

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:
        """Take over the test of whether a record is of the unit of that name, once all are known.

        A store that reads the unit's name together with the record reads as `None` what names
        another unit by now; where the name is in the record's identity, it cannot change.
        """
        ...

    def record_id(self, index: int) -> str:
        """Name a record: "<relative path>" (text) or "<relative path>:<line, from 1>" (jsonl)."""
        ...

    def record_ids(self) -> Iterator[str]:
        """Yield all identities in index order, much faster than `record_id` one by one."""
        ...


def text_of(value: object) -> str | None:
    """Return a text that can be written as UTF-8: JSON can spell half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8")
    except UnicodeError:
        return None
    return value
