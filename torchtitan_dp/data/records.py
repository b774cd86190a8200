"""Map-style stores of private text records that keep offsets, never the records.

A record is a privacy unit, unless `units` groups them. One that cannot be decoded stays in the
index and reads as `None`, so that its content changes nothing about who else can be drawn (hazard
row 42).
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from torchtitan_dp.data.files import list_files, locate
from torchtitan_dp.data.index import writable_folder
from torchtitan_dp.data.jsonl_records import JsonlRecords
from torchtitan_dp.data.text_records import TextRecords

FOLDER = "folder"  # the unit field of text files


class RecordStore(Protocol):
    """Records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes, where records begin and, unless the store was
    opened without, the contents' hash: tells that a data set is the same one, wherever it lies.
    PRIVATE: never published, never logged."""

    place_hash: str
    """Of format, absolute paths, sizes, times and inodes."""

    reads_whole: bool
    """Whether `read` goes through all that is stored of a record, whatever part is asked for."""

    def __len__(self) -> int:
        """The number of records, undecodable ones included."""
        ...

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        """The text of a record, or `None` if it is undecodable: not UTF-8, not JSON, its text or
        unit field missing or of another type, its file unreadable. Never raises for what a record
        holds.

        With `max_bytes`, at most that many UTF-8 bytes, cut between characters; with `start`, from
        the first character that begins at that byte or behind. A text file is not read (nor
        checked) elsewhere, a JSON line is parsed whole first.
        """
        ...

    def is_decodable(self, index: int) -> bool:
        """Whether all of a record reads as text, however large it is."""
        ...

    def size(self, index: int) -> int:
        """The bytes of a record's text; 0 for one that is undecodable."""
        ...

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        """How much records take in their files, int64, like `indices`; nothing is read."""
        ...

    def unit_names(self) -> Iterator[str | None]:
        """Of all records in index order, what `unit_field` says; `None`: a unit of its own."""
        ...

    def record_id(self, index: int) -> str:
        """A stable identity: "<relative path>" (text) or "<relative path>:<line, from 1>"."""
        ...

    def record_ids(self) -> Iterator[str]:
        """All identities in index order, much faster than `record_id` one by one."""
        ...


def open_records(
    format: str,
    path: str,
    *,
    text_field: str = "text",
    unit_field: str | None = None,
    index_folder: str | None = None,
    contents: bool = True,
) -> RecordStore:
    """Open the records of `training.dataset` = `format` at `training.dataset_path` = `path`.

    `text`: one file, one record; `path` is a file, a glob, a folder (all files below it), or
    "python-stdlib". `jsonl`: one line, one record; `path` is a file, a glob, or a folder of
    *.jsonl. Hidden files, `__pycache__` and .pyc are skipped; symbolic links are followed, but no
    folder is entered twice by them, and a file that links (to it or to a folder above it) name more
    than once is listed once, by its own name if that is listed, else by the first; of hard links,
    by the first.

    `unit_field` says whose record one is (`units`). For `jsonl` it is a field that holds a string
    or a whole number; 7 and "7" are one unit, else names must be equal character by character. A
    line where it is missing, empty or something else is a unit of its own and reads as `None`. For
    `text` it can only be "folder": the first folder below `path` (for a glob: below its part
    without wildcards). A file that lies in no folder there is a unit of its own; it is read like
    the others.

    All files are read once: to find the lines of jsonl files and, with `contents`, to hash what
    files hold (`data.contents`), so that the fingerprint tells which content stands under which
    index. What was found is kept in `index_folder` (default: `$XDG_CACHE_HOME` or ~/.cache,
    torchtitan_dp/index) and found again while the files' absolute paths, sizes, times and inodes
    stay the same. A text file that cannot be read then (rights, a file that is gone) is a record
    that reads as nothing for as long as the store is open: it stops nothing, its digest is one
    public constant, and a rank that could read it would have another fingerprint.

    Raises `ValueError`, one line, for an unknown format, an empty text field, a unit field that
    the format has not, a path that is missing or cannot be listed or holds no record, a file that
    changes while it is read, an index folder that cannot be written.
    """
    if format not in ("text", "jsonl"):
        planned = " is not built yet" if format in ("parquet", "hf") else " is not a known format"
        raise ValueError(f"training.dataset = {format!r}{planned}: use 'text' or 'jsonl'")
    if format == "jsonl" and not (isinstance(text_field, str) and text_field):
        raise ValueError(f"data.text_field = {text_field!r}: name the JSON field with the text")
    if format == "text" and unit_field not in (None, FOLDER):
        raise ValueError(
            f"data.unit_field = {unit_field!r}: text files have no fields; use '{FOLDER}' (the "
            "first folder below training.dataset_path), or remove it: one file, one unit"
        )
    if unit_field == "":
        raise ValueError("data.unit_field = '': name the JSON field of the unit, or remove it")
    folder = writable_folder(index_folder)
    try:
        root, names = locate(format, path)
        files = list_files(root, names, folder)
        store = (
            TextRecords(files, folder, contents=contents)
            if format == "text"
            else JsonlRecords(files, text_field, unit_field, folder, contents=contents)
        )
    except OSError as error:
        raise ValueError(
            f"training.dataset_path = {path!r} cannot be listed or indexed ({error}): check "
            f"its permissions and the space left in {folder!r}"
        ) from error
    if len(store) == 0:
        wanted = "file" if format == "text" else "line in a *.jsonl file"
        raise ValueError(
            f"training.dataset_path = {path!r} holds no record: it needs at least one {wanted} "
            "(a glob must match files, not folders; '**' matches any depth)"
        )
    return store
