"""One run a folder: its lock, workers that die with their launcher, no core dumps, whole files,
faults in one line, and the program's versions, with a warning of those not tested."""

import contextlib
import ctypes
import fcntl
import functools
import importlib.metadata
import logging
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

LOCK_FILE = ".lock"
FAULT_FILE = "fault.txt"
STOP_SIGNAL = signal.SIGUSR1
"""The signal from `launch` to each worker to save a checkpoint and end."""
PLANNED = "TORCHTITAN_DP_PLANNED"
"""Set in the environment of workers whose launcher has printed the plan."""
VERBOSE = "TORCHTITAN_DP_VERBOSE"
"""Set in the environment of a start that prints all that it knows, as `--verbose` does."""
STOPPED_FILE = "TORCHTITAN_DP_STOPPED_FILE"
"""The variable with the path of a file into which a worker that stops early writes, for its
launcher: the request may have reached another node's."""
RELEASES = {
    "Python": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "transformers": ("5.20", "5.23", "5.24"),  # their modules are the models
}
"""The tested ones. Each has a row in docs/install.md, made by `scripts/versions.py`."""
_PR_SET_PDEATHSIG = 1
_CORE_FILTER = "/proc/self/coredump_filter"


class Fault(SystemExit):
    """An error outside of this program, with its remedy, in one line: Python prints it and exits
    with code 1; torchrun's `record` keeps no traceback of it."""

    def __init__(self, message: str) -> None:
        super().__init__("error: " + " ".join(message.split()))


@contextlib.contextmanager
def as_faults(kind: type[Exception]) -> Iterator[None]:
    """Turn a user's mistake (`ValueError`), or what the operating system refused (`OSError`: space,
    rights), into a `Fault`."""
    try:
        yield
    except kind as error:
        refused = f"{type(error).__name__}: " if isinstance(error, OSError) else ""
        raise Fault(f"{refused}{error}") from error


@contextlib.contextmanager
def faults_kept(folder: str) -> Iterator[None]:
    """Keep the line of a `Fault` in the run's folder until its next start, for its status."""
    path = os.path.join(folder, FAULT_FILE)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    try:
        yield
    except Fault as fault:
        with contextlib.suppress(OSError):  # a full disk may be the fault
            write_atomically(path, f"{fault}\n".encode())
        raise


def require_environment() -> None:
    """Refuse, with code 2, an interpreter that skips assertions."""
    if not __debug__:
        print(
            "error: assertions guard privacy here: run Python without -O, and unset PYTHONOPTIMIZE",
            file=sys.stderr,
        )
        raise SystemExit(2)


def typed(command: str) -> str:
    """Return a command of this package as it can be typed here: by its name where a shell finds
    this Python's, else by its path, or that of this Python where it is not installed."""
    script = os.path.join(os.path.dirname(sys.executable), _NAME)
    if shutil.which(_NAME) == script:
        return f"{_NAME} {command}"
    if os.path.exists(script):
        return f"{os.path.relpath(script)} {command}"
    return f"{sys.executable} -m torchtitan_dp {command}"


def progress(words: str) -> None:
    """Show what takes seconds in a line that the next one replaces, on a terminal alone."""
    if sys.stderr.isatty():
        print(f"\033[K{words}", end="\r", file=sys.stderr, flush=True)


def processes_asked() -> str:
    """Return the number of processes by NGPU, or "auto"; ValueError, one line."""
    given = os.environ.get("NGPU", "auto")
    if given != "auto" and not (given.isdecimal() and int(given) > 0):
        raise ValueError(f"NGPU = '{given}': must be 1 or more, or auto")
    return given


