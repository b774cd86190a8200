"""The files that a path names: relative to a root, sorted, each file once.

A name is a file, also where several have one inode: tools that keep equal contents once (the hub's
cache, git-annex) link them, and what counts must not depend on what records hold. A link to another
file below the root is left out, since it repeats that one.
"""

import fnmatch
import glob
import heapq
import importlib.util
import json
import os
import struct
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Fields = Mapping[str, object]  # of a row
Columns = list[tuple[str, Any]]  # names and types, which all rows of a file have
MOST_ROW_BYTES = 64 * 2**20  # that are read of a row, of each column, decoded
BROKEN = b""  # a value that cannot be read: neither a text nor a list
MOST_ITEMS = 256  # that are read of a list: messages of a chat
PYTHON_STDLIB = "python-stdlib"  # as a path: the source files of the running Python's library
PYTHON_PACKAGES = "python-packages"  # those of packages that every installation has
_PACKAGES = ("transformers", "huggingface_hub", "datasets")
_SIZES = range(300, 32_769)  # bytes: neither an empty __init__.py, nor what takes minutes to read
NAMED = (PYTHON_STDLIB, PYTHON_PACKAGES)
_MISSING = "training.dataset_path = {!r} does not exist: give a file, a folder or a glob"


class Files(NamedTuple):
    """Files below a root."""

    root: str
    names: list[str]  # below the root
    sizes: list[int]  # bytes
    stamps: list[bytes]  # each file's size, times, and inode, since times can be set
    passed: Sequence[str] = ()  # names of files that are there and are not among these

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.root, name) for name in self.names]


def list_files(root: str, names: Iterable[str], passed: Iterable[str] = ()) -> Files:
    """List files as they are now."""
    kept = list(names)
    found = [os.stat(os.path.join(root, name)) for name in kept]
    # By its real path: to point a link at the root elsewhere moves no open run to other files.
    sizes = [status.st_size for status in found]
    return Files(os.path.realpath(root), kept, sizes, list(map(stamp, found)), tuple(passed))


def stamp(s: os.stat_result) -> bytes:
    """Return a file's size, times and inode."""
    return struct.pack("=qqqQQ", s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)


def require_folder(assets: str) -> None:
    """Refuse, by ValueError in one line, a model's folder that is not there."""
    if assets and not os.path.isdir(assets):
        raise ValueError(
            f"model.hf_assets_path = {assets!r}: no such folder; name the model's (one without "
            "tokenizer.json reads text as bytes)"
        )


def require_records(path: str) -> None:
    """Refuse, by ValueError in one line, a path that cannot name a file."""
    full = os.path.abspath(os.path.expanduser(path))
    is_there = os.path.exists(full) or next(glob.iglob(full, recursive=True), None)
    if path and path not in NAMED and not is_there:
        raise ValueError(_MISSING.format(path))


def locate(
    path: str, below: Sequence[str] = ("**",), *, has_named: bool = True
) -> tuple[str, list[str], list[str]]:
    """Find the files that a path names (a file, a glob, a folder's files that match a pattern of
    `below` or, with `has_named`, installed sources): a root, their sorted names below it, and the
    names of the others in a folder; ValueError, one line, if there is no such path."""
    if has_named and path == PYTHON_STDLIB:
        root = sysconfig.get_path("stdlib")
        return root, _walk(root, ("**/*.py",), skipped=("site-packages", "dist-packages"))[0], []
    if has_named and path == PYTHON_PACKAGES:
        origin = getattr(importlib.util.find_spec(_PACKAGES[0]), "origin", None)
        root = os.path.dirname(os.path.dirname(str(origin)))
        names, _ = _walk(root, [f"{name}/**/*.py" for name in _PACKAGES])
        return root, [n for n in names if os.path.getsize(os.path.join(root, n)) in _SIZES], []
    full = os.path.abspath(os.path.expanduser(path)) if path else ""
    if os.path.isfile(full):
        return os.path.dirname(full), [os.path.basename(full)], []
    if os.path.isdir(full):
        return full, *_walk(full, below)
    parts = full.split("/")
    magic = next((i for i, part in enumerate(parts) if glob.has_magic(part)), None)
    root = "/".join(parts[:magic]) or "/"
    if magic is None or not os.path.isdir(root):
        raise ValueError(_MISSING.format(path))
    return root, _walk(root, ["/".join(parts[magic:])])[0], []


