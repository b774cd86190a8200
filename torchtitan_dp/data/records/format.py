"""The facts of a file format, and functions that stores share.

A new format is a file beside `jsonl`, with a subclass of `RecordStore` and a `Format`, and a line
in `formats.FORMATS`. No other code depends on a format.
"""

import codecs
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.store import RecordStore

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # all bytes of a UTF-8 character but its first


class OpenStore(Protocol):
    """A function that opens the records of files, such as a store's class."""

    def __call__(
        self,
        files: Files,
        text_field: str,
        unit_field: str | None,
        index_folder: str,
        *,
        keys: Mapping[str, str],
    ) -> RecordStore:
        """Open a store.

        Args:
            text_field: the field that holds the text, in a format whose records have fields.
            unit_field: the field that names a record's unit, or None.
            index_folder: the folder of the index (`index`).
            keys: all fields that the run reads, with the configuration's key of each.
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


def fingerprint(format: str, files: Files, records: str, contents: str) -> str:
    """Hash a data set, wherever it lies: SHA-256, hex. PRIVATE.

    Args:
        records: where the records are.
        contents: the hash of the files' contents.
    """
    text = f"{format}\0{files.listing_hash}\0{records}\0{contents}"
    return hashlib.sha256(text.encode()).hexdigest()
