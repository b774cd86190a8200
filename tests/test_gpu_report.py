"""`scripts/gpu_report.sh` without a GPU: its parts, and their order where they sleep."""

import json
import os
import subprocess
import sys
import time

import pytest

from scripts.benchmarking import gpu_parts
from scripts.benchmarking.arms import ARMS
from scripts.benchmarking.gpu_parts import Part, Report
from tests.processes.runs import CONFIG, ROOT, said
from tests.selfcheck.test_cuda import CASES, SHARED
from torchtitan_dp.config.load import load_config


@pytest.mark.slow
def test_without_a_device_each_part_says_so(tmp_path):
    done = said("bash", "scripts/gpu_report.sh", "--minutes", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "report.json").read_text())
    assert {one["status"] for one in parts.values()} == {"no CUDA device"}
    assert [*parts] == [part.name for part in gpu_parts.all_parts(small=False)]
    assert "| kernels | no CUDA device | 0 |" in (tmp_path / "report.md").read_text()
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "report.json", "report.md"]


def test_the_parts_name_every_file_with_tests_for_cuda():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark." + "cuda" in path.read_text()
    }
    parts = gpu_parts.all_parts(small=False)
    commands = [part.command for part in parts if "run_tests.sh -m cuda" in part.command]
    named = {word for command in commands for word in command.split() if word.endswith(".py")}
    assert named == marked


def test_proofs_run_beside_each_other_then_timings_alone_and_a_hang_costs_no_other(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_parts, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(gpu_parts.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(gpu_parts, "_GRACE", 0.5)
    monkeypatch.setattr(gpu_parts, "MORE", 1.0)
    mark = f"{time.time_ns()}"  # of the sleep that a worker of its own session sleeps
    hangs = f"bash -c 'trap \"\" TERM; setsid sleep 500.{mark} & sleep 500'"
    parts = [
        Part("hangs", 1, hangs),
        Part("ok", 1, "bash -c 'sleep 1; echo said'"),
        Part("fails", 1, "bash -c 'exit 3'"),
        Part("row", 1, """bash -c 'sleep 1; echo {\\"tokens\\": 5}'""", proof=False),
        Part("long", 1000, "false", proof=False),
    ]
    found, began = Report(tmp_path), time.monotonic()
    gpu_parts.run(parts, found, 60, possible=True)
    assert time.monotonic() - began < 30
    status = {name: one["status"] for name, one in found.parts.items()}
    assert status.pop("long").startswith("skipped: ")
    expected = {"ok": "ok", "fails": "failed: 3", "hangs": "killed at its limit", "row": "ok"}
    assert status == expected
    assert found.parts["row"]["result"] == {"tokens": 5}
    assert [*found.parts][:3] == ["ok", "fails", "hangs"]  # the row waits for the last of them
    assert mark not in subprocess.check_output(["ps", "axo", "args"], text=True)

    again = Report(tmp_path)
    gpu_parts.run([parts[1], Part("fails", 1, "true")], again, 60, possible=True)
    assert again.parts["fails"]["status"] == "ok"
    assert (tmp_path / "log.txt").read_text().count("=== ok: ok") == 1


@pytest.mark.parametrize("row", gpu_parts.ROWS, ids=str)
def test_no_row_is_refused(row):
    _, arm, tokens, mbs, config, more = row
    setting = gpu_parts.setting_of(tokens, mbs, f"train_configs/{config}.toml", more.split())
    load_config(setting.arguments(ARMS[arm], "out"), 1)


@pytest.mark.parametrize(("processes", "overrides"), CASES.values(), ids=CASES)
def test_no_selfcheck_is_refused(processes, overrides):
    mine = [option for option in overrides if option not in SHARED]
    load_config(["--job.config_file", str(CONFIG), *mine], processes)


@pytest.mark.slow
def test_a_row_and_the_plan_beside_it(tmp_path):
    config = "train_configs/llama3_debug.toml"
    script = [sys.executable, "scripts/benchmarking/gpu_parts.py"]
    done = said(*script, "--row", "microbatch", "64", "1", config, "--model.flavor=debug")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["microbatches"] == 8
    report = {arm: {"result": found | {"arm": arm}} for arm in ("non-DP", "microbatch")}
    (tmp_path / "report.json").write_text(json.dumps(report))
    done = said(*script, "--predict", str(tmp_path))
    row = done.stdout.splitlines()[-1].split(" | ")
    assert row[0] == "| microbatch"
    assert float(row[6]) == 1.0  # over non-DP


def test_the_wheels_are_pinned():
    _, _, listed = (ROOT / "scripts/gpu_wheels.sh").read_text().partition("packages=(")
    names = listed.partition(")")[0].split()
    pins = (ROOT / "constraints.txt").read_text().lower()
    assert all(f"\n{name}==" in pins for name in names), names
