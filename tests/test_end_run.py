"""Log line, validation and checkpoint after the last step, for periods that do not divide it."""

import re
import signal
from pathlib import Path

import pytest

from tests.processes.runs import Run, arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.config.load import load_config
from torchtitan_dp.train.check import check_run, is_done

pytestmark = pytest.mark.slow

HELD_OUT = ("--data.heldout_fraction=0.3", "--validation.enable", "--validation.freq=100")
EXPORTS = "--checkpoint.last_save_in_hf"
RARELY = ("--metrics.log_freq=100", "--checkpoint.interval=100")


def steps_of(output: str, words: str) -> list[int]:
    """Of rank 0's lines with these words."""
    lines = [line for line in output.splitlines() if words in line and "[rank0]" in line]
    found = [re.search(r"step: +(\d+)", line) for line in lines]
    return [int(match[1]) for match in found if match]


def nothing_is_left(command: list[str]) -> bool:
    config = load_config(command, 2)
    return is_done(config, check_run(config))


@pytest.mark.parametrize("private", [True, False])
def test_the_last_step_is_logged_validated_and_saved(tmp_path: Path, private: bool) -> None:
    data = write_records(tmp_path / "data")
    terms = (*with_sigma(1), "--validation.publish_epsilon=4", EXPORTS) if private else ()
    off = () if private else ("--privacy.no-enable", "--training.global_batch_size=2")
    command = arguments(tmp_path / "out", data, *terms, *off, *HELD_OUT, *RARELY)
    output = train([*command, "--training.steps=5"], log=tmp_path / "log")
    assert steps_of(output, "not private: held-out loss: ") == [0, 5]
    assert steps_of(output, "tps: ") == [1, 5]
    assert (tmp_path / "out" / "checkpoint" / "step-5" / ".metadata").exists()
    if private:
        told = privacy(tmp_path / "out")
        assert (told["heldout_loss"]["begun"], told["heldout_loss"]["noised"][0]) == (1, 5)
        assert told["heldout_epsilon"] <= 4
        assert nothing_is_left([*command, "--training.steps=5"])
        assert not nothing_is_left(
            [*command, "--training.steps=5", "--checkpoint.export_dtype=bfloat16"]
        )
        (tmp_path / "out" / "hf" / "privacy.json").unlink()
        assert not nothing_is_left([*command, "--training.steps=5"])


def test_a_stop_publishes_no_loss(tmp_path: Path) -> None:
    data, more = write_records(tmp_path / "data"), "--validation.publish_epsilon=4"
    command = arguments(tmp_path / "out", data, *with_sigma(1), *HELD_OUT, *RARELY, more)
    with Run([*command, "--training.steps=4000"], log=tmp_path / "log") as run:
        begun = tmp_path / "out" / "steps_executed.log"
        run.wait_for(lambda: begun.exists() and begun.read_text().count("\n") > 3, "four steps")
        run.process.send_signal(signal.SIGTERM)
        assert run.dies()
    assert steps_of(run.output(), "tps: ") == [1]
    loss = privacy(tmp_path / "out")["heldout_loss"]
    assert (loss["begun"], loss["noised"]) == (0, None)
