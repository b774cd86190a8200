"""Map-style stores of private text records that keep offsets, never the records.

A record is a privacy unit, unless `units` groups them. One that cannot be decoded stays in the
index and reads as `None`, so that its content changes nothing about who else can be drawn (hazard
row 42).
"""

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, Protocol

import numpy as np

from torchtitan_dp.data.files import Files, list_files, locate
from torchtitan_dp.data.index import line_bounds, writable_folder

FOLDER = "folder"  # the unit field of text files
CHUNK = 2**16
MAX_LINE_BYTES = 64 * 2**20
"""A longer jsonl line is undecodable: JSON is parsed whole, in up to 30 times its size."""
_BLOCK_BYTES = 16 * 2**20
_CONTINUATIONS = bytes(range(0x80, 0xC0))  # of a character's first byte


class RecordStore(Protocol):
    """Records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes and where records begin: tells that a data set
    is the same one, wherever it lies. PRIVATE: never published, never logged."""

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

    The lines of jsonl files are found in one streaming pass, kept in `index_folder` (default:
    `$XDG_CACHE_HOME` or ~/.cache, torchtitan_dp/index) and found again while the files' absolute
    paths, sizes, times and inodes stay the same.

    Raises `ValueError`, one line, for an unknown format, an empty text field, a unit field that
    the format has not, a path that is missing or cannot be listed or holds no record, an index
    folder that cannot be written.
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
            TextRecords(files)
            if format == "text"
            else JsonlRecords(files, text_field, unit_field, folder)
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


class TextRecords:
    """One file, one record."""

    reads_whole = False

    def __init__(self, files: Files) -> None:
        self._files = files
        self.fingerprint = _fingerprint("text", files, str(len(files)))
        self.place_hash = f"text-{files.place_hash}"

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        path = os.path.join(self._files.root, self.record_id(index))
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            return _decode(data, max_bytes, start)
        except (OSError, UnicodeError):
            return None

    def is_decodable(self, index: int) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            with open(os.path.join(self._files.root, self.record_id(index)), "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    decoder.decode(block)
            decoder.decode(b"", final=True)
        except (OSError, UnicodeError):
            return False
        return True

    def size(self, index: int) -> int:
        return int(self.stored_bytes(np.array([_checked(index, len(self))]))[0])

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._files.starts[indices + 1] - self._files.starts[indices]

    def record_id(self, index: int) -> str:
        return self._files.name(_checked(index, len(self)))

    def record_ids(self) -> Iterator[str]:
        return map(self._files.name, range(len(self)))

    def unit_names(self) -> Iterator[str | None]:
        for name in self.record_ids():
            folder, slash, _ = os.fsencode(name).partition(b"/")
            # not as the locale reads it, on which the unit must not depend
            yield folder.decode("utf-8", "surrogateescape") if slash else None


class JsonlRecords:
    """One line, one record: a JSON object whose `text_field` is the text."""

    reads_whole = True

    is_of: Callable[[int, str], bool] | None = None
    """Whether a record is of the unit of that name, once `units` has found out."""

    def __init__(
        self, files: Files, text_field: str, unit_field: str | None, index_folder: str
    ) -> None:
        self._files, self._text_field, self._unit_field = files, text_field, unit_field
        self._bounds = line_bounds(files, index_folder)  # (records + 1,)
        self._first = np.searchsorted(self._bounds, files.starts)  # (files + 1,) first record
        lines = hashlib.sha256(self._bounds.data).hexdigest()  # in which order they are
        self.fingerprint = _fingerprint("jsonl", files, lines)
        self.place_hash = f"jsonl-{files.place_hash}"

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._first, _checked(index, len(self)), side="right")) - 1

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        text = self._text(index)
        if text is None:
            return None
        part = text[start:] if max_bytes is None else text[start : start + max_bytes + 1]
        return _decode(part, max_bytes, start, codec="utf-8")

    def is_decodable(self, index: int) -> bool:
        return self._text(index) is not None

    def size(self, index: int) -> int:
        return len(self._text(index) or b"")

    def _text(self, index: int) -> bytes | None:
        file_index = self._file_of(index)
        begin, end = int(self._bounds[index]), int(self._bounds[index + 1])
        try:
            with open(os.path.join(self._files.root, self._files.name(file_index)), "rb") as file:
                file.seek(begin - int(self._files.starts[file_index]))
                fields = _read_object(file, end - begin)
        except OSError:
            return None
        if self._unit_field is not None:
            name = _unit_name(fields.get(self._unit_field))
            if name is None or (self.is_of is not None and not self.is_of(index, name)):
                return None  # nobody knows whose it is, or somebody else's by now
        return _encode(fields.get(self._text_field))

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._bounds[indices + 1] - self._bounds[indices]

    def record_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.name(file_index)}:{index - int(self._first[file_index]) + 1}"

    def record_ids(self) -> Iterator[str]:
        for file_index in range(len(self._files)):
            name = self._files.name(file_index)
            for line in range(int(self._first[file_index + 1] - self._first[file_index])):
                yield f"{name}:{line + 1}"

    def unit_names(self) -> Iterator[str | None]:
        assert self._unit_field is not None
        for file_index in range(len(self._files)):
            first, last = (int(x) for x in self._first[file_index : file_index + 2])
            with open(os.path.join(self._files.root, self._files.name(file_index)), "rb") as file:
                for start in range(first, last, CHUNK):
                    stop = min(start + CHUNK, last)
                    for size in np.diff(self._bounds[start : stop + 1]).tolist():
                        yield _unit_name(_read_object(file, size).get(self._unit_field))


def _read_object(file: IO[bytes], size: int) -> dict[str, object]:
    """The JSON object on the next line, of so many bytes, which is passed in any case."""
    if size > MAX_LINE_BYTES:
        file.seek(size, os.SEEK_CUR)
        return {}
    return _parse(file.read(size), size)


def _parse(line: bytes, size: int) -> dict[str, object]:
    """The JSON object on a line; an empty one if it is none, or not `size` bytes long."""
    try:
        value = json.loads(line.decode("utf-8-sig")) if len(line) == size else None
    except (ValueError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


def _encode(value: object) -> bytes | None:
    """UTF-8; `None` for what is no text. JSON can spell half a surrogate pair, which is none."""
    try:
        return value.encode("utf-8") if isinstance(value, str) else None
    except UnicodeError:
        return None


def _unit_name(value: object) -> str | None:
    # A bool is an int to Python, and 1.0 is not 1 to JSON's other readers.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and _encode(value) else None


def _checked(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def _decode(data: bytes, max_bytes: int | None, start: int, codec: str = "utf-8-sig") -> str:
    """UTF-8 text of the first `max_bytes`; a character that a cut splits is dropped."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    data = data[:max_bytes]
    if start > 0:  # no byte order mark here, but perhaps the end of a character
        codec, data = "utf-8", data[:3].lstrip(_CONTINUATIONS) + data[3:]
    return codecs.getincrementaldecoder(codec)().decode(data, final=not is_cut)


def _fingerprint(format: str, files: Files, records: str) -> str:
    text = f"{format}\0{files.content_hash}\0{records}"
    return hashlib.sha256(text.encode()).hexdigest()
