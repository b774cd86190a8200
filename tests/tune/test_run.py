"""`torchtitan-dp tune` as a user starts it: its epsilon by the ledger is what it announced."""

import json
import sys

import pytest

from tests.processes import forks
from tests.processes.runs import arguments, said, write_records
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.release.ledgers import main as ledger

pytestmark = pytest.mark.slow


def test_a_search_spends_by_the_ledger_what_it_announced(tmp_path):
    """Two trials that differ in steps; again, it runs none."""
    forks.need()
    basics = arguments(
        tmp_path / "out",
        write_records(tmp_path / "data", 48),
        *("--data.heldout_fraction=0.3", "--privacy.accountant=pld"),
        "--validation.publish_clip=0.2",  # 14 held-out units
    )
    tune = [
        *(sys.executable, "-m", "torchtitan_dp.tune", *basics, "--epsilon=4"),
        *("--try", "training.global_batch_size/training.steps=2/3,3/2"),
        *("--json", tmp_path / "found.json"),
    ]
    environment = {"NGPU": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "c")}
    first = said(*tune, **environment)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    trials = [tmp_path / "out_tune" / name for name in ("trial_1", "trial_2")]
    assert ledger([*map(str, trials), "--json", str(tmp_path / "ledger.json")]) == 0
    spent = json.loads((tmp_path / "ledger.json").read_text())["total"]
    announced = found["announced"]
    assert spent["epsilon"] == spent["epsilon_planned"] == announced["epsilon_planned"]
    assert spent["heldout_epsilon"] == announced["heldout_epsilon"]
    assert min(spent["epsilon"], spent["heldout_epsilon"]) >= 3.96
    assert max(spent["epsilon"], spent["heldout_epsilon"]) <= 4
    assert spent["steps_executed"] == 5

    losses = [verify(str(folder)).ledger.heldout_loss.noised.loss for folder in trials]
    assert [one["loss"] for one in found["trials"]] == sorted(losses)
    best = found["trials"][0]
    assert best["loss"] == losses[["trial_1", "trial_2"].index(best["trial"])]
    assert f"best: {best['trial']}: --training.global_batch_size=" in first.stdout

    before = [(folder / "steps_executed.log").read_bytes() for folder in trials]
    again = said(*tune, **environment)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "found.json").read_text())["spent"] == found["spent"]
    assert [(folder / "steps_executed.log").read_bytes() for folder in trials] == before
