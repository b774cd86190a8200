"""The store of tokens: records as they were tokenized once, on disk, private like the records; and
the privacy units, each of them one record, or what `data.unit_field` groups.

A store is a folder with `tokens` (the ids of all records; those that are no targets as their
bitwise complement), `arrays` (where each record ends, and its unit) and `facts.json` (what was
tokenized and how, with hashes). Its name follows from format, fields, tokenizer, template, and the
files' relative names and sizes, so that runs, nodes and copies share it.

Guarantee:
    - A store that is opened has the tokens that `prepare` makes of the files as they are: both are
      compared by hash, and once more where the size, times or inode of one changed since.
    - Folders are 0700 and files 0600. A store is written under another name and renamed, by one
      process at a time.
    - Every record belongs to exactly one unit (of several owners, by their names, to one or none:
      `owners`), so that a drawn unit brings in no records of others. One whose unit cannot be read
      (a row without the field, a file in no folder) is a unit of its own, named by its place, and
      reads as nothing: to drop it would change who else can be drawn.
    - Units are ordered by a 128-bit hash of their names, private like the names. Which units there
      are, and how many, is public with `zero_out`, and not with a public `privacy.sample_rate`.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import filelock
import numpy as np

from torchtitan_dp.base.process import private_opener, say, write_atomically
from torchtitan_dp.data.files import Files, stamp

HASH_BYTES = 16
_BLANK = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # categories of blanks, and of what nobody sees


@dataclass(frozen=True)
class Units:
    """Units by position, 0 <= unit < len(units). Their records lie in a row, unit by unit."""

    members: np.ndarray  # int64 (records in units,): the record at each place, rising in a unit
    starts: np.ndarray  # int64 (units + 1,): where each unit begins in it
    hashes: np.ndarray  # uint64 (units,): of each unit's name

    def __len__(self) -> int:
        return len(self.hashes)

    def places(self, unit: int) -> range:
        """Return the places of a unit's records in the row of all units' records."""
        if not 0 <= unit < len(self):
            raise IndexError(f"unit {unit} of {len(self)}")
        return range(int(self.starts[unit]), int(self.starts[unit + 1]))


def group(hashes_R2: np.ndarray) -> Units:
    """Group records by the hash of their unit's name, uint64 (records, 2), in its order."""
    members = np.lexsort((hashes_R2[:, 1], hashes_R2[:, 0]))  # stable: records rise within a unit
    ordered = hashes_R2[members]
    is_first = np.ones(len(members), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    return Units(members, np.append(starts, len(members)), ordered[starts, 0].copy())


def singles(hashes_R2: np.ndarray) -> Units:
    """Make a unit of each record, in order, from the hash of its name."""
    count = len(hashes_R2)
    return Units(np.arange(count), np.arange(count + 1), hashes_R2[:, 0].copy())


def split(hashes: np.ndarray, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split units into those to train on and to hold out, two sorted int64 arrays of positions.

    It depends on a unit's name and the fraction alone: units whose `hashes`, uint64 (units,), are
    below it are held out; a larger one holds out a superset. Raises ValueError if none is left.
    """
    mask = hashes < np.uint64(int(heldout_fraction * 2**64))
    if mask.all():
        raise ValueError(f"data.heldout_fraction = {heldout_fraction!r} holds all out: lower it")
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def folder_of(name: str) -> str | None:
    """Return the first folder of a file's relative name, in any locale; None if it has none."""
    folder, slash, _ = os.fsencode(name).partition(b"/")
    return folder.decode("utf-8", "surrogateescape") if slash else None


def record_hash(record_id: str, size: int = HASH_BYTES) -> bytes:
    """Hash a record that is a unit of its own, never to the hash of a named unit: the bytes of its
    file's name, since their text depends on the locale."""
    return hashlib.blake2b(os.fsencode(record_id), digest_size=size).digest()


def unit_hash(name: str) -> bytes:
    """Hash a named unit."""
    data = name.encode("utf-8", "surrogateescape")  # a folder's name need not be UTF-8
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=b"unit").digest()


@functools.lru_cache(maxsize=2**16)
def spelling_hash(name: str) -> bytes:
    """Hash a unit's name without what spellings of one name differ by: case, blanks, Unicode form,
    zeros before and behind a whole number."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    kept = "".join(c for c in folded if unicodedata.category(c) not in _BLANK)
    if number := re.fullmatch(r"(\d+)(\.0*)?", kept):  # in linear time
        kept = number[1].lstrip("0") or "0"
    return unit_hash(kept)[:8]


VERSION = 6  # of the form of the files and of how rows become ids: another is another store
TOKENS, ARRAYS, FACTS, COMPARED = "tokens", "arrays", "facts.json", "compared"
WAIT_S = 5.0  # for another process, before a line says so


@dataclass(frozen=True)
class Store:
    """The tokens of a data set, and its units. PRIVATE, with all that it returns."""

    folder: str
    ends: np.ndarray  # int64 (records,): where each record's ids end in `tokens`
    firsts: np.ndarray  # int64 (records,): the index of its first target after its first id
    reasons: np.ndarray  # uint8 (records,): 1 + the index in `facts["lacks"]`; 0 if it has ids
    units: Units
    facts: Mapping[str, Any]
    between: int = 0  # how many ids separate records; they are stored before each
    fingerprint: str = ""  # a hash of all tokens, and of the units that they are of
    contents: str = ""  # a hash of the contents of the files that were tokenized
    handle: int = -1  # of the open `tokens`: a store that takes this one's place has another file

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> np.ndarray:
        """Count the ids of each record: int64 (records,)."""
        return np.diff(self.ends, prepend=0)

    def length(self, record: int) -> int:
        return int(self.ends[record] - (self.ends[record - 1] if record > 0 else 0))

    def ids(self, record: int, start: int, count: int) -> np.ndarray:
        """Read up to `count` ids of a record from `start` on, int64; OSError if the disk failed."""
        length = self.length(record)
        begin, count = int(self.ends[record]) - length, max(min(count, length - start), 0)
        kind = np.dtype(self.facts["dtype"])
        at, size, data = (begin + start) * kind.itemsize, count * kind.itemsize, b""
        # Not mapped into memory: there a failing disk ends the process by a signal, without a line.
        while more := os.pread(self.handle, size - len(data), at + len(data)):
            data += more
        if len(data) < size:
            raise OSError(errno.EIO, f"{self.folder} lacks {size - len(data)} bytes")
        return np.frombuffer(data, dtype=kind).astype(np.int64)


def key_of(files: Files, terms: Mapping[str, object]) -> str:
    """Name the store of some files, tokenized on some terms."""
    hashed = hashlib.sha256(json.dumps([VERSION, dict(terms)], sort_keys=True).encode())
    for name, size in zip(files.names, files.sizes, strict=True):
        hashed.update(os.fsencode(name) + struct.pack("=xq", size))  # x: NUL ends a name
    return hashed.hexdigest()[:32]


def private_folder(data_store: str | None) -> str:
    """Create the folder of all stores, mode 0700: `data.store`, by default in $XDG_CACHE_HOME or
    ~/.cache. Raises ValueError, one line, if it cannot be written."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = os.path.join(cache, "torchtitan_dp", "prepared")
    folder = os.path.abspath(default if data_store is None else os.path.expanduser(data_store))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # the mode is of the last one alone
        os.listdir(folder)
        return folder
    except OSError as error:
        raise ValueError(
            f"data.store = {data_store!r}: the tokens of training.dataset_path cannot be written "
            f"to {folder!r} ({error.strerror}); name a folder that you can write"
        ) from error


def load(folder: str) -> Store | None:
    """Open a store, unless there is none, its arrays or facts are damaged, of another
    version, or somebody else's."""
    with contextlib.ExitStack() as stack:
        try:
            names = TOKENS, ARRAYS, FACTS
            tokens, arrays, described = (
                stack.enter_context(open(Path(folder, name), "rb")) for name in names
            )
            owners = {os.fstat(file.fileno()).st_uid for file in (tokens, arrays, described)}
            data, facts = arrays.read(), json.load(described)
            digest, is_ours = facts.pop("digest"), owners <= {os.geteuid(), 0}
            known = VERSION, _digest(facts), _hash([data])
            if not is_ours or (facts["version"], digest, facts["arrays"]) != known:
                return None
            records, units = facts["records"], facts["units"]
            places = np.cumsum([records, records, facts["members"], units + 1])
            whole = np.frombuffer(data, "<i8", int(places[-1]) + units)
            ends, firsts, members, starts, hashes = np.split(whole, places)
            reasons = np.frombuffer(data, np.uint8, offset=whole.nbytes)
            of = Units(members, starts, hashes.view("<u8"))
            terms = facts["between"], facts["tokens"], facts["contents"]
            handle = os.dup(tokens.fileno())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    store = Store(folder, ends, firsts, reasons, of, facts, *terms, handle)
    weakref.finalize(store, os.close, handle)
    return store


def pack(ends: np.ndarray, firsts: np.ndarray, reasons: np.ndarray, units: Units) -> bytes:
    """Write the arrays of a store as `load` reads them: 41 bytes for each record, about."""
    whole = [ends, firsts, units.members, units.starts, units.hashes.view(np.int64)]
    return np.concatenate(whole).astype("<i8").tobytes() + reasons.astype(np.uint8).tobytes()


def is_intact(store: Store) -> bool:
    """Compare all tokens with their hash."""
    with os.fdopen(os.dup(store.handle), "rb") as tokens:
        return _tokens_hash(store.facts, tokens) == store.fingerprint


def stamp_of(store: Store, files: Files) -> str:
    """Hash the sizes, times and inodes of a store's tokens and of the files: times of the kernel's
    too, which nobody sets."""
    return _hash([*files.stamps, stamp(os.fstat(store.handle)), _digest(store.facts).encode()])


def was_compared(store: Store, stamp: str) -> bool:
    """Return whether tokens and files with this stamp were compared by hash before."""
    try:
        return Path(store.folder, COMPARED).read_text() == stamp
    except OSError:
        return False


def note_compared(store: Store, stamp: str) -> None:
    """Note that they were; on a read-only disk nothing is noted."""
    with contextlib.suppress(OSError):
        write_atomically(os.path.join(store.folder, COMPARED), stamp.encode())


def write(folder: str, make: Callable[[str], tuple[bytes, dict[str, Any]]]) -> None:
    """Write a store as a whole or not at all, by the process with the `writing_lock`.

    `make` writes `tokens` into a folder, and returns the arrays (`pack`) and facts of the store.
    """
    temporary = Path(folder).with_name(f".{Path(folder).name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        os.mkdir(temporary, mode=0o700)
        data, facts = make(str(temporary))
        facts["arrays"] = _hash([data])
        with open(temporary / TOKENS, "rb") as tokens:
            facts["tokens"] = _tokens_hash(facts, tokens)
        described = json.dumps({**facts, "digest": _digest(facts)}, indent=1).encode()
        for name, content in ((TOKENS, b""), (ARRAYS, data), (FACTS, described)):
            with open(temporary / name, "ab", opener=private_opener) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if os.path.exists(folder):
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _hash(parts: Iterable[bytes], person: bytes = b"") -> str:
    hashed = hashlib.blake2b(digest_size=32, person=person)
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def _digest(facts: Mapping[str, Any]) -> str:
    return _hash([json.dumps(facts, sort_keys=True).encode()])


def _tokens_hash(facts: Mapping[str, Any], tokens: IO[bytes]) -> str:
    tokens.seek(0)
    return _hash([facts["arrays"].encode(), _hash(_blocks(tokens)).encode()], b"tokens")


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, 2**22), b"")


