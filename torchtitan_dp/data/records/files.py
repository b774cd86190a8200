"""Which files a path names, and a list of them in a few arrays.

Names are relative to a root and sorted; a file takes its name's bytes and 24 more, and no Python
objects.
"""

import array
import fnmatch
import glob
import hashlib
import os
import platform
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

PYTHON_STDLIB = "python-stdlib"  # as a path: the source files of the running Python's library


class Files(NamedTuple):
    root: str
    names: np.ndarray  # uint8: all relative names, one after the other
    name_starts: np.ndarray  # (files + 1,) int64 into names
    starts: np.ndarray  # (files + 1,) int64: where each begins if all lay one after the other
    listing_hash: str  # of relative names and sizes
    place_hash: str  # of absolute paths, sizes and times; of inodes, since times can be set
    stamps: np.ndarray  # (files, 8) uint8: each file's own hash of the latter

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name(self, index: int) -> str:
        start, end = self.name_starts[index : index + 2]
        return os.fsdecode(self.names[start:end].tobytes())

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.name(index))

    def is_as_listed(self, index: int) -> bool:
        """Check that a file is still the one that was listed, unchanged."""
        try:
            return _stamp(os.stat(self.path(index)))[:8] == self.stamps[index].tobytes()
        except OSError:
            return False


def _stamp(status: os.stat_result) -> bytes:
    times = status.st_mtime_ns, status.st_ctime_ns
    identity = status.st_ino, status.st_dev
    return hashlib.sha256(struct.pack("=qqqQQ", status.st_size, *times, *identity)).digest()


def list_files(root: str, names: Iterator[str]) -> Files:
    """List files with their sizes, and hashes that change whenever a file does.

    A file that several links name, symbolic or hard, is taken once, by the first name. Nothing is
    saved for a later run: telling that the list is unchanged takes the same walk.
    """
    # Two machines may share a cache, and each have an image with the same inodes and times.
    listing, place = hashlib.sha256(), hashlib.sha256(platform.node().encode())
    blob, ends, stamps, byte_end = bytearray(), array.array("q", (0, 0)), bytearray(), 0
    linked: set[tuple[int, int]] = set()  # files that may come again under another name
    real_root, folder_name, is_far = os.path.realpath(root), "", False
    for name in names:
        path, raw = os.path.join(root, name), os.fsencode(name)
        status = os.stat(path)
        if os.path.dirname(name) != folder_name:
            folder_name = os.path.dirname(name)
            expected = os.path.join(real_root, folder_name)
            is_far = os.path.realpath(expected) != expected
        if is_far or status.st_nlink > 1 or os.path.islink(path):
            if (status.st_dev, status.st_ino) in linked:
                continue
            linked.add((status.st_dev, status.st_ino))
        listing.update(raw + struct.pack("=xq", status.st_size))  # x is NUL: ends the name
        stamp = _stamp(status)
        place.update(os.fsencode(path) + b"\0" + stamp)
        stamps += stamp[:8]
        blob += raw
        byte_end += status.st_size
        ends.extend((len(blob), byte_end))
    spans = np.frombuffer(ends, dtype=np.int64).reshape(-1, 2)
    name_array = np.frombuffer(blob, dtype=np.uint8)
    stamp_array = np.frombuffer(stamps, dtype=np.uint8).reshape(-1, 8)
    hashes = listing.hexdigest(), place.hexdigest()
    starts = spans[:, 0].copy(), spans[:, 1].copy()
    # Who points a link at the root elsewhere moves no open run to other files.
    return Files(real_root, name_array, *starts, *hashes, stamp_array)


def locate(
    path: str, below: Sequence[str] = ("**",), *, has_stdlib: bool = True
) -> tuple[str, Iterator[str]]:
    """Find the files that a path names: the root that they lie below, and their names there.

    Args:
        path: a file, a folder, a glob, or `PYTHON_STDLIB`.
        below: the pattern of the files that are meant by a folder, one component an item.
        has_stdlib: whether `PYTHON_STDLIB` is a name, rather than a path like others.

    Raises:
        ValueError: one line, if there is no such place.
    """
    if has_stdlib and path == PYTHON_STDLIB:
        root = sysconfig.get_path("stdlib")
        return root, _walk(root, ["**", "*.py"], skipped=("site-packages", "dist-packages"))
    full = os.path.abspath(os.path.expanduser(path)) if path else ""
    if os.path.isfile(full):
        return os.path.dirname(full), iter([os.path.basename(full)])
    if os.path.isdir(full):
        return full, _walk(full, list(below))
    parts = full.split("/")
    magic = next((i for i, part in enumerate(parts) if glob.has_magic(part)), None)
    root = "/".join(parts[:magic]) or "/"
    if magic is None or not os.path.isdir(root):
        raise ValueError(
            f"training.dataset_path = {path!r} does not exist: give a file, a folder or a glob"
        )
    return root, _walk(root, parts[magic:])


def _walk(root: str, patterns: list[str], skipped: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the relative names of the files below `root` that match, sorted by their bytes. A
    pattern is for one component of a name.
    """

    def is_seen(parts: list[str]) -> bool:
        return not any(_is_hidden(part) or part in skipped for part in parts)

    def is_listed(parts: list[str]) -> bool:
        return is_seen(parts) and _matches(parts, patterns)

    def inside(path: str) -> list[str]:
        place = os.path.relpath(os.path.realpath(path), real_root)
        return [] if place == "." else place.split("/")

    real_root, entered = os.path.realpath(root), set()
    # Folders that a link leads into, and the place that they have in the walk without it, if any:
    # by that their files are listed, lest a link put them into another unit.
    linked: dict[str, list[str] | None] = {}
    pending = [""]  # the next one last; a folder ends in "/", which also sorts whole paths
    while pending:
        name = pending.pop()
        if name and not name.endswith("/"):
            yield name
            continue
        folder = os.path.join(root, name)
        status = os.stat(folder)
        place = linked.get(name)
        way_in = status.st_dev, status.st_ino, name in linked, place is not None
        if way_in in entered:  # a link back, or a second link
            continue
        entered.add(way_in)
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
                own = None if place is None else [*place, entry.name]
                if is_folder and _may_hold(parts, patterns):
                    children.append(child + "/")
                    if is_link or name in linked:
                        own = inside(entry.path) if own is None else own
                        linked[child + "/"] = own if is_seen(own) else None
                elif is_file and is_listed(parts):
                    if own is not None and is_listed(own):
                        continue  # listed without the link
                    if is_link and is_listed(inside(entry.path)):
                        continue  # listed under its own name
                    children.append(child)
        pending.extend(sorted(children, key=os.fsencode, reverse=True))  # alike in every locale


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
    """Check whether a match can lie in a folder: a glob does not walk folders it does not name."""
    for part, pattern in zip(parts, patterns, strict=False):
        if pattern == "**":
            return True
        if not fnmatch.fnmatchcase(part, pattern):
            return False
    return len(parts) < len(patterns)
