"""Whole runs that publish their held-out loss: stopped, killed and resumed, told by their files."""

import signal

import pytest

from tests.processes.runs import Run, arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.files import ledger_of
from torchtitan_dp.ledger.log import EVALUATIONS_FILE
from torchtitan_dp.ledger.spending import heldout_epsilon
from torchtitan_dp.plan import __main__ as plan
from torchtitan_dp.release.__main__ import main as release

pytestmark = pytest.mark.slow

STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    write_records(root / "data", 48)
    return root


def command(root, *overrides):
    return arguments(
        root / "out",
        root / "data",
        *(*with_sigma(1.0), f"--training.steps={STEPS}", "--data.heldout_fraction=0.3"),
        *("--validation.enable", "--validation.freq=2", "--validation.publish_epsilon=2"),
        "--checkpoint.interval=5",
        *overrides,
    )


def begun(root) -> int:
    path = root / "out" / EVALUATIONS_FILE
    return len(path.read_text().splitlines()) if path.exists() else 0


def published(root) -> Lineage:
    return ledger_of(privacy(root / "out"))


def interrupt(root, how, log):
    """Start it, and interrupt it after three more evaluations."""
    before, run = begun(root), Run(command(root), log=root / log)
    try:
        run.wait_for(lambda: begun(root) >= before + 3, "three evaluations")
        how(run)
        assert run.dies()
    finally:
        run.end()
    assert "done:" not in run.output()


def test_row66_a_stopped_a_killed_and_a_resumed_run_count_every_evaluation(folder, capsys):
    """In order, in one folder: stopped, killed, resumed to the end."""
    interrupt(folder, lambda run: run.process.send_signal(signal.SIGTERM), "stopped.log")
    stopped = published(folder)
    planned = 1 + STEPS // 2
    assert stopped.heldout_losses.lost == 0
    assert heldout_epsilon(stopped) <= 2
    assert stopped.heldout_losses.evaluations(stopped.steps, STEPS) == planned

    interrupt(folder, lambda run: run.kill(run.processes()), "killed.log")
    output = train(command(folder), log=folder / "resumed.log")
    last = published(folder)
    losses = last.heldout_losses
    assert [loss.step for loss in losses.losses] == [1, *range(2, STEPS + 1, 2)]
    assert losses.losses[: len(stopped.heldout_losses.losses)] == stopped.heldout_losses.losses
    assert losses.lost == 3  # of a crash's five steps at most
    assert begun(folder) <= planned + losses.lost
    assert heldout_epsilon(last) == pytest.approx(
        losses.noise.epsilon(planned + losses.lost, delta=1e-3)
    )
    assert heldout_epsilon(last) > 2
    assert verify(str(folder / "out")).faults == []
    assert f"held-out loss to publish: {losses.losses[-1].loss:.4f} after step {STEPS}" in output
    for line in output.splitlines():  # the noised one is not labelled, and the others are
        if "eld-out loss" in line:
            noised = "with noise" in line
            assert noised != ("not private: " in line), line

    release([str(folder / "out"), str(folder / "released")])
    card = (folder / "released" / "README.md").read_text()
    assert "Losses on it were published with noise" in card
    assert f"| held-out loss | {losses.losses[-1].loss:.4f} nats a token after step {STEPS}" in card

    for override, words in (
        ("--validation.publish_epsilon=3", "validation.publish_epsilon = 3.0: "),
        ("--validation.publish_clip=3", "validation.publish_clip = 3.0: "),
        ("--validation.publish_epsilon=None", "validation.publish_epsilon = None: "),
        ("--validation.freq=1", "validation.publish_epsilon = 2: the noise"),
    ):
        capsys.readouterr()
        longer = "--training.steps=80" if "freq" in override else f"--training.steps={STEPS}"
        with pytest.raises(SystemExit) as ended:
            plan.main([*command(folder, override, longer), "--world_size=2"])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err

    path = folder / "out" / EVALUATIONS_FILE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    assert any(EVALUATIONS_FILE in fault for fault in verify(str(folder / "out")).faults)
    with pytest.raises(SystemExit):
        plan.main([*command(folder), "--world_size=2"])
    assert f"{EVALUATIONS_FILE} lacks held-out losses" in capsys.readouterr().err
