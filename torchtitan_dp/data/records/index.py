"""The index: results of a pass over all files, kept on disk (line bounds, contents' hash, units).

A saved index is used while the files' absolute paths, sizes, times and inodes stay the same, and is
checked as a whole first. It is private: it has the records' lengths, and its hash confirms guesses
of their contents. Of several processes that need the same index, one makes it and the others wait.
"""

import contextlib
import fcntl
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from torchtitan_dp.data.console import say

_POLL_S = 0.1
_FIRST_LINE_S = 5.0

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


def cached_words(
    path: str,
    build: Callable[[WriteWords], None],
    fits: Callable[[np.ndarray], bool],
    holds: Callable[[np.ndarray], bool] = lambda words: True,
) -> np.ndarray:
    """Memory-map the int64 values at `path`, after `build` wrote them unless they are there whole.

    One process builds at a time; those that waited for it use its result.

    Args:
        build: called with a function that appends int64 values, any number of times.
        fits: checks that values which were read back have the right form; may raise.
        holds: checks that values of an earlier run are still true.
    """

    def kept() -> np.ndarray | None:
        words = _load_words(path, fits)
        return words if words is not None and holds(words) else None

    if (words := kept()) is not None:
        return words
    with _alone(f"{path}.lock"):
        if (words := kept()) is not None:
            return words
        _replace(path, lambda file: _write_words(file, build))
        words = _load_words(path, fits)
    if words is None:
        raise ValueError(f"training.dataset_path: its index {path!r} cannot be read back")
    return words


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Lock a file, which is removed at the end; the kernel frees it if this process dies.

    On a file system without locks nobody waits, and several processes do the same work.
    """
    line_at = time.monotonic() + _FIRST_LINE_S
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            line_at = _wait_for(handle, line_at)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    break  # else its last holder removed it, and others lock another file
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(handle)


def _wait_for(handle: int, line_at: float) -> float:
    """Wait for a lock, and write one line at `line_at`; return when to write it in another wait."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return line_at
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return line_at
        if time.monotonic() > line_at:
            line_at = float("inf")
            say("waiting for another process, which reads the same files of training.dataset_path")


def _load_words(path: str, fits: Callable[[np.ndarray], bool]) -> np.ndarray | None:
    """Map the saved values; return None if they are missing or damaged in any way."""
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