def together(found: Sequence[tuple[str, list[str], list[str]]]) -> tuple[str, list[str], list[str]]:
    """Join what several paths name (`locate`) below the root of all, each file once."""
    if len(found) == 1:
        return found[0]
    roots = [os.path.realpath(one) for one, _, _ in found]
    root = os.path.commonpath(roots)

    def below(place: int) -> list[str]:
        each = zip(roots, found, strict=True)
        paths = [os.path.join(real, name) for real, one in each for name in one[place]]
        every = {_file(path, roots): path for path in paths}
        return [os.path.relpath(path, root) for path in every.values()]

    return root, below(1), below(2)


def saved_files(path: str) -> tuple[str, list[str], list[str]]:
    """Find the files that `datasets.Dataset.save_to_disk` wrote: those that `state.json` names, in
    that order, and other data-*.arrow, such as those of an earlier save; ValueError, one line."""
    root = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(state := os.path.join(root, "state.json")):
        raise ValueError(
            f"training.dataset_path = {path!r} is no folder of datasets.Dataset.save_to_disk (no "
            "state.json): name the folder of one split, or set training.dataset = 'arrow'"
        )
    try:
        with open(state, encoding="utf-8") as file:
            saved = json.load(file)
        names = [os.path.normpath(entry["filename"]) for entry in saved["_data_files"]]
        selects = bool(saved.get("_indices_data_files"))
        problem = "selects rows (flatten_indices() first)" if selects else ""
        for name in names:
            os.stat(os.path.join(root, name))
        real_root = os.path.realpath(root)
        if len({_file(os.path.join(real_root, name), [real_root]) for name in names}) < len(names):
            problem = "names a file twice"
    except FileNotFoundError as error:
        problem = f"names {error.filename}, which is missing"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"lists no files as datasets does ({type(error).__name__}: {error})"
    if problem:
        raise ValueError(f"training.dataset_path = {path!r}: state.json {problem}; save it again")
    return root, names, sorted(set(fnmatch.filter(os.listdir(root), "data-*.arrow")) - {*names})


def _walk(
    root: str, patterns: Sequence[str], skipped: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """List names below `root` that match, sorted by their bytes, and those that do not. Files are
    met by their own names first, then by links, the first of them: lest a link put a file into
    another unit."""
    ways = [pattern.split("/") for pattern in patterns]
    waiting: list[tuple[bool, bytes]] = [(False, b"")]  # whether by a link, and the folder's name
    entered: set[tuple[int, int]] = set()  # devices and inodes
    names: dict[str, tuple[bool, bytes]] = {}  # of each file, its best one
    real_root = os.path.realpath(root)
    passed: list[str] = []
    while waiting:
        is_linked, folder = heapq.heappop(waiting)
        path = os.path.join(os.fsencode(root), folder)
        status = os.stat(path)
        if (identity := (status.st_dev, status.st_ino)) in entered:
            continue
        entered.add(identity)
        for entry in os.scandir(path):
            name, below = os.fsdecode(entry.name), os.path.join(folder, entry.name)
            if name.startswith(".") or name.endswith(".pyc") or name in ("__pycache__", *skipped):
                continue
            parts = os.fsdecode(below).split("/")
            ranked = is_linked or entry.is_symlink(), below
            if os.path.isdir(entry.path):  # false for a link that leads nowhere
                # A match can lie in it: a beginning of a pattern matches it.
                begun = (way[:n] for way in ways for n in range(1, len(way) + (way[-1] == "**")))
                if any(_matches(parts, beginning) for beginning in begun):
                    heapq.heappush(waiting, ranked)
            elif os.path.isfile(entry.path):
                if any(_matches(parts, way) for way in ways):
                    of = os.path.join(real_root, os.fsdecode(below))
                    of = _file(of, [real_root]) if ranked[0] else of
                    names[of] = min(names.get(of, ranked), ranked)
                else:
                    passed.append(os.fsdecode(below))
    return [os.fsdecode(name) for name in sorted(name for _, name in names.values())], passed


def _file(path: str, roots: Sequence[str]) -> str:
    """Return where a file is, if below one of these real paths, and else its name."""
    real = os.path.realpath(path)
    return real if any(real.startswith(os.path.join(root, "")) for root in roots) else path


def _matches(parts: list[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        rest = patterns[1:]
        return not rest or any(_matches(parts[i:], rest) for i in range(len(parts) + 1))
    is_first = bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0])
    return is_first and _matches(parts[1:], patterns[1:])
