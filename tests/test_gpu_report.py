"""`scripts/gpu_report.sh` without a GPU: it says so; its own arithmetic on small sizes."""

import json

import pytest

from tests.processes.runs import ROOT, said


def run(folder, *arguments, **env):
    return said("bash", "scripts/gpu_report.sh", *arguments, GPU_REPORT=str(folder), **env)


@pytest.mark.slow
def test_without_a_device_each_part_says_so(tmp_path):
    done = run(tmp_path, "tests", "train")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["tests: no CUDA device", "train: no CUDA device"]
    assert json.loads((tmp_path / "train.json").read_text())["status"] == "no CUDA device"
    report = (tmp_path / "report.md").read_text()
    assert "| tests | no CUDA device | 0 |" in report
    assert "| train | no CUDA device | 0 |" in report


@pytest.mark.slow
def test_the_tests_parts_name_every_file_with_tests_for_cuda(tmp_path):
    """Files by name: all tests together take most of a part's time to collect."""
    lines = run(tmp_path, "--dry_run", "tests", "selfcheck_tests").stdout.splitlines()
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark." + "cuda" in path.read_text()
    }
    named = {word for line in lines for word in line.split() if word.endswith(".py")}
    assert named == marked
    assert all("-m cuda" in line and "--junitxml" in line for line in lines)
