"""What one streaming pass over the files found, kept on disk and never trusted: where lines begin.

A saved index is found again while the files' absolute paths, sizes, times and inodes stay the
same, and is checked whole before it is used. It is private: it tells how long the records are.
"""

import contextlib
import os
import tempfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from torchtitan_dp.data.files import Files

BLOCK_BYTES = 16 * 2**20
INDEX_VERSION = "lines-2"  # of the format and of the name

WriteWords = Callable[[np.ndarray], None]


def writable_folder(folder: str | None) -> str:
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


def line_bounds(files: Files, folder: str) -> np.ndarray:
    """Where lines begin and end, (records + 1,) int64, as if all files lay one after the other."""
    return cached_words(
        os.path.join(folder, f"{INDEX_VERSION}-{files.place_hash}.npy"),
        lambda write: _write_bounds(write, files),
        lambda bounds: bounds[0] == 0 and bounds[-1] == files.starts[-1],
    )


def cached_words(
    path: str, build: Callable[[WriteWords], None], fits: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """What `build` writes, int64, memory-mapped; taken from `path` if it is there and whole.

    Args:
        build: is handed a function that appends int64 values, any number of times.
        fits: whether what was read back can be what is wanted; may raise.
    """
    words = _load_words(path, fits)
    if words is None:
        # Whoever finishes last wins, with the same content; readers keep the file they mapped.
        _replace(path, lambda file: _write_words(file, build))
        words = _load_words(path, fits)
    if words is None:
        raise ValueError(f"training.dataset_path: its index {path!r} cannot be read back")
    return words


def _load_words(path: str, fits: Callable[[np.ndarray], bool]) -> np.ndarray | None:
    """The saved values; `None` if there are none or they are damaged in any way."""
    try:
        saved = np.load(path, mmap_mode="r")
        words, checksum = saved[:-1], int(saved[-1])
        is_whole = saved.dtype == np.int64 and zlib.crc32(words.data) == checksum
        return words if is_whole and fits(words) else None
    except Exception:  # numpy raises half a dozen kinds for a damaged file
        return None


def _write_words(output: BinaryIO, build: Callable[[WriteWords], None]) -> None:
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

    build(write)
    write(np.array([checksum]))
    output.seek(0)
    assert write_header(count) == header_bytes


def _write_bounds(write: WriteWords, files: Files) -> None:
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
