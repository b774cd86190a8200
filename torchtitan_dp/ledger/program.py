"""Which program trained: its version, its commit, and the libraries that epsilon rests on."""

import functools
import importlib.metadata
import os
import subprocess
from typing import Any

_NAME = "torchtitan-dp"
_LIBRARIES = (_NAME, "torch", "torchtitan", "opacus", "dp-accounting", "numpy", "scipy", "jinja2")
_GIT_TIMEOUT_S = 10


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
    """Return this package's name and version, and what git knows of the files that run.

    `commit` is the SHA-1 of the checkout that this package lies in and `modified` whether files
    of the package differ from it; both are None outside of a checkout, or where git says nothing.
    """
    commit = _git("rev-parse", "HEAD")
    tracked = commit is not None and _git("ls-files", "--", __file__)
    changes = _git("status", "--porcelain", "--", "..") if tracked else None
    return {
        "name": _NAME,
        "version": versions()[_NAME],
        "commit": commit if tracked else None,
        "modified": changes != "" if changes is not None else None,
    }


def _git(*arguments: str) -> str | None:
    """Return what a git command says, run where this file lies; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
