"""What `scripts/setup.sh` says before pip fetches anything, and what `.ci/run` says was tested."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes.runs import ROOT, said

(PIN,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
# It makes a copy of itself in place of a venv; its pip lists what it is given, and fetches nothing.
PYTHON = """#!/bin/bash
case "$*" in
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"_base_executable"*) echo "$0" ;;
    "-m pip index versions torch "*) [[ -n "$LISTED" ]] && echo "Available versions: $LISTED" ;;
    "-m pip "*) echo "pip: $*" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def says(folder: Path, listed: str, log: str = ".venv-setup.log", **build: str) -> list[str]:
    """The lines of a first set-up in `folder`, where pip's indexes list these versions of torch."""
    (folder / "scripts").mkdir()
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PYTHON": str(python), "REAL": sys.executable, "LISTED": listed, **build}
    done = said("bash", folder / "scripts/setup.sh", TORCHTITAN_DP_PYTHON="", **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip: -m pip install" in (folder / log).read_text()
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "listed, build",
    [
        (f"99.0, {PIN}, 2.12.1", f"torch {PIN}: PyPI's, with CUDA, several gigabytes"),
        (f"{PIN}+cpu, {PIN}", f"torch {PIN}+cpu: the build without CUDA"),
        (f"{PIN}+cu130, {PIN}+cpu, {PIN}", f"torch {PIN}+cu130"),
        (f"{PIN}1, 2.12.0", f"torch {PIN}: pip's indexes do not say which build"),
        ("", f"torch {PIN}: pip's indexes do not say which build"),
    ],
    ids=["pypi", "cpu", "labelled", "not listed", "no network"],
)
def test_the_log_and_the_build_of_torch_are_named_before_they_are_fetched(tmp_path, listed, build):
    first, second = says(tmp_path, listed)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert first == (
        f"Setting up .venv for Python {version} (first time, a few minutes; log: .venv-setup.log)…"
    )
    assert second.startswith(build)


def test_the_cuda_build_is_taken_where_pip_prefers_another(tmp_path):
    log = ".venv-cuda-setup.log"
    first, second = says(tmp_path, f"{PIN}+cpu, {PIN}", log, TORCH_BUILD="cuda")
    assert first.startswith("Setting up .venv-cuda for Python ")
    assert second.startswith(f"torch {PIN}: PyPI's, with CUDA")
    assert (tmp_path / log).read_text().rstrip().endswith(f"-e {tmp_path}[test] torch==={PIN}")
    assert not (tmp_path / ".venv").exists()


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "also"), [("the CPU", True), ("CUDA 13.0", False)])
def test_ci_tests_the_cuda_build_beside_the_cpu_build_alone(tmp_path, build, also):
    """With stand-ins for the checks, which note how they were called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name, of in ((".venv", build), (".venv-cuda", "CUDA 13.0")):
        says_of = f"[[ $1 == - ]] && echo 'torch (built for {of})' || true"
        executable(tmp_path / name / "bin/python", says_of)
    for name in ("setup", "run_tests", "try_wheel"):
        note = f'echo "{name}:$TORCH_BUILD:$PYTHON:$TORCHTITAN_DP_PYTHON:$*" >> "{tmp_path}/notes"'
        executable(tmp_path / "scripts" / f"{name}.sh", note)
    done = said("bash", tmp_path / ".ci/run", TORCHTITAN_DP_PYTHON="", PYTHON="")
    assert done.returncode == 0, done.stderr
    beside = ["setup:cuda:.venv/bin/python::", f"run_tests:::{tmp_path}/.venv-cuda/bin/python:"]
    alone = ["setup::::", "run_tests::::", "run_tests::::all", "try_wheel::::"]
    assert (tmp_path / "notes").read_text().splitlines() == alone + beside * also
    last = f".ci/run: passed: torch (built for {build})"
    assert done.stdout.splitlines()[-1] == last + ("; torch (built for CUDA 13.0)" * also)
