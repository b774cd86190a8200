"""Map-style stores of private text records that keep offsets, never the records.

A record is a privacy unit. One that cannot be decoded stays in the index and reads as `None`, so
that its content changes nothing about who else can be drawn (hazard row 42).
"""

import codecs
import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import struct
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

PYTHON_STDLIB = "python-stdlib"  # as a path: the source files of the running Python's library
BLOCK_BYTES = 16 * 2**20
INDEX_VERSION = b"lines-1"


class RecordStore(Protocol):
    """Records by position, 0 <= index < len(store); an index outside raises `IndexError`."""

    fingerprint: str
    """SHA-256, hex, of the relative names, the sizes and the number of records: tells that a data
    set is the same one, wherever it lies. PRIVATE: never published, never logged."""

    def __len__(self) -> int:
        """The number of records, undecodable ones included."""
        ...

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        """The text of a record, or `None` if it is undecodable: not UTF-8, not JSON, its field
        missing or not a string, its file unreadable. Never raises for what a record holds.

        With `max_bytes`, a prefix of at most that many UTF-8 bytes, cut between characters; a
        text file is not read (nor checked) beyond it, a JSON line is parsed whole first.
        """
        ...

    def unit_id(self, index: int) -> str:
        """A stable identity: "<relative path>" (text) or "<relative path>:<line, from 1>"."""
        ...

    def unit_ids(self) -> Iterator[str]:
        """All identities in index order, much faster than `unit_id` one by one."""
        ...


def open_records(
    format: str, path: str, *, text_field: str = "text", index_folder: str | None = None
) -> RecordStore:
    """Open the records of `training.dataset` = `format` at `training.dataset_path` = `path`.

    `text`: one file, one record; `path` is a file, a glob, a folder (all files below it), or
    "python-stdlib". `jsonl`: one line, one record; `path` is a file, a glob, or a folder of
    *.jsonl. Hidden files, `__pycache__` and .pyc are skipped; symbolic links are followed, but no
    folder is entered twice, and a link to a file listed anyway is dropped (one file, one unit).

    The lines of jsonl files are found in one streaming pass, kept in `index_folder` (default:
    `$XDG_CACHE_HOME` or ~/.cache, torchtitan_dp/index) and found again while the files' absolute
    paths, sizes and modification times stay the same.

    Raises `ValueError`, one line, for an unknown format, an empty text field, a path that is
    missing or cannot be listed or holds no record, an index folder that cannot be written.
    """
    if format not in ("text", "jsonl"):
        planned = " is not built yet" if format in ("parquet", "hf") else " is not a known format"
        raise ValueError(f"training.dataset = {format!r}{planned}: use 'text' or 'jsonl'")
    if format == "jsonl" and not (isinstance(text_field, str) and text_field):
        raise ValueError(f"data.text_field = {text_field!r}: name the JSON field with the text")
    folder = _index_folder(index_folder)
    try:
        root, names = _locate(format, path)
        files = _list_files(root, names, folder)
        store = TextRecords(files) if format == "text" else JsonlRecords(files, text_field, folder)
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

    def __init__(self, files: "_Files") -> None:
        self._files = files
        self.fingerprint = _fingerprint("text", files, len(files))

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        path = os.path.join(self._files.root, self.unit_id(index))
        try:
            with open(path, "rb") as file:
                data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            return _decode(data, max_bytes)
        except (OSError, UnicodeError):
            return None

    def unit_id(self, index: int) -> str:
        return self._files.name(_checked(index, len(self)))

    def unit_ids(self) -> Iterator[str]:
        return map(self._files.name, range(len(self)))


