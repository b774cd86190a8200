"""Hazards 59, 73: a clock decides how many steps fit into a job, records' lengths how long each is.

Two neighbours of 20 text files: the last one is empty, or long. Each is trained by jobs of a
scheduler with the same time limit, of which the first one crashes, until all steps are taken.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import clocked
from tests.hazards.test_crashes import LONG, records
from tests.processes import forks
from tests.processes.runs import arguments
from torchtitan_dp.release.__main__ import release
from torchtitan_dp.train.outlets import PUBLIC_FILE

STEPS = 6
LIMIT, CRASH = 2_600, 2_400  # tokens: six steps without the long record, two with it
pytestmark = pytest.mark.slow


def trained(root: Path, name: str, last: str) -> tuple[Path, int]:
    """The folder of a run that took all of its steps, and the number of jobs that this took."""
    data, out = records(root / name, last), root / f"out_{name}"
    argv = arguments(
        *(out, data, "--training.seq_len=2048", "--training.global_batch_size=19"),
        *(f"--training.steps={STEPS}", "--checkpoint.interval=4"),
        *("--metrics.no-enable_tensorboard", "--metrics.enable_wandb", "--metrics.log_freq=5"),
        "--parallelism.context_parallel_degree=1",
    )
    for job in range(1, 2 * STEPS):
        log = root / f"{name}_{job}.log"
        code = forks.Process(clocked.job, argv, log, LIMIT, CRASH if job == 1 else None).wait()
        assert code == (clocked.CRASH if job == 1 else 0), log.read_text(errors="replace")
        if json.loads((out / "privacy.json").read_text())["steps"] == STEPS:
            return out, job
    raise AssertionError("it never ended")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, int]]:
    root = tmp_path_factory.mktemp("clocks")
    return {name: trained(root, name, last) for name, last in (("A", ""), ("B", LONG))}


def without_names(terms: dict[str, Any]) -> dict[str, Any]:
    """A `privacy.json` without what is drawn at random."""
    terms.pop("run")
    return terms


def test_row59_the_clock_did_decide(runs):
    """What the tests below would not see otherwise."""
    logs = [(out / "starts.log").read_text().splitlines() for out, _ in runs.values()]
    begun = [[line.split()[2] for line in log if line.startswith("begin")] for log in logs]
    steps = [(out / "steps_executed.log").read_text() for out, _ in runs.values()]
    assert (begun[0], steps[0]) != (begun[1], steps[1])
    assert runs["A"][1] < runs["B"][1]


def test_row59_privacy_json_does_not_tell_one_from_the_other(runs):
    one, other = (
        without_names(json.loads((out / "privacy.json").read_text())) for out, _ in runs.values()
    )
    assert one == other
    assert one["steps_executed"] == STEPS + 4  # the crash counts as checkpoint.interval


@pytest.mark.parametrize("seen", [True, False])
def test_row59_nor_does_a_release(runs, seen, tmp_path):
    cards, terms = [], []
    for name, (out, _) in runs.items():
        released = tmp_path / name
        terms.append(without_names(release(str(out), str(released), lost_steps_not_seen=not seen)))
        cards.append((released / "README.md").read_text())
    assert terms[0] == terms[1]
    assert cards[0] == cards[1]


def test_row73_a_tracker_does_not_tell_one_from_the_other(runs):
    """It gets what one job without an end would send: each step once, under one time."""
    lines = []
    for out, _ in runs.values():
        lines.append([json.loads(line) for line in Path(f"{out}.sent").read_text().splitlines()])
    assert lines[0] == lines[1]
    assert (runs["A"][0] / PUBLIC_FILE).read_bytes() == (runs["B"][0] / PUBLIC_FILE).read_bytes()
    *steps, closed = lines[0]
    assert closed == ["closed", {}]
    assert [step for step, _ in steps] == [1, 5, STEPS]
    names = {"lr", "epsilon", "noise_multiplier"}
    assert all(line.keys() == {f"private_to_publish/{n}" for n in names} for _, line in steps)
