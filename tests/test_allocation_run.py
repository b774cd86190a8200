"""Whole runs with random allocation (row 74): a resume, its files, and terms that no resume
changes; draws over resumes are in hazards/test_trainer.py, crashes in replay."""

import pytest

from tests.processes.runs import arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.segments import Mechanism, Segment
from torchtitan_dp.release.__main__ import main as release

pytestmark = pytest.mark.slow

T = 4


def test_a_run_that_was_resumed_is_accounted_in_whole_rounds_and_released(tmp_path):
    data, out = write_records(tmp_path / "data"), tmp_path / "out"
    command = arguments(
        out,
        data,
        *with_sigma(2.0),
        *("--privacy.accountant=pld", "--training.global_batch_size=6"),
        f"--checkpoint.interval={T}",
    )
    allocation = [*command, "--privacy.sampling=allocation"]
    train([*allocation, "--training.steps=4"], log=tmp_path / "first")
    with pytest.raises(AssertionError, match=r"privacy\.sampling = poisson: .* with allocation"):
        train([*command, "--training.steps=10"], log=tmp_path / "poisson")
    train([*allocation, "--training.steps=10"], log=tmp_path / "second")
    with pytest.raises(AssertionError, match="after step 10, are inside a round of 4 steps"):
        train([*allocation, "--training.steps=12"], log=tmp_path / "inside")
    spent, three = privacy(out), Segment(Mechanism(2.0, 1 / T, round_steps=T), 3 * T)
    expected = compose([three], delta=1e-3, accountant="pld")
    assert spent["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert (spent["sampling"], spent["round_steps"], spent["steps"]) == ("allocation", T, 10)
    assert spent["sample_rate"] == 1 / T
    assert verify(str(out)).faults == []
    release([str(out), str(tmp_path / "released")])
    card = (tmp_path / "released" / "README.md").read_text()
    assert "random allocation: every record in exactly one step of each round of 4 steps" in card
    assert "Poisson" not in card