def untested() -> list[str]:
    """Return a warning, one line, for each of Python, torch and transformers whose release was not
    tested."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    found["Python"] = platform.python_version()
    return [
        f"warning: {name} {found[name]} was not tested ({', '.join(releases)} were): train with it "
        f"only if {typed('selfcheck')} passes"
        for name, releases in RELEASES.items()
        if minor(found[name]) not in releases
    ]


def minor(version: str) -> str:
    """Return a version's first two numbers.

    >>> minor("2.15.0+cu132")
    '2.15'
    """
    return ".".join(version.split(".")[:2])


_NAME = "torchtitan-dp"
_LIBRARIES = (
    *(_NAME, "torch", "torchtitan", "opacus", "dp-accounting", "PLD_accounting"),
    *("transformers", "numpy", "scipy", "jinja2"),
)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that the guarantee rests on, this package included."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on a path, not installed
            found[name] = "unknown"
    return found


@functools.cache
def source() -> dict[str, Any]:
    """Return this package's name and version, the commit of its checkout, and whether its files
    differ from that; None outside of a checkout, and where git fails."""
    commit = _git("rev-parse", "HEAD")
    tracked = commit is not None and _git("ls-files", "--", __file__)
    changes = _git("status", "--porcelain", "--", ".") if tracked else None
    return {
        "name": _NAME,
        "version": versions()[_NAME],
        "commit": commit if tracked else None,
        "modified": changes != "" if changes is not None else None,
    }


def _git(*arguments: str) -> str | None:
    """Return the output of a git command, run in the package's folder; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def has_type(value: Any, annotation: Any) -> bool:
    """Return whether a value is of an annotated type.

    >>> has_type(1, float), has_type(True, int), has_type([1], list[str] | None)
    (True, False, False)
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is typing.Literal:
        return any(value == a and type(value) is type(a) for a in arguments)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(has_type(v, arguments[0]) for v in value)
    if arguments:  # X | Y
        return any(has_type(value, a) for a in arguments)
    if annotation in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if annotation is float else annotation)


def protect() -> None:
    """Do what each worker does first."""
    die_with_parent()
    forbid_core_dumps()
    os.umask(0o077)  # its outputs are its owner's alone


def leave() -> NoReturn:
    """End a worker that is done, at once: threads of gloo outlive their groups, and in one of some
    75 runs of two ranks one aborted among its destructors, so that torchrun said the run failed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies (Linux), also if it did already:
    else torchrun's workers would write checkpoints beside a resumed run."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    launcher = os.environ.get("TORCHTITAN_DP_LAUNCHER_PID")
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)


def forbid_core_dumps() -> None:
    """Forbid core dumps, which would contain the run's secrets and its records. A limit of 0 stops
    core files, one of 1 pipes to a program, too (fs/coredump.c); where neither is heeded, the
    filter leaves registers in a core, and no memory."""
    limit = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    with contextlib.suppress(OSError), open(_CORE_FILTER, "w") as file:  # not in every kernel
        file.write("0")


def lock_folder(folder: str, wait_s: float = 15.0) -> IO[str]:
    """Lock a folder for as long as the returned file is open. Waits a little for the workers
    of a run that was just killed; ValueError if another run has it, or it cannot be locked."""
    deadline = time.monotonic() + wait_s
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, LOCK_FILE)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii")
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                progress(f"another run uses {folder}: waiting for its end…")
                time.sleep(0.2)
    except BlockingIOError:
        raise ValueError(
            f"job.dump_folder = '{folder}': another run uses it; wait, or name another"
        ) from None
    except OSError as error:  # some NFS mounts have no locks
        raise ValueError(
            f"job.dump_folder = '{folder}' cannot be written, or locked ({error}): name a folder "
            "that can, on another file system"
        ) from error


def write_atomically(path: str, content: bytes) -> None:
    """Replace the file by `content` whole, readable by its owner only, or leave it as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb", opener=private_opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def private_opener(path: str, flags: int) -> int:
    """Open a file that its owner alone can read: an `opener` for `open`."""
    return os.open(path, flags, 0o600)


def is_locked(folder: str) -> bool:
    """Return whether another process has the lock of a run's folder."""
    path = os.path.join(folder, LOCK_FILE)
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:  # else one without locks holds a copy
                return isinstance(error, BlockingIOError)
    return False


def say(text: str, label: str = "not private", out: TextIO | None = None) -> None:
    """Write a labelled line that depends on private records, without noise: for their owner, who
    runs the program; on stderr, unless `out` is given. No file that may be published contains any
    of them."""
    print(f"{label}: {printable(text)}", file=out or sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write a warning that depends on private records."""
    say(text, "warning (not private)")


def printable(text: str) -> str:
    """Escape what would move a cursor or begin another line, as a name in a record may.

    >>> printable("a\\nb é")
    'a\\\\nb é'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