class JsonlRecords:
    """One line, one record: a JSON object whose `text_field` is the text."""

    def __init__(self, files: "_Files", text_field: str, index_folder: str) -> None:
        self._files, self._text_field = files, text_field
        self._bounds = _line_bounds(files, index_folder)  # (records + 1,)
        self._first = np.searchsorted(self._bounds, files.starts)  # (files + 1,) first record
        self.fingerprint = _fingerprint("jsonl", files, len(self))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._first, _checked(index, len(self)), side="right")) - 1

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        file_index = self._file_of(index)
        start, end = int(self._bounds[index]), int(self._bounds[index + 1])
        try:
            with open(os.path.join(self._files.root, self._files.name(file_index)), "rb") as file:
                file.seek(start - int(self._files.starts[file_index]))
                line = file.read(end - start)
            if len(line) != end - start:
                return None
            value = json.loads(_decode(line, None))
            text = value.get(self._text_field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                return None
            # JSON can spell half a surrogate pair, which is not text: encoding tells.
            return _decode(text.encode("utf-8"), max_bytes, codec="utf-8")
        except (OSError, ValueError, RecursionError):
            return None

    def unit_id(self, index: int) -> str:
        file_index = self._file_of(index)
        return f"{self._files.name(file_index)}:{index - int(self._first[file_index]) + 1}"

    def unit_ids(self) -> Iterator[str]:
        for file_index in range(len(self._files)):
            name = self._files.name(file_index)
            for line in range(int(self._first[file_index + 1] - self._first[file_index])):
                yield f"{name}:{line + 1}"


def _checked(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def _decode(data: bytes, max_bytes: int | None, codec: str = "utf-8-sig") -> str:
    """UTF-8 text of the first `max_bytes`; a character that the cut splits is dropped."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    return codecs.getincrementaldecoder(codec)().decode(data[:max_bytes], final=not is_cut)


def _fingerprint(format: str, files: "_Files", records: int) -> str:
    text = f"{format}\0{files.content_hash}\0{records}"
    return hashlib.sha256(text.encode()).hexdigest()


# Which files: names relative to a root, in sorted order.


def _locate(format: str, path: str) -> tuple[str, Iterator[str]]:
    if format == "text" and path == PYTHON_STDLIB:
        root = sysconfig.get_path("stdlib")
        return root, _walk(root, ["**", "*.py"], skipped=("site-packages", "dist-packages"))
    full = os.path.abspath(os.path.expanduser(path)) if path else ""
    if os.path.isfile(full):
        return os.path.dirname(full), iter([os.path.basename(full)])
    if os.path.isdir(full):
        return full, _walk(full, ["**"] if format == "text" else ["**", "*.jsonl"])
    parts = full.split("/")
    magic = next((i for i, part in enumerate(parts) if glob.has_magic(part)), None)
    root = "/".join(parts[:magic]) or "/"
    if magic is None or not os.path.isdir(root):
        raise ValueError(
            f"training.dataset_path = {path!r} does not exist: give a file, a folder or a glob"
        )
    return root, _walk(root, parts[magic:])


def _walk(root: str, patterns: list[str], skipped: tuple[str, ...] = ()) -> Iterator[str]:
    """Relative names of the files below `root` that match, one component a pattern, sorted."""

    def is_listed(parts: list[str]) -> bool:
        return not any(_is_hidden(part) for part in parts) and _matches(parts, patterns)

    def inside(path: str) -> list[str]:
        return os.path.relpath(os.path.realpath(path), real_root).split("/")

    real_root, entered = os.path.realpath(root), set()
    pending = [""]  # the next one last; a folder ends in "/", which also sorts whole paths
    while pending:
        name = pending.pop()
        if name and not name.endswith("/"):
            yield name
            continue
        folder = os.path.join(root, name)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in entered:  # a link back, or a second way in
            continue
        entered.add((status.st_dev, status.st_ino))
        children = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_hidden(entry.name) or entry.name in skipped:
                    continue
                child, is_link = name + entry.name, entry.is_symlink()
                parts = child.split("/")
                # os.path, unlike the entry, does not raise for a link to itself
                is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
                is_file = os.path.isfile(entry.path) if is_link else entry.is_file()
                if is_folder and _may_hold(parts, patterns):
                    children.append(child + "/")
                elif is_file and is_listed(parts):
                    if is_link and is_listed(inside(entry.path)):
                        continue  # listed already, under its own name
                    children.append(child)
        pending.extend(sorted(children, reverse=True))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith(".pyc")


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        rest = patterns[1:]
        return not rest or any(_matches(parts[i:], rest) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], patterns[0])
        and _matches(parts[1:], patterns[1:])
    )


def _may_hold(parts: list[str], patterns: list[str]) -> bool:
    """Whether a folder can hold a match: keeps a glob from walking what it does not name."""
    for part, pattern in zip(parts, patterns, strict=False):
        if pattern == "**":
            return True
        if not fnmatch.fnmatchcase(part, pattern):
            return False
    return len(parts) < len(patterns)


# What is kept of them: memory-mapped, so that ten million names or lines cost no Python objects.


class _Files(NamedTuple):
    root: str
    names: np.ndarray  # uint8: all relative names, one after the other
    name_starts: np.ndarray  # (files + 1,) int64 into names
    starts: np.ndarray  # (files + 1,) int64: where each begins if all lay one after the other
    content_hash: str  # of relative names and sizes
    place_hash: str  # of absolute paths, sizes and modification times

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name(self, index: int) -> str:
        start, end = self.name_starts[index : index + 2]
        return os.fsdecode(self.names[start:end].tobytes())


def _list_files(root: str, names: Iterator[str], folder: str) -> _Files:
    """Stream the names and sizes into unnamed temporary files and map those.

    Nothing is saved for a later run: telling that the list is unchanged takes the same walk.
    """
    content, place = hashlib.sha256(), hashlib.sha256(INDEX_VERSION)
    name_end = byte_end = 0
    with tempfile.TemporaryFile(dir=folder) as blob, tempfile.TemporaryFile(dir=folder) as spans:
        spans.write(struct.pack("=qq", 0, 0))
        for name in names:
            path, raw = os.path.join(root, name), os.fsencode(name)
            status = os.stat(path)
            content.update(raw + struct.pack("=xq", status.st_size))  # x is NUL: ends the name
            place.update(
                os.fsencode(path) + struct.pack("=xqq", status.st_size, status.st_mtime_ns)
            )
            name_end, byte_end = name_end + len(raw), byte_end + status.st_size
            blob.write(raw)
            spans.write(struct.pack("=qq", name_end, byte_end))
        blob.write(b"\0")  # an empty file cannot be mapped
        blob.flush()
        spans.flush()
        span_array = np.memmap(spans, dtype=np.int64, mode="r").reshape(-1, 2)
        name_array = np.memmap(blob, dtype=np.uint8, mode="r")
    hashes = content.hexdigest(), place.hexdigest()
    return _Files(root, name_array, span_array[:, 0], span_array[:, 1], *hashes)


def _index_folder(folder: str | None) -> str:
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(cache, "torchtitan_dp", "index")
    try:
        os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(
            f"XDG_CACHE_HOME: the index of training.dataset_path cannot be written to {folder!r} "
            f"({error}): set it to a folder that you can write"
        ) from error


def _line_bounds(files: _Files, folder: str) -> np.ndarray:
    """Where lines begin and end, (records + 1,) int64, as if all files lay one after the other."""
    path = os.path.join(folder, f"{files.place_hash}.npy")
    bounds = _load_bounds(path, int(files.starts[-1]))
    if bounds is None:
        # Whoever finishes last wins, with the same content; readers keep the file they mapped.
        _replace(path, lambda file: _write_bounds(file, files))
        bounds = _load_bounds(path, int(files.starts[-1]))
    if bounds is None:
        raise ValueError(f"training.dataset_path: its index {path!r} cannot be read back")
    return bounds


def _load_bounds(path: str, total: int) -> np.ndarray | None:
    """The saved bounds; `None` if there are none or they are damaged in any way."""
    try:
        saved = np.load(path, mmap_mode="r")
        bounds, checksum = saved[:-1], int(saved[-1])
        is_whole = saved.dtype == np.int64 and zlib.crc32(bounds.data) == checksum
        return bounds if is_whole and bounds[0] == 0 and bounds[-1] == total else None
    except Exception:  # numpy raises half a dozen kinds for a damaged file
        return None


def _write_bounds(output: BinaryIO, files: _Files) -> None:
    def write_header(count: int) -> int:
        header = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(output, header)  # padded for any count
        return output.tell()

    header_bytes, count, checksum = write_header(0), 0, 0

    def write(values: np.ndarray) -> None:
        nonlocal count, checksum
        data = values.astype("<i8").tobytes()
        count, checksum = count + len(values), zlib.crc32(data, checksum)
        output.write(data)

    write(np.zeros(1))
    block = bytearray(BLOCK_BYTES)
    for file_index in range(len(files)):
        place, end = (int(x) for x in files.starts[file_index : file_index + 2])
        path, last = os.path.join(files.root, files.name(file_index)), 0x0A
        with open(path, "rb", buffering=0) as file:
            while place < end:
                got = file.readinto(memoryview(block)[: end - place])
                if not got:
                    raise ValueError(f"training.dataset_path: {path!r} shrank while it was read")
                found = np.flatnonzero(np.frombuffer(block, np.uint8, got) == 0x0A)
                write(place + 1 + found)
                place, last = place + got, block[got - 1]
        if last != 0x0A:
            write(np.array([end]))
    write(np.array([checksum]))
    output.seek(0)
    assert write_header(count) == header_bytes


def _replace(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Write a file as a whole or not at all, readable by its owner only."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
