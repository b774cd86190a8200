"""Token ids are kept after the first time: one private file beside the index, for all later draws.

What is kept of a source (`samples`) is its head: at most seq_len + 1 ids. The file begins with a
table, an entry a source: where the ids lie behind it, how many they are, and a CRC-32 of all this.
A head is written first and its entry after it, so that an entry stands for a whole head or, by its
checksum, for none: what a crash, a full disk or another program left is made anew. Several
processes of a machine read and write one file; who writes holds a lock for as long as that takes.

Read and written by system calls and held in the kernel's page cache, in no process's own memory. It
is not mapped into one: a disk that fails, or a file that is cut short, would end the process there.

PRIVATE, like the records: it spells them out, and tells which were drawn, in the order of their
first draws. Its folder is its owner's alone, as is the file.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np

from torchtitan_dp.data.console import say

PREFIX = "tokens-1-"  # of the format
_ENTRY = struct.Struct("<qII")  # where the ids are, how many, and the checksum
_SOURCE = struct.Struct("<qqI")  # what the checksum is of, before the ids
_LOCK_S, _POLL_S = 1.0, 0.001


class TokenCache:
    """Keeps the ids of sources. Any thread may use it."""

    def __init__(
        self,
        folder: str,
        terms: tuple[object, ...],
        *,
        sources: int,
        limit: int,
        vocab_size: int,
        most_bytes: int,
    ) -> None:
        """
        Args:
            folder: of `index.writable_folder`.
            terms: all that ids depend on: records, tokenizer, what a source is. Others have another
                file.
            sources: how many there are.
            limit: ids of a source, at most.
            vocab_size: the largest id plus one.
            most_bytes: of all such files in the folder, this one included, about: those that were
                not opened for longest are removed. What does not fit is not kept.

        Raises:
            OSError: the file cannot be made or opened.
        """
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._limit, self._data_begin = limit, sources * _ENTRY.size
        name = hashlib.sha256(repr((terms, sources, limit, vocab_size)).encode()).hexdigest()
        self.path = os.path.join(folder, f"{PREFIX}{name}.bin")
        self._most_bytes = most_bytes - _make_room(folder, self.path, most_bytes // 2)
        _require_private(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        os.fchmod(self._file, 0o600)  # fails if it is another user's
        os.utime(self._file)
        self._lock = threading.Lock()
        self._writes = self._data_begin < self._most_bytes

    def close(self) -> None:
        """Close the file; the cache cannot be used any more."""
        os.close(self._file)

    def get(self, source: int) -> np.ndarray | None:
        """Read a source's ids, int64; `None` if they are not kept, or damaged in any way."""
        try:
            raw = os.pread(self._file, _ENTRY.size, source * _ENTRY.size)
            if len(raw) < _ENTRY.size:
                return None
            begin, count, checksum = _ENTRY.unpack(raw)
            if begin < self._data_begin or count > self._limit:
                return None
            data = os.pread(self._file, count * self._dtype.itemsize, begin)
        except OSError:
            return None
        if len(data) < count * self._dtype.itemsize:
            return None
        if _checksum(source, begin, count, data) != checksum:
            return None
        return np.frombuffer(data, dtype=self._dtype).astype(np.int64)

    def put(self, source: int, ids: np.ndarray) -> None:
        """Keep a source's ids, if there is room; whole, or not at all."""
        largest = np.iinfo(self._dtype).max
        if not self._writes or len(ids) > self._limit or ((ids < 0) | (ids > largest)).any():
            return
        data = ids.astype(self._dtype).tobytes()
        try:
            with self._alone() as is_mine:
                if not is_mine or self.get(source) is not None:
                    return
                begin = max(os.fstat(self._file).st_size, self._data_begin)
                if begin + len(data) > self._most_bytes:
                    self._stop("has reached its bound, data.token_cache_gib")
                    return
                _write_all(self._file, data, begin)
                entry = _ENTRY.pack(begin, len(ids), _checksum(source, begin, len(ids), data))
                _write_all(self._file, entry, source * _ENTRY.size)
        except OSError as error:
            self._stop(f"cannot be written ({error.strerror})")

    def _stop(self, why: str) -> None:
        self._writes = False
        say(f"data.token_cache: {why}; what it lacks is tokenized anew at each draw")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the file's lock, which the kernel frees when this process ends; tell whether it
        could be had in a second. On a file system without locks it always is, and what two write
        over each other is found damaged.
        """
        deadline = time.monotonic() + _LOCK_S
        with self._lock:
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield False
                        return
                    time.sleep(_POLL_S)
                except OSError:
                    break
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)


def _require_private(folder: str) -> None:
    """Refuse a folder that others may look into, or put files in.

    Raises:
        OSError: it is another user's, or its mode lets others in.
    """
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "its folder is not yours alone: chmod 700")


def _checksum(source: int, begin: int, count: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_SOURCE.pack(source, begin, count)))


def _write_all(file: int, data: bytes, begin: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, begin)
        view, begin = view[done:], begin + done


def _make_room(folder: str, path: str, room: int) -> int:
    """Remove other caches, those opened longest ago first, until they take at most `room` bytes;
    return how many they take. Who has one open goes on using it.
    """
    others = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.path != path:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    others.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in others)
    for _, size, other in sorted(others):
        if total <= room:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(other)
        total -= size
    return total
