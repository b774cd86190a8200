"""The one interface that a file format implements: its facts, and a store of its records.

A new format is a file beside `jsonl`, with a subclass of `RecordStore` and a `Format`, and a line
in `formats.FORMATS`. No other code depends on a format.

Guarantee, which each store keeps:
    Nothing that a record holds stops the run or changes who else can be drawn: a record that cannot
    be decoded stays in the index and reads as None (hazard row 42). What is read for a sample is
    bounded (`max_bytes`, `most_row_bytes`), however large the record.
"""

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np

from torchtitan_dp.data.records.files import Files

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # all bytes of a UTF-8 character but its first

Fields = Mapping[str, object]


class RecordStore(ABC):
    """Records by position, 0 <= index < len(store); any other index raises `IndexError`.

    A record is a privacy unit, unless `units` groups them. The methods with a body suit a format
    whose records have no fields and no unit of their own.
    """

    fingerprint: str
    """SHA-256, hex, of relative names, sizes, places of records and contents (`fingerprint` below):
    equal for two copies of one data set, wherever they lie. PRIVATE: never published or logged."""

    place_hash: str
    """A hash of the format and of the files' absolute paths, sizes, times and inodes."""

    most_row_bytes: int | None = None
    """The size above which a record is undecodable, where a record is parsed as a whole; None where
    any part of it can be read by itself."""

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
    def unit_names(
        self, count: Callable[[Fields | None], None] | None = None
    ) -> Iterator[str | None]:
        """Yield each record's unit in index order; None where the record is a unit of its own.

        Args:
            count: called with each record of `all_fields` by a format that parses them for this.
        """

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


class OpenStore(Protocol):
    """A function that opens the records of files, such as a store's class."""

    def __call__(
        self, files: Files, text_field: str, unit_field: str | None, index_folder: str
    ) -> RecordStore:
        """Open a store.

        Args:
            text_field: the field that holds the text, in a format whose records have fields.
            unit_field: the field that names a record's unit, or None.
            index_folder: the folder of the index (`index`).
        """
        ...


@dataclass(frozen=True)
class Format:
    """The facts of one value of `training.dataset`."""

    open: OpenStore

    below: tuple[str, ...]
    """The pattern of the files to take from a folder, one path component per item."""

    row: str
    """A word for the part of a file that holds one record."""

    found_in: str
    """A phrase for what a path without records lacks."""

    record: str
    """A phrase for one record, for a release card."""

    named_by_position: bool
    """Whether a record's name is its number, so that one more record renames others. What depends
    on names, such as being held out, then depends on other records."""

    fields: str | None = None
    """A phrase for a record's named fields, of which one is its text and another may name its unit;
    None if a record has none. Then the only unit is the folder that a file lies in."""

    content: str = ""
    """A phrase for what a row with fields must be."""

    explain: Callable[[str, str, int], str] | None = None
    """Explains, for an error, files in which no row has fields: by the path of the first one, the
    text's field, and the number of rows."""

    has_stdlib: bool = False
    """Whether "python-stdlib" stands for the running Python's own source files."""


def checked(index: int, count: int) -> int:
    """Return a record's index if it is one of `count`, else raise IndexError."""
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def decode(data: bytes, max_bytes: int | None, start: int, codec: str = "utf-8-sig") -> str:
    """Decode UTF-8 up to `max_bytes`, without the characters that `start` or the end cuts."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    data = data[:max_bytes]
    if start > 0:  # no byte order mark here, but perhaps the end of a character
        codec, data = "utf-8", data[:3].lstrip(_CONTINUATIONS) + data[3:]
    return codecs.getincrementaldecoder(codec)().decode(data, final=not is_cut)


def text_of(value: object) -> str | None:
    """Return a value if it is a text that UTF-8 can encode: JSON can spell half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeError:
        return None
    return value


def fingerprint(format: str, files: Files, records: str, contents: str) -> str:
    """Hash a data set, wherever it lies: SHA-256, hex. PRIVATE.

    Args:
        records: where the records are.
        contents: the hash of the files' contents.
    """
    text = f"{format}\0{files.listing_hash}\0{records}\0{contents}"
    return hashlib.sha256(text.encode()).hexdigest()
