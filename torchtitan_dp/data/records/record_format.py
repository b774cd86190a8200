"""What a format states of itself, and what stores share: decoding, and the fingerprint."""

import codecs
import hashlib
from dataclasses import dataclass
from typing import Protocol

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.record_store import RecordStore

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # of a character's first byte


class OpenStore(Protocol):
    """A function that opens the records of files."""

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
            unit_field: the field that names a record's unit, or None.
            index_folder: of the index.
        """
        ...


@dataclass(frozen=True)
class Format:
    """The facts of one value of `training.dataset` that the rest of the program needs."""

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
    """Whether a record has named fields: one is its text, another may name its unit. Without
    fields, the only unit is the folder that a file lies in."""

    named_by_position: bool
    """Whether a record is known by how many come before it, so that one record more gives others
    another name. What depends on names, as being held out does, then depends on other records."""


def checked(index: int, count: int) -> int:
    """Return a record's index if it is one of `count`, and raise IndexError if not."""
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def decode(data: bytes, max_bytes: int | None, start: int, codec: str = "utf-8-sig") -> str:
    """Decode the UTF-8 text of the first `max_bytes`, dropping a character that a cut splits."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    data = data[:max_bytes]
    if start > 0:  # no byte order mark here, but perhaps the end of a character
        codec, data = "utf-8", data[:3].lstrip(_CONTINUATIONS) + data[3:]
    return codecs.getincrementaldecoder(codec)().decode(data, final=not is_cut)


def fingerprint(format: str, files: Files, records: str, contents: str) -> str:
    """Hash a data set, wherever it lies: SHA-256, hex. PRIVATE.

    Args:
        records: which records there are, by their places.
        contents: the hash of what they hold; empty if it was not made.
    """
    text = f"{format}\0{files.listing_hash}\0{records}\0{contents}"
    return hashlib.sha256(text.encode()).hexdigest()