def file_hash(path: str, *, skip_unreadable: bool) -> str:
    """Hash a file's content; "" for one that cannot be read, if it is to be skipped."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _hash(_blocks(file), b"file")
    except PermissionError:
        if not skip_unreadable:
            raise
        return ""


def contents_hash(hashes: Iterable[str]) -> str:
    """Hash the hashes of files, in order, and no name. PRIVATE: it confirms a guess of records."""
    return _hash([" ".join(hashes).encode()], b"contents")


@contextlib.contextmanager
def writing_lock(folder: str) -> Iterator[None]:
    """Keep other processes from writing a store; the kernel unlocks it if this one dies."""
    lock = filelock.FileLock(f"{folder}.lock", mode=0o600)
    try:
        held = lock.acquire(timeout=WAIT_S)
    except filelock.Timeout:
        say("waiting for another process, which prepares the same training.dataset_path")
        held = lock.acquire()
    with held:
        yield


def mark_used(store: Store, run: str) -> None:
    """Note the folder of a run that trains on the store; on a read-only disk nothing is noted."""
    path = os.fsencode(os.path.realpath(run))
    with contextlib.suppress(OSError):
        os.makedirs(folder := os.path.join(store.folder, "runs"), mode=0o700, exist_ok=True)
        name = os.path.join(folder, hashlib.sha256(path).hexdigest()[:32])
        with open(name, "wb", opener=private_opener) as file:
            file.write(path)


def runs_of(store: Store) -> list[str]:
    """List the folders of the runs that trained on the store. PRIVATE."""
    return sorted(os.fsdecode(path.read_bytes()) for path in Path(store.folder).glob("runs/*"))


def runs_beside(run: str, data_store: str | None, own: Store | None = None) -> list[str]:
    """List the folders of other runs that trained on a store that this one did (or on its `own`),
    or on one with a unit of the same name. PRIVATE."""
    folder, path, found = private_folder(data_store), os.path.realpath(run), set[str]()
    used = {place.parent.parent for place in Path(folder).glob("*/runs/*")}  # others are not read
    stores = [one for place in sorted(used) if (one := load(str(place)))]
    mine = [one for one in stores if path in runs_of(one)] + ([own] if own else [])
    for one, other in itertools.product(mine, stores):
        named = all(store.facts["terms"]["unit_field"] is not None for store in (one, other))
        shares = named and np.isin(one.units.hashes, other.units.hashes).any()
        if shares or one.folder == other.folder:
            found.update(runs_of(other))
    return sorted(found - {path})


def names(folder: str) -> list[str]:
    """List the stores in the folder of all, and what killed processes left of some."""
    return sorted(name for name in os.listdir(folder) if re.fullmatch(r"\.?[0-9a-f]{32}", name))


def delete(folder: str) -> None:
    """Remove a store."""
    path = Path(folder)
    with writing_lock(str(path.with_name(path.name.lstrip(".")))):  # not while it is written
        shutil.rmtree(path)  # in any order: nobody opens a part of one
