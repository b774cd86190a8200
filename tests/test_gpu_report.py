"""`scripts/gpu_report.sh` without a GPU: it says so; its own arithmetic on small sizes."""

import argparse
import json
import sys

import pytest

from scripts.benchmarking import gpu_parts
from tests.processes.runs import ROOT, said
from torchtitan_dp.plan import memory as plan_memory
from torchtitan_dp.plan.memory import GIB, MemoryPlan


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


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_is_told(tmp_path):
    """With a device, as the script sees it: what is run is a stand-in for Python."""
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\ncase "$*" in\n'
        "    *total_memory*) echo 140 ;;\n"
        '    *is_available*) echo "A GPU" ;;\n'
        f'    *gpu_parts*report*) exec {sys.executable} "$@" ;;\n'
        "    *gpu_parts*machine*) sleep 9 ;;\n"
        "    *selfcheck*) exit 3 ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    stand_in = {"TORCHTITAN_DP_PYTHON": str(python), "GPU_REPORT_LIMIT": "1"}
    done = run(tmp_path / "out", "machine", "selfcheck", "plan", **stand_in)
    assert done.returncode == 1
    ended = {
        part: json.loads((tmp_path / f"out/{part}.json").read_text())["status"]
        for part in ("machine", "selfcheck", "plan")
    }
    failed = "failed with exit code 3"
    assert ended == {"machine": "out of time", "selfcheck": failed, "plan": "ok"}
    assert "rows_64k: " in run(tmp_path / "out", "--dry_run", **stand_in).stdout  # of 140 GiB


def test_predictions_are_held_against_measured_peaks(tmp_path, monkeypatch):
    row = {"name": "microbatch", "seq_len": 64, "activation_checkpoint": "none"}
    row |= {"peak_memory_gib": 4.0, "peak_reserved_gib": 5.0, "beside_the_pool_gib": 1.5}
    on_cpu = {**row, "peak_reserved_gib": None, "beside_the_pool_gib": None}
    rows = [row, {**row, "name": "non-DP", "peak_memory_gib": 1.0}, on_cpu]
    (tmp_path / "rows.json").write_text(json.dumps({"arms": rows}))
    plan = MemoryPlan(1, 64, {"activations": 3 * GIB}, 80.0, {}, communicators=1)
    monkeypatch.setattr(plan_memory, "predict", lambda *_, **__: plan)
    result = gpu_parts.predictions(argparse.Namespace(rows=[tmp_path / "rows.json"]))
    on_gpu, without = result["predictions"]
    assert on_gpu["predicted_vs_allocated"] == without["predicted_vs_allocated"] == 0.75
    expected = {"predicted_vs_reserved": 0.6, "in_use_gib": 6.5}
    expected |= {"headroom_needed_gib": 3.5, "headroom_gib": 4.5}
    assert {key: on_gpu[key] for key in expected} == expected
    assert without["predicted_vs_reserved"] is without["headroom_needed_gib"] is None
