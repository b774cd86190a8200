"""What a store of records offers, and what its format states of itself.

A record is a privacy unit, unless `units` groups them. One that cannot be decoded stays in the
index and reads as `None`, so that its content changes nothing about who else can be drawn (hazard
row 42).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchtitan_dp.data.files import Files


class RecordStore(Protocol):
    """Offers records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes, where records begin and of the contents'
    hash: tells that a data set is the same one, wherever it lies.
    PRIVATE: never published, never logged."""

    place_hash: str
    """Of format, absolute paths, sizes, times and inodes."""

    reads_whole: bool
    """Whether `read` goes through all that is stored of a record, whatever part is asked for."""

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
        """Read all that a record holds, by field, whole; `None` if it is undecodable, or nobody
        knows whose it is, or its format has no fields. This never raises for what a record holds.
        """
        ...

    def is_decodable(self, index: int) -> bool:
        """Tell whether all of a record reads as text, however large it is."""
        ...

    def size(self, index: int) -> int:
        """Give the bytes of a record's text; 0 for one that is undecodable."""
        ...

    def are_as_listed(self, indices: np.ndarray) -> bool:
        """Tell whether these records' files are those that were listed, by size, times and inode.

        Asked after a read, it tells whether what was read may be kept for a later run.
        """
        ...

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Tell how many bytes records take in their files, int64, and read nothing."""
        ...

    def all_fields(self) -> Iterator[Mapping[str, object] | None]:
        """Yield what each record holds, by field, in index order; whose it is does not matter.

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
        """Take the word on whether a record is of the unit of that name, once all are known.

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


class OpenStore(Protocol):
    """Opens the records that files hold."""

    def __call__(
        self,
        files: Files,
        text_field: str,
        unit_field: str | None,
        index_folder: str,
    ) -> RecordStore:
        """Open a store.

        Args:
            text_field: the field that holds the text, in a format whose records have fields.
            unit_field: the field that says whose a record is, or None.
            index_folder: where what was found is kept.
        """
        ...


@dataclass(frozen=True)
class Format:
    """States what the rest of the program must know of one value of `training.dataset`."""

    open: OpenStore

    below: tuple[str, ...]
    """The pattern of the files that are meant by a folder, one component an item."""

    has_stdlib: bool
    """Whether "python-stdlib" names the running Python's own sources."""

    row: str
    """What holds one record, in a word."""

    found_in: str
    """What a place without a record would need at least one of."""

    record: str
    """What one record is, in a release card."""

    has_fields: bool
    """Whether a record has named fields: one is its text, another may say whose it is. Without
    fields, the only unit is the folder that a file lies in."""

    named_by_position: bool
    """Whether a record is known by how many come before it, so that one record more gives others
    another name. What depends on names, as being held out does, then depends on other records."""
