"""A whole run that publishes its held-out loss: killed and resumed, told by its files."""

import pytest

from tests.processes.runs import Run, arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.ledger.spending import heldout_epsilon
from torchtitan_dp.plan import __main__ as plan
from torchtitan_dp.release.__main__ import main as release

pytestmark = pytest.mark.slow

STEPS = 20


def test_row66_a_killed_and_resumed_run_publishes_one_loss_at_its_end(tmp_path, capsys):
    out, data = tmp_path / "out", write_records(tmp_path / "data", 48)
    command = arguments(
        *(out, data, *with_sigma(1.0), f"--training.steps={STEPS}", "--data.heldout_fraction=0.3"),
        *("--validation.enable", "--validation.freq=5", "--validation.publish_epsilon=2"),
        "--checkpoint.interval=5",
    )
    with Run(command, log=tmp_path / "killed.log") as run:
        run.wait_for(lambda: (out / "checkpoint" / "step-5" / ".metadata").exists(), "a checkpoint")
        run.kill(run.processes())
        assert run.dies()
    assert privacy(out)["heldout_loss"]["begun"] == 0
    output = train(command, log=tmp_path / "resumed.log")
    told = privacy(out)
    step, loss, _ = told["heldout_loss"]["noised"]
    assert (step, told["heldout_loss"]["begun"]) == (STEPS, 1)
    assert (out / "starts.log").read_text().splitlines()[-2:] == [f"end {STEPS}", f"loss {STEPS}"]
    assert 1.99 <= told["heldout_epsilon"] <= 2
    assert verify(str(out)).faults == []
    assert f"held-out loss to publish: {loss:.4f} after step {STEPS}" in output
    for line in output.splitlines():  # the noised one is not labelled, and the others are
        if "eld-out loss" in line:
            assert ("with noise" in line) != ("not private: " in line), line
    train(command, log=tmp_path / "again.log")  # nothing is left to do
    assert privacy(out)["heldout_loss"] == told["heldout_loss"]

    release([str(out), str(tmp_path / "released")])
    card = (tmp_path / "released" / "README.md").read_text()
    assert "A loss on it was published with noise" in card
    assert f"| held-out loss | {loss:.4f} nats a token after step {STEPS}" in card

    for override, words in (
        ("--validation.publish_epsilon=3", "validation.publish_epsilon = 3.0: "),
        ("--training.steps=40", "training.steps = 40: the held-out loss after step 20 was"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            plan.main([*command, override, "--world_size=2"])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err

    with open(out / "starts.log", "a") as file:  # killed between its line and its result
        file.write(f"loss {STEPS}\n")
    (note,) = verify(str(out)).notes
    assert "a held-out loss were begun after" in note
    assert heldout_epsilon(verify(str(out)).ledger) > 2.5
    text = (out / "starts.log").read_text()
    (out / "starts.log").write_text(text.replace(f"loss {STEPS}\n", ""))
    assert verify(str(out)).faults == ["starts.log lacks a published loss that privacy.json counts"]
