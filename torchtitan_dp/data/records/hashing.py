"""One hash of the files' contents: each byte is read once, by a few threads, and never kept.

Files are cut into leaves of 2 MiB. The hash is BLAKE2b-256 of the leaves' BLAKE2b-256 digests, in
the order of the files' list; with the sizes, which determine the leaves, it stands for which
content lies under which name. It depends on neither the number of threads nor the place. BLAKE2b is
fast on any processor (SHA-256 needs special instructions), and `hashlib` releases the GIL.

Guarantee:
    Different contents have different hashes, unless somebody breaks BLAKE2b. A record's content
    decides neither whether the pass ends nor its messages: invalid UTF-8 is hashed like any text.
    A file that cannot be read has the digest 0 on every machine. The hash is PRIVATE: it confirms a
    guess of the records.
"""

import errno
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.files import Files

LEAF_BYTES = 2 * 2**20  # of the hash: another size is another hash
DIGEST_BYTES = 32
MOST_THREADS = 8
DIGEST_WORDS = DIGEST_BYTES // 8
_UNREADABLE = bytes(DIGEST_BYTES)
_TASK_LEAVES = 64  # of small files, at most
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process's own errors
_buffers = threading.local()

Scan = Callable[[np.ndarray], np.ndarray]
"""A search in the bytes (uint8) of a leaf, which returns int64 offsets."""


class _Leaf(NamedTuple):
    file_index: int
    begin: int  # in the file
    size: int


class _Found(NamedTuple):
    leaf: _Leaf
    digest: bytes
    stamp: tuple[int, ...] | None  # of the file; None if it cannot be read
    offsets: np.ndarray | None


def read_contents(
    files: Files,
    *,
    scan: Scan | None = None,
    take: Callable[[int, np.ndarray, bool], None] | None = None,
    skip_unreadable: bool = False,
) -> tuple[bytes, list[int]]:
    """Read all files once.

    A line on stderr reports progress, every 5 seconds after the first 5.

    Args:
        scan: called on each leaf, in any thread.
        take: called in this thread, in order, with a file's index, what `scan` found in its next
            leaf (offsets in the file) and whether it was the file's last leaf.
        skip_unreadable: whether a file that cannot be opened or read (rights, a file that is gone,
            a bad disk) has the digest 0 instead of stopping the pass.

    Returns:
        The digest, of DIGEST_BYTES, private; and which files could not be read, rising.

    Raises:
        ValueError: a file has another size than when it was listed, or changes meanwhile.
        OSError: a file cannot be read, unless `skip_unreadable`.
    """
    root = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"contents")
    unreadable: list[int] = []
    progress = Progress("reading training.dataset_path", int(files.starts[-1]))
    last: tuple[int, tuple[int, ...] | None] = -1, None

    def work(leaves: list[_Leaf]) -> list[_Found]:
        return [_read(files, leaf, scan, skip_unreadable) for leaf in leaves]

    for leaf, digest, stamp, offsets in _in_order(work, _tasks(files)):
        index = leaf.file_index
        if last[0] == index and None not in (last[1], stamp) and last[1] != stamp:
            raise _changed(files, index)
        last = index, stamp
        root.update(digest)
        if stamp is None and unreadable[-1:] != [index]:
            unreadable.append(index)
        if take is not None and offsets is not None:
            end = int(files.starts[index + 1] - files.starts[index])
            take(index, offsets, leaf.begin + leaf.size == end)
        progress.add(leaf.size)
    progress.end()
    return root.digest(), unreadable


def digest_hex(words: np.ndarray) -> str:
    """Convert a digest from int64 words to hex."""
    return words.astype("<i8").tobytes().hex()


def is_readable(files: Files, index: int) -> bool:
    """Check that a file can be opened."""
    try:
        with open(files.path(index), "rb"):
            return True
    except OSError:
        return False


def _tasks(files: Files) -> Iterator[list[_Leaf]]:
    """Yield all leaves in order, at most LEAF_BYTES at a time."""
    task: list[_Leaf] = []
    room = LEAF_BYTES
    for index in range(len(files)):
        size = int(files.starts[index + 1] - files.starts[index])
        # An empty file has a leaf too: it may be unreadable.
        for begin in range(0, max(size, 1), LEAF_BYTES):
            leaf = _Leaf(index, begin, min(LEAF_BYTES, size - begin))
            if leaf.size > room or len(task) == _TASK_LEAVES:
                yield task
                task, room = [], LEAF_BYTES
            task.append(leaf)
            room -= leaf.size
    if task:
        yield task


def _in_order(
    work: Callable[[list[_Leaf]], list[_Found]], tasks: Iterator[list[_Leaf]]
) -> Iterator[_Found]:
    """Yield the threads' results in the order of the tasks, of which only a few run ahead."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="contents")
    try:
        ahead: deque[Future[list[_Found]]] = deque(
            pool.submit(work, task) for task in islice(tasks, 2 * threads)
        )
        while ahead:
            found = ahead.popleft().result()
            ahead.extend(pool.submit(work, task) for task in islice(tasks, 1))
            yield from found
    finally:
        pool.shutdown(cancel_futures=True)


def _read(files: Files, leaf: _Leaf, scan: Scan | None, skip_unreadable: bool) -> _Found:
    path = files.path(leaf.file_index)
    try:
        with open(path, "rb", buffering=0) as file:
            stamp = _stamp(file.fileno())
            block = _buffer()[: leaf.size]
            file.seek(leaf.begin)
            done = 0
            while done < leaf.size and (got := file.readinto(block[done:])):
                done += got
            size = int(files.starts[leaf.file_index + 1] - files.starts[leaf.file_index])
            if done < leaf.size or stamp[0] != size or stamp != _stamp(file.fileno()):
                raise _changed(files, leaf.file_index)
    except OSError as error:
        if not skip_unreadable or error.errno in _OURS:
            raise
        return _Found(leaf, _UNREADABLE, None, None)
    digest = hashlib.blake2b(block, digest_size=DIGEST_BYTES, person=b"leaf").digest()
    offsets = None if scan is None else leaf.begin + scan(np.frombuffer(block, np.uint8))
    return _Found(leaf, digest, stamp, offsets)


def _buffer() -> memoryview:
    """Return this thread's own buffer."""
    if not hasattr(_buffers, "block"):
        _buffers.block = memoryview(bytearray(LEAF_BYTES))
    block: memoryview = _buffers.block
    return block


def _stamp(handle: int) -> tuple[int, ...]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _changed(files: Files, index: int) -> ValueError:
    path = files.path(index)
    return ValueError(
        f"training.dataset_path: {path!r} changed or shrank while it was read: records must stay "
        "as they are; start again when nobody writes to them"
    )
