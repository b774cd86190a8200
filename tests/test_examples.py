"""The examples run as their READMEs say, command by command."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import torchtitan_dp
from tests.accounts import publish
from tests.processes import forks
from tests.processes.runs import ROOT, said
from torchtitan_dp.ledger import Lineage, Settings, write_fingerprint
from torchtitan_dp.privacy.segments import Mechanism

SETTINGS = Settings(Mechanism(2.0, 0.1), 0.5, 1e-5, 5, "rdp", "privacy.sample_rate", "add_remove")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that looks like the root of the repository, whose `outputs/` are its own."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", ".venv", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    for name, module in (("python", ""), ("torchtitan-dp", "-m torchtitan_dp ")):
        (bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (bin / name).chmod(0o755)
    return tmp_path


def run(command: str, place: Path) -> str:
    """What a shell prints for the command; any failure in it is one of the test."""
    forks.need()
    done = said(
        *("bash", "-euo", "pipefail", "-c", f"exec 2>&1; {command}"),
        cwd=place,
        **{"TORCHTITAN_DP_PYTHON": sys.executable, "NGPU": "1"},
        **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        XDG_CACHE_HOME=str(place / "cache"),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def commands(readme: str) -> list[str]:
    """The blocks of shell commands of a page."""
    return re.findall(r"^```bash\n(.*?)^```", (ROOT / readme).read_text(), re.M | re.S)


def test_dp_sgd_by_hand_learns_within_its_budget(place: Path) -> None:
    (command,) = commands("examples/README.md")
    found = re.search(r"epsilon = ([\d.]+) .*= ([\d.]+)%", run(command, place), re.S)
    epsilon, accuracy = found.groups()
    assert 2.9 < float(epsilon) <= 3
    assert float(accuracy) > 85


def test_the_parts_run_with_each_public_name(place: Path) -> None:
    """On one rank, and with the ledgers of two runs."""
    text = (ROOT / "examples" / "parts.py").read_text()
    assert set(re.findall(r"\bdp\.(\w+)", text)) == set(torchtitan_dp.__all__)
    for name in ("first", "second"):
        publish(Lineage(SETTINGS, run=name, steps=3, planned_steps=3), place / name)
        write_fingerprint(str(place / name), "of the records", {})
    torchrun = ".venv/bin/python -m torch.distributed.run --standalone --nproc_per_node 1"
    printed = run(f"{torchrun} examples/parts.py first second", place)
    for line in ("spends epsilon = 2.99", "of 200 records", "rank 0:", "2 runs: epsilon = "):
        assert line in printed


@pytest.mark.slow
def test_patients_are_trained_on_verified_and_released(place: Path) -> None:
    for command in commands("examples/patients/README.md"):
        run(command, place)
    terms = json.loads((place / "outputs" / "patients_model" / "privacy.json").read_text())
    assert terms["private"]
    assert 0 < terms["epsilon"] <= 8
    assert "patient_id" in terms["privacy_unit"]
    assert terms["neighbouring_relation"] == "zero_out"


@pytest.mark.thorough
def test_synthetic_records_are_written_and_judged(place: Path) -> None:
    (command,) = commands("examples/synthetic/README.md")
    printed = run(command, place)
    losses = re.findall(r"held-out loss of .*: ([\d.]+)$", printed, re.M)
    public, synthetic, release, real = map(float, losses)
    assert public > synthetic > release > real
    assert "of passages of 16 tokens" in printed
    lines = (place / "outputs" / "synthetic.jsonl").read_text().splitlines()
    assert len([json.loads(line)["text"] for line in lines]) == 400


@pytest.mark.parametrize("task", ["notes_perplexity", "notes_choice"])
def test_tasks_for_lm_eval_name_files_and_fields_that_are_there(task: str) -> None:
    settings = yaml.safe_load((ROOT / "examples" / "evaluation" / f"{task}.yaml").read_text())
    assert settings["task"] == task
    lines = (ROOT / settings["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    texts = [v for k, v in settings.items() if k.startswith("doc_to_")]
    fields = {name for text in texts for name in re.findall(r"{{(\w+)}}", text)}
    assert all(set(json.loads(line)) == fields for line in lines)
