"""Puts a fault into a copy of the package and tells whether the tests named for it fail.

A fault is caught if a test FAILS by what it asserts. Tests that cannot be collected, fixtures that
break and code that does not run (a NameError, say) are no catch: then the fault is badly written.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.hazards.mutants.table import ROOT, Mutant

COPIED = ("torchtitan_dp", "tests", "train_configs", "scripts", "pyproject.toml", "run_train.sh")
TIMEOUT_S = 1200  # for failing only: a busy machine takes minutes for what else takes seconds
BROKEN = re.compile(
    r"\b(NameError|UnboundLocalError|SyntaxError|IndentationError|ImportError|ModuleNotFoundError"
    r"|AttributeError|TypeError|NoServerError)\b: "
)


@dataclass(frozen=True)
class Outcome:
    """The tests' outcome."""

    code: int | None  # pytest's exit code; None if they hung
    failed: tuple[str, ...]  # tests that failed
    broken: str  # why it is no catch, or empty
    seconds: float
    log: str

    @property
    def caught(self) -> bool:
        return self.code == 1 and bool(self.failed) and not self.broken

    @property
    def passed(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        return f"exit code {self.code}, failed {self.failed}, {self.broken}\n{self.log[-3000:]}"


class Runner:
    """Runs tests on a mutated copy, one mutant after the other, through one `server` process."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path) -> None:
        self._server, self._folder = server, folder
        self._count = 0
        self._root = folder / "copy"
        copy_tree(self._root)

    def run(self, mutant: Mutant | None, *tests: str) -> Outcome:
        """The outcome of the tests under the fault, or without one."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        job = {"root": str(self._root), "place": str(place), "tests": tests, "timeout_s": TIMEOUT_S}
        assert self._server.stdin is not None
        with mutant.applied(self._root) if mutant else nullcontext():
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            answer = _read(self._server)
        failed, broken = _judge(place / "report.xml")
        log = (place / "log").read_text(errors="replace")
        return Outcome(answer["code"], failed, broken, answer["seconds"], log)


@contextmanager
def running(folder: Path) -> Iterator[Runner]:
    """A runner whose copy lies in `folder`."""
    environment = {
        # On CI pytest explains every failure whole, which takes minutes for large collections.
        **{name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # A mutant of the same size and second as the last one would pass for what that compiled to.
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.hazards.mutants.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    try:
        assert _read(server) == "ready"
        yield Runner(server, folder)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _read(server: "subprocess.Popen[str]"):  # type: ignore[no-untyped-def]
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, "the server of mutants has ended"
    return json.loads(line)


def copy_tree(root: Path) -> None:
    """What the tests need of the working tree."""
    root.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, root / name)


def _judge(report: Path) -> tuple[tuple[str, ...], str]:
    """The tests that failed, and what makes that no catch."""
    if not report.exists():
        return (), "no report"
    failed, broken = [], ""
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        for failure in case.iter("failure"):
            failed.append(name)
            said = f"{failure.get('message')}\n{failure.text}"
            if found := BROKEN.search(said):
                broken = f"{name}: the fault does not run ({found[0]})"
        for error in case.iter("error"):
            broken = f"{name}: {error.get('message')}"
    return tuple(failed), broken
