"""How much of this machine's memory a process may still take (Linux).

It is the least of what the kernel has available (`MemAvailable`) and of what each cgroup around
this process leaves, in both versions of cgroups: a scheduler's job and a container have their
limits there, and the limits of all ancestors apply. Memory that only caches files counts as free,
as in `MemAvailable`: it is dropped when memory is needed. For ancestors that a container does not
see, version 1 reports the limit; version 2 does not.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return how many bytes this process may still take; None if it is unknown.

    Args:
        proc: where the kernel's files are.
    """
    return min([*_kernels(proc), *_cgroups(proc)], default=None)


def _kernels(proc: Path) -> Iterator[int]:
    """Yield the kernel's `MemAvailable`, in bytes."""
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroups(proc: Path) -> Iterator[int]:
    """Yield what each cgroup around this process leaves, in bytes."""
    own = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.partition(" ")[0]
        if kind not in own or len(fields) < 5:
            continue
        root, mount = map(_unescaped, fields[3:5])  # other controllers' have none of these files
        for folder in _ancestors(Path(mount), os.path.relpath(own[kind], root)):
            yield from _left_by_2(folder) if kind == "cgroup2" else _left_by_1(folder)


def _ancestors(mount: Path, below: str) -> Iterator[Path]:
    """Yield the folder `below` a mount and all above it, to the mount; that alone if it is not
    below."""
    parts = Path(below).parts
    if ".." in parts:
        parts = ()
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _left_by_2(folder: Path) -> Iterator[int]:
    """Yield what the limits of a cgroup of version 2 leave; above `high` its processes crawl."""
    cached = _numbers(folder / "memory.stat", "inactive_file", "active_file")
    held = sum(_numbers(folder / "memory.current")) - sum(cached)
    for name in ("memory.max", "memory.high"):
        yield from (max(limit - held, 0) for limit in _numbers(folder / name))  # none for "max"


def _left_by_1(folder: Path) -> Iterator[int]:
    """Yield what the limits of a cgroup of version 1 and of those above it leave."""
    stat = folder / "memory.stat"
    cached = _numbers(stat, "total_inactive_file", "total_active_file")
    held = sum(_numbers(folder / "memory.usage_in_bytes")) - sum(cached)
    limits = _numbers(folder / "memory.limit_in_bytes")
    for limit in (*limits, *_numbers(stat, "hierarchical_memory_limit")):
        yield max(limit - held, 0)


def _numbers(path: Path, *names: str) -> list[int]:
    """Return the number that a file holds, or those of `names` in a file of names and numbers."""
    found = []
    for line in _lines(path):
        *name, number = line.split() or [""]
        if name == [] if not names else name and name[0] in names:
            with contextlib.suppress(ValueError):
                found.append(int(number))
    return found


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    """Undo the escapes of blanks in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
