"""The store of tokens: records as they were tokenized once, on disk, private like the records.

A store is a folder with four files: `tokens` (the ids of all records, one after the other; those
that are no targets as their bitwise complement, which is negative), `records.npz` (where each
begins, and its unit), `facts.json` (what was tokenized and how, and hashes of the other two), and
`seen`, names of machines and files that it was compared with. Its name follows from format, fields,
reading, tokenizer, template, and the files' relative names and sizes: not from the length of
samples or any absolute path, so that runs and nodes share it, and a copy serves as well.

Guarantee:
    A store that is opened has the tokens that `prepare` makes of the files as they are: contents of
    both are compared by hash when a machine opens it for the first time, and again once a size, a
    time or an inode of them differs. Another change that keeps all three is a failing disk's, which
    `tokens` is not checked against in later starts. Folders are 0700 and files 0600. It is written
    under another name and renamed, by one process at a time.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import filelock
import numpy as np

from torchtitan_dp.data.console import say
from torchtitan_dp.data.files import Files
from torchtitan_dp.data.units import Units

VERSION = 1  # of the form of the files and of how rows become ids: another is another store
TOKENS, RECORDS, FACTS, SEEN = "tokens", "records.npz", "facts.json", "seen"
_ARRAYS = {"ends": "<i8", "firsts": "<i8", "reasons": "|u1", "members": "<i8", "starts": "<i8"}
_ARRAYS |= {"hashes": "<u8"}
_BLOCK = 2**22
_FIRST_LINE_S = 5.0


@dataclass(frozen=True)
class Store:
    """The tokens of a data set, and its units. PRIVATE, with all that it returns."""

    folder: str
    ends: np.ndarray  # int64 (records,): where each record's ids end in `tokens`
    firsts: np.ndarray  # int64 (records,): the place of its first target among its own ids
    reasons: np.ndarray  # uint8 (records,): 1 + the index in `facts["lacks"]`; 0 if it has ids
    units: Units
    facts: Mapping[str, Any]
    handle: int  # of the open `tokens`: a store that takes this one's place has another file
    stamps: tuple[tuple[int, ...], ...] = ()  # size, times and inode of its files

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, and of the units that they are of; hex."""
        return str(self.facts["tokens"])

    @property
    def between(self) -> int:
        """The number of ids that stand before each record, between it and one before it."""
        return int(self.facts["between"])

    @property
    def contents(self) -> str:
        """A hash of the contents of the files that were tokenized, hex."""
        return str(self.facts["contents"])

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> np.ndarray:
        """Count the ids of each record, int64."""
        return np.diff(self.ends, prepend=0)

    def length(self, record: int) -> int:
        """Count the ids of a record."""
        return int(self.ends[record] - (self.ends[record - 1] if record > 0 else 0))

    def ids(self, record: int, start: int, count: int) -> np.ndarray:
        """Read `count` ids of a record from `start` on, int64, or as many as there are.

        Raises:
            OSError: the disk failed.
        """
        length = self.length(record)
        begin, count = int(self.ends[record]) - length, max(min(count, length - start), 0)
        kind = np.dtype(self.facts["dtype"])
        data = self._read((begin + start) * kind.itemsize, count * kind.itemsize)
        return np.frombuffer(data, dtype=kind).astype(np.int64)

    def _read(self, at: int, size: int) -> bytes:
        # Not mapped into memory: there a failing disk ends the process by a signal, without a line.
        data = os.pread(self.handle, size, at)
        while len(data) < size and (
            more := os.pread(self.handle, size - len(data), at + len(data))
        ):
            data += more
        if len(data) < size:
            raise OSError(errno.EIO, f"{self.folder} lacks {size - len(data)} bytes")
        return data


