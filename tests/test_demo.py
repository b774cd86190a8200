"""The demo: a first screen of at most twelve lines, and a line that compares losses at the end."""

import hashlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import forks
from tests.processes.runs import ROOT, privacy, said
from torchtitan_dp.base.process import VERBOSE
from torchtitan_dp.ledger.spending import to_act_on
from torchtitan_dp.train.validate import HeldOutValidator

PRETRAINED = ROOT / "examples" / "pretrained"


def compared(losses: dict[int, float], reference: float | None) -> str | None:
    config: Any = SimpleNamespace(
        validation=SimpleNamespace(reference_loss=reference),
        training=SimpleNamespace(steps=16, seq_len=64),
    )
    nothing: Any = None
    validator = HeldOutValidator(nothing, config, nothing, nothing)
    validator._found.update(losses)
    return validator.comparison()


@pytest.mark.parametrize(
    "losses, reference, ends",
    [
        ({0: 4.0, 8: 3.5, 16: 3.25}, 3.0, "75% of the gain without privacy, which reaches 3"),
        ({0: 4.0, 16: 3.25}, None, "4.0000 before the first step, 3.2500 now"),
        ({0: 4.0, 16: 3.25}, 4.5, "3.2500 now"),  # nothing to close
    ],
)
def test_the_last_lines_compare_losses(
    losses: dict[int, float], reference: float | None, ends: str
) -> None:
    line = compared(losses, reference)
    assert line is not None
    assert line.startswith("not private: ")
    assert line.endswith(ends)


def test_a_resumed_run_compares_what_it_saw_and_a_stopped_one_nothing() -> None:
    resumed = compared({8: 3.5, 16: 3.25}, 3.0)
    assert resumed == "not private: held-out loss 3.5000 after step 8, 3.2500 now"
    for losses in ({16: 3.25}, {0: 4.0, 8: 3.5}, {}):
        assert compared(losses, 3.0) is None


def test_a_rounding_that_nobody_needs_to_act_on_is_in_privacy_json_alone() -> None:
    small = "the clipped sum is rounded: each rank adds up to 9 records per step in fp32; moved"
    large = f"{small}: train on more ranks, or lower training.global_batch_size"
    assert to_act_on([small, large, "steps were lost"]) == [large, "steps were lost"]


def test_the_committed_weights_are_those_of_their_page() -> None:
    page = (PRETRAINED / "README.md").read_text()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert hashlib.sha256((PRETRAINED / name).read_bytes()).hexdigest() in page
    assert sum(path.stat().st_size for path in PRETRAINED.iterdir()) < 1.5e6


def test_the_script_takes_the_name_of_a_configuration_as_the_command_does(tmp_path: Path) -> None:
    given = ("train_configs/llama3_debug.toml", "--privacy.delta=2")
    ended = said(ROOT / "run_train.sh", *given, TORCHTITAN_DP_PYTHON=sys.executable)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: privacy.delta = 2"), ended.stderr


@pytest.mark.slow
def test_the_demo_says_what_it_does_before_the_first_step(tmp_path: Path) -> None:
    forks.need()
    # A plan of sixteen steps in whose place one is taken, on one process.
    ended = said(
        *(ROOT / "run_train.sh", f"--job.dump_folder={tmp_path / 'out'}", "--training.steps=1"),
        *("--privacy.bands=1", "--privacy.noise=independent", "--validation.steps=1"),
        "--training.seq_len=128",
        cwd=tmp_path,
        **{"TORCHTITAN_DP_PYTHON": sys.executable, "NGPU": "1", VERBOSE: ""},
    )
    assert ended.returncode == 0, ended.stderr
    before, _, after = (ended.stderr + ended.stdout).partition("step: 1/1  epsilon")
    lines = [line for line in ended.stderr.splitlines() if "[rank0]" not in line]
    first = [line for line in lines if "tokenizing" not in line]  # which the first run does
    starts = ("checking", "warning: averaged", "trains:", "on:", "private:", " ")
    assert all(map(str.startswith, first, starts)), first
    assert "without the model, 1%" in first[5]
    *quiet, _ = [one for one in before.splitlines() if one and "tokenizing" not in one]
    assert len([one for one in quiet if "warning" not in one.lower()]) <= 12, quiet
    assert re.search(r"held-out loss [\d.]+ before the first step, [\d.]+ now", after)
    *_, meaning, _, publish = [line for line in after.splitlines() if "[rank0]" in line]
    assert "without the model" in meaning  # then the caveat on public weights
    assert "release" in publish
    assert privacy(tmp_path / "out")["private"] is True
