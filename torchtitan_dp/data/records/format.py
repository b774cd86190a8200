"""The facts of a file format, and the base of those whose rows have named fields.

A new format is a file beside `jsonl`, with a subclass of `RecordStore` or `FieldRecords` and a
`Format`, and a line in `formats.FORMATS`. No other code depends on a format.
"""

import codecs
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.store import Fields, RecordStore, text_of

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # all bytes of a UTF-8 character but its first


@dataclass(frozen=True)
class Format:
    """The facts of one value of `training.dataset`."""

    open: Callable[..., RecordStore]
    """Opens the records of `files: Files`, such as a store's class. It takes `text_field: str`,
    `unit_field: str | None` and `index_folder: str` (`index`) and, by name, `keys`: all fields that
    the run reads, with the configuration's key of each."""

    below: tuple[str, ...]
    """The pattern of the files to take from a folder, one path component per item."""

    row: str
    """A word for the part of a file that holds one record."""

    found_in: str
    """A phrase for what a path without records lacks."""

    record: str
    """A phrase for one record, for a release card."""

    content: str
    """A noun for what a record must be."""

    explain: Callable[[str, str], str]
    """Describes a file none of whose records are that, with a remedy, for an error: by its path and
    the text's field."""

    named_by_position: bool
    """Whether a record's name is its number, so that one more record renames others. What depends
    on names, such as being held out, then depends on other records."""

    fields: str | None = None
    """A phrase for a record's named fields, of which one is its text and another may name its unit;
    None if a record has none. Then the only unit is the folder that a file lies in."""

    has_stdlib: bool = False
    """Whether "python-stdlib" stands for the running Python's own source files."""


# First bytes, the format that they show, and a remedy.
_FOREIGN = (
    (b"PAR1", "Parquet", "set training.dataset = 'parquet'"),
    (b"\x1f\x8b", "gzip", "unpack it: gunzip -c '{name}' > '{stem}{ending}'"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it: zstd -dc '{name}' > '{stem}{ending}'"),
    (b"%PDF", "PDF", "extract its text: pdftotext '{name}' '{stem}.txt'"),
    (b"PK\x03\x04", "a zip archive or an Office document", "extract its text"),
    (b"\xd0\xcf\x11\xe0", "an old Office document", "extract its text"),
    *(
        (
            mark,
            "UTF-16",
            f"convert it: iconv -f {codec} -t UTF-8 '{{name}}' > '{{stem}}_utf8{{ending}}'",
        )
        for mark, codec in (
            (b"\xff\xfe", "UTF-16"),
            (b"\xfe\xff", "UTF-16"),
            (b"{\0", "UTF-16LE"),
            (b"\0{", "UTF-16BE"),
        )
    ),
)


def foreign(path: str, ending: str) -> str | None:
    """Recognize a file of another format by its first bytes, and describe it with a remedy.

    Args:
        ending: of the name of a converted file.
    """
    name = PurePath(path).name
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        return f"{name!r} cannot be read ({error.strerror})"
    for magic, format, remedy in _FOREIGN:
        if head.startswith(magic):
            terms = {"name": name, "stem": name.partition(".")[0], "ending": ending}
            return f"{name!r} is {format}; {remedy.format(**terms)}"
    return None


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

    def unit_names(self) -> Iterator[str | None]:
        assert self._unit_field is not None
        for fields in self.all_fields():
            yield None if fields is None else unit_name(fields.get(self._unit_field))


def unit_name(value: object) -> str | None:
    """Return the name of a unit in a field; None if it names none."""
    # A bool is an int in Python, and 1.0 is not 1 in other JSON readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(value) or None