def key_of(files: Files, terms: Mapping[str, object]) -> str:
    """Name the store of some files, tokenized on some terms."""
    text = json.dumps([VERSION, files.listing_hash, dict(terms)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def private_folder(place: str | None) -> str:
    """Create the folder of all stores, of mode 0700, and return its path.

    Args:
        place: `data.store`; by default a folder in $XDG_CACHE_HOME, or ~/.cache.

    Raises:
        ValueError: one line; it cannot be written.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.abspath(
        os.path.join(cache, "torchtitan_dp", "prepared")
        if place is None
        else os.path.expanduser(place)
    )
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        os.listdir(folder)
        return folder
    except OSError as error:
        raise ValueError(
            f"data.store = {place!r}: the tokens of training.dataset_path cannot be written to "
            f"{folder!r} ({error.strerror}); name a folder that you can write"
        ) from error


def load(folder: str) -> Store | None:
    """Open a store, unless there is none, or it is damaged."""
    with contextlib.ExitStack() as stack:
        try:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, place)
            if os.fstat(place).st_uid not in (os.geteuid(), 0):
                return None  # planted by somebody else
            # All are of one store, if another takes its place meanwhile.
            tokens, records, facts_file = (
                stack.enter_context(
                    open(name, "rb", opener=functools.partial(os.open, dir_fd=place))
                )
                for name in (TOKENS, RECORDS, FACTS)
            )
            facts = json.load(facts_file)
            if facts.pop("digest") != _hash_of(facts):
                return None
            with np.load(records, allow_pickle=False) as arrays:
                ends, firsts, reasons, *grouped = (arrays[name] for name in _ARRAYS)
            status = [os.fstat(file.fileno()) for file in (tokens, records, facts_file)]
            handle = os.dup(tokens.fileno())
        except Exception:  # numpy and json raise half a dozen kinds for a damaged file
            return None
    stamps = tuple((s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in status)
    store = Store(folder, ends, firsts, reasons, Units(*grouped), facts, handle, stamps)
    weakref.finalize(store, os.close, handle)
    return store


def is_intact(store: Store) -> bool:
    """Compare the tokens with their hash, reading all of them."""
    units = store.units
    arrays = store.ends, store.firsts, store.reasons, units.members, units.starts, units.hashes
    with os.fdopen(os.dup(store.handle), "rb") as tokens:
        return _tokens_hash(arrays, tokens) == store.fingerprint


def write(folder: str, make: Callable[[str], tuple[dict[str, np.ndarray], dict[str, Any]]]) -> None:
    """Write a store as a whole or not at all.

    Args:
        make: writes `tokens` into a folder and returns the arrays and facts of the store.
    """
    beside = os.path.dirname(folder)
    for name in os.listdir(beside):  # of a process that was killed; the lock is this one's
        if name.startswith(f".{os.path.basename(folder)}."):
            shutil.rmtree(os.path.join(beside, name), ignore_errors=True)
    temporary = tempfile.mkdtemp(dir=beside, prefix=f".{os.path.basename(folder)}.")  # 0700
    try:
        arrays, facts = make(temporary)
        given = {name: arrays[name].astype(kind) for name, kind in _ARRAYS.items()}
        with open(os.path.join(temporary, RECORDS), "xb", opener=private) as file:
            np.savez(file, **given)  # type: ignore[arg-type]
        with open(os.path.join(temporary, TOKENS), "rb") as tokens:
            facts = {**facts, "tokens": _tokens_hash(given.values(), tokens)}
        with open(os.path.join(temporary, FACTS), "x", encoding="utf-8", opener=private) as text:
            json.dump({**facts, "digest": _hash_of(facts)}, text, indent=1)
        os.mkdir(os.path.join(temporary, SEEN), mode=0o700)
        for name in (TOKENS, RECORDS, FACTS):
            _sync(os.path.join(temporary, name))
        if os.path.exists(folder):
            shutil.rmtree(folder)
        os.rename(temporary, folder)
        _sync(beside)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def private(path: str, flags: int) -> int:
    """Open a file that only its owner can read: an `opener`."""
    return os.open(path, flags, 0o600)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash_of(facts: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).hexdigest()


def _tokens_hash(arrays: Iterable[np.ndarray], tokens: IO[bytes]) -> str:
    """Hash a store's arrays, in the order of `_ARRAYS`, and its tokens: BLAKE2b-256, hex."""
    hashed = hashlib.blake2b(digest_size=32, person=b"tokens")
    for values, kind in zip(arrays, _ARRAYS.values(), strict=True):
        hashed.update(values.astype(kind).tobytes())
    tokens.seek(0)
    while block := tokens.read(_BLOCK):
        hashed.update(block)
    return hashed.hexdigest()


def contents_hash(
    files: Files, *, skip_unreadable: bool, ended: threading.Event | None = None
) -> str:
    """Hash what the files have: BLAKE2b-256, hex. PRIVATE: it confirms a guess of the records.

    It depends on contents and their order, and on no name or place.

    Args:
        skip_unreadable: whether a file that cannot be read stands for one without content.
        ended: set where nobody waits for the result any more.
    """
    root = hashlib.blake2b(digest_size=32, person=b"contents")
    for index in range(len(files)):
        hashed = hashlib.blake2b(digest_size=32, person=b"file")
        try:
            with open(files.path(index), "rb", buffering=0) as file:
                while (block := file.read(_BLOCK)) and not (ended and ended.is_set()):
                    hashed.update(block)
            root.update(hashed.digest())
        except PermissionError:
            if not skip_unreadable:
                raise
            root.update(bytes(32))
    return root.hexdigest()


def _mark(store: Store, files: Files) -> str:
    """Name a file that stands for these files and this store, as they are on this machine."""
    name = hashlib.sha256(repr((files.place_hash, store.stamps)).encode()).hexdigest()
    return os.path.join(store.folder, SEEN, name)


def is_seen(store: Store, files: Files) -> bool:
    """Return whether this machine has compared the store with these files, as they are now."""
    return os.path.exists(_mark(store, files))


def mark_seen(store: Store, files: Files) -> None:
    """Note that the store was compared with these files; on a read-only disk nothing is noted."""
    with contextlib.suppress(OSError):
        os.close(os.open(_mark(store, files), os.O_CREAT | os.O_WRONLY, 0o600))


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Keep other processes from writing a store; the kernel lets them if this one dies."""
    lock = filelock.FileLock(f"{folder}.lock", mode=0o600)
    try:
        lock.acquire(timeout=_FIRST_LINE_S)
    except filelock.Timeout:
        say("waiting for another process, which prepares the same training.dataset_path")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def names(folder: str) -> list[str]:
    """List the stores in the folder of all, and what killed processes left of some."""
    whole = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.\w+")
    return sorted(name for name in os.listdir(folder) if whole.fullmatch(name))


def size_of(store: Store) -> int:
    """Return the bytes that a store takes."""
    return sum(os.stat(os.path.join(store.folder, name)).st_size for name in (TOKENS, RECORDS))


def delete(folder: str) -> None:
    """Remove a store."""
    parent, name = os.path.split(folder)
    key = name.lstrip(".").partition(".")[0]
    with alone(os.path.join(parent, key)):  # not while it is written
        gone = os.path.join(parent, f".{key}.gone")
        shutil.rmtree(gone, ignore_errors=True)  # of a call that was killed
        if os.path.exists(folder):
            os.rename(folder, gone)  # at once: nobody opens half of it
        shutil.rmtree(gone, ignore_errors=True)
