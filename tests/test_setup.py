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
    first, second, _ = says(tmp_path, listed)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert first == (
        f"Setting up .venv for Python {version} (first time, a few minutes; log: .venv-setup.log)…"
    )
    assert second.startswith(build)


def test_the_cuda_build_is_taken_where_pip_prefers_another(tmp_path):
    log = ".venv-cuda-setup.log"
    first, second, _ = says(tmp_path, f"{PIN}+cpu, {PIN}", log, TORCH_BUILD="cuda")
    assert first.startswith("Setting up .venv-cuda for Python ")
    assert second.startswith(f"torch {PIN}: PyPI's, with CUDA")
    assert (tmp_path / log).read_text().rstrip().endswith(f"-e {tmp_path}[test] torch==={PIN}")
    assert not (tmp_path / ".venv").exists()
