"""Processes in namespaces of their own, which end with the first of them; they need root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

APART = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def need(what: str, programs: tuple[str, ...], packages: str) -> None:
    """Skip the test where there can be no such thing."""
    missing = [program for program in (*programs, "unshare") if shutil.which(program) is None]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        missing.append("root")
    if missing:
        pytest.skip(f"{what} needs {', '.join(missing)}: apt-get install {packages}")


def below(pid: int) -> Iterator[tuple[int, str]]:
    """Yield all living processes below one: process id and command line."""
    left = [pid]
    while left:
        parent = left.pop()
        try:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):  # of each thread
                left += map(int, children.read_text().split())
            line = Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if parent != pid:
            yield parent, line
