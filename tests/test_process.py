"""Locks, parent death and core dumps, on real processes."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.runs import ROOT, said
from torchtitan_dp.base.process import LOCK_FILE, Fault, faults_kept, forbid_core_dumps, lock_folder

HOLD = (
    "import sys, time; from torchtitan_dp.base.process import lock_folder; "
    "lock = lock_folder(sys.argv[1]); print('held', flush=True); time.sleep(600)"
)
DIE = (
    "import os, time; from torchtitan_dp.base.process import die_with_parent; "
    "die_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
)
SPAWN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DIE!r}]).wait()"


@contextlib.contextmanager
def python(program, *arguments, **env):
    """A Python process that runs `program`; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(pid)


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with python(HOLD, folder) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"job\.dump_folder = '.*run': another run uses"):
            lock_folder(str(folder), wait_s=0.3)
        lock_folder(str(tmp_path / "other"), wait_s=0).close()
        assert (tmp_path / "other" / LOCK_FILE).exists()
        holder.send_signal(signal.SIGKILL)  # as a crashed run ends
        lock_folder(str(folder), wait_s=60).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        with pytest.raises(ValueError, match=rf"job\.dump_folder = '.*{folder}'"):
            lock_folder(str(tmp_path / folder), wait_s=0)


def test_a_child_dies_when_its_parent_is_killed(monkeypatch):
    monkeypatch.delenv("TORCHTITAN_DP_LAUNCHER_PID", raising=False)
    with python(SPAWN) as launcher:
        child = int(launcher.stdout.readline())
        assert lives(child)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        ended = ends(child)
        if not ended:
            os.kill(child, signal.SIGKILL)
    assert ended


def test_a_child_whose_launcher_died_already_ends_at_once():
    with python(DIE, TORCHTITAN_DP_LAUNCHER_PID=str(2**22 + 1)) as child:
        output, _ = child.communicate(timeout=120)
        assert (child.returncode, output) == (1, "")


@pytest.mark.parametrize("core_filter", [os.devnull, "/nowhere/coredump_filter"])
@pytest.mark.parametrize(
    "hard, wanted", [(resource.RLIM_INFINITY, 1), (4096, 1), (1, 1), (0, 0)], ids=str
)
def test_no_core_dumps(monkeypatch, hard, wanted, core_filter):
    """Asked of the kernel, whatever this process was allowed before; 1 stops pipes too."""
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: asked.append(limit))
    monkeypatch.setattr("torchtitan_dp.base.process._CORE_FILTER", core_filter)
    forbid_core_dumps()
    assert asked == [(resource.RLIMIT_CORE, (wanted, wanted))]


CRASH = (
    "import os, resource; from torchtitan_dp.base.process import forbid_core_dumps; "
    "forbid_core_dumps(); print(resource.getrlimit(resource.RLIMIT_CORE), "
    "open('/proc/self/coredump_filter').read(), flush=True); os.chdir({!r}); os.abort()"
)


def test_a_crash_leaves_no_core(tmp_path):
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no core can be asked for")
    with python(CRASH.format(str(tmp_path))) as crashed:
        output, _ = crashed.communicate(timeout=120)
    assert crashed.returncode == -signal.SIGABRT
    assert output.split() == ["(1,", "1)", "00000000"]  # and nothing to put into one
    assert os.listdir(tmp_path) == []


PACKAGE = ROOT / "torchtitan_dp"
COMMANDS = [f"torchtitan_dp.{path.parent.name}" for path in PACKAGE.glob("*/__main__.py")]


@pytest.mark.parametrize("module", ["torchtitan_dp", "torchtitan_dp.train", *sorted(COMMANDS)])
def test_an_interpreter_without_assertions_is_refused(module):
    """PYTHONOPTIMIZE=2 has no docstrings either, which commands print."""
    done = said(sys.executable, "-m", module, PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: assertions guard privacy here: run Python without -O, and unset PYTHONOPTIMIZE\n"
    )


def test_the_line_of_a_fault_is_kept_until_the_next_start(tmp_path):
    kept = tmp_path / "fault.txt"
    with pytest.raises(Fault), faults_kept(str(tmp_path)):
        raise Fault("the disk is gone")
    assert kept.read_text() == "error: the disk is gone\n"
    with faults_kept(str(tmp_path)):
        assert not kept.exists()
    assert not kept.exists()
