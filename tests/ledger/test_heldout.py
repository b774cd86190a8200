"""Random histories of stops, crashes and resumes: the ledger counts every published held-out loss.
"""

import json
import random

import pytest

from torchtitan_dp.ledger import ExecutedSteps, Ledger, Settings
from torchtitan_dp.ledger.executed import EVALUATIONS_FILE
from torchtitan_dp.ledger.heldout import HeldOutLosses, NoisedLoss, scheduled
from torchtitan_dp.privacy.mechanism import PoissonGaussian
from torchtitan_dp.privacy.published_loss import LossNoise

STEPS = 40
TERMS = Settings(PoissonGaussian(1.0, 0.1), 0.5, 1e-5, 5, "rdp", "", "zero_out")


def fresh(kind: str, freq: int) -> Ledger:
    terms = HeldOutLosses(LossNoise(kind, 3.0), 4.0, 1e-5, 1.0, freq)
    return Ledger(TERMS, planned_steps=STEPS, heldout_losses=terms)


def due(step: int, freq: int) -> bool:
    return step == 1 or step % freq == 0


def live(folder: str, chosen: random.Random) -> None:
    """Live through a history in a folder, and assert at each point that all is counted."""
    freq, most_lost = chosen.choice([1, 3, 7, 10, 60]), chosen.choice([1, 2, 5, 10])
    kind = chosen.choice(["laplace", "gaussian"])
    planned = scheduled(freq, 1, STEPS)
    saved: list[str] = []
    begun = crashes = 0  # whatever became of them

    def counted(ledger: Ledger) -> int:
        losses = ledger.heldout_losses
        count = losses.evaluations(ledger.steps, ledger.planned_steps)
        spent = losses.noise.epsilon(count, delta=losses.delta)
        assert ledger.heldout_epsilon() == pytest.approx(spent)
        again = Ledger.from_json(ledger.to_json())
        assert again.heldout_losses == losses
        return count

    for _ in range(chosen.randint(1, 7)):
        ledger = fresh(kind, freq)
        if saved and chosen.random() < 0.9:
            place = -1 if chosen.random() < 0.7 else chosen.randrange(len(saved))
            ledger.resume_from(Ledger.from_json(saved[place]), new_segment=False)
        executed = ExecutedSteps(folder)
        ledger.start = executed.new_start()
        executed.adopt(ledger.taken(), ledger.evaluated())
        executed.enter_lost(ledger)
        begins_at = counted(ledger)
        assert begins_at >= max(begun, planned)
        if not saved and crashes == 0 and begun == 0:
            assert begins_at == planned
        executed.begin_start(most_lost)
        crashes += 1  # until it ends
        since_saved = 0
        for _ in range(chosen.randint(0, 12)):
            step = ledger.steps + 1
            if step > STEPS or since_saved == most_lost:
                break
            executed.begin(step, TERMS)
            since_saved += 1
            ledger.steps = step
            if due(step, freq):
                executed.begin_evaluation()
                begun += 1
                if chosen.random() < 0.1:
                    break  # a crash before it is entered
                losses = ledger.heldout_losses
                ledger.heldout_losses = losses.kept(*losses.losses, NoisedLoss(step, 1.0, 0.1))
            assert counted(ledger) == begins_at  # nothing that a clock decides changes it
            if chosen.random() < 0.4:
                saved.append(ledger.to_json())
                since_saved = 0
        if since_saved == 0 and saved and json.loads(saved[-1])["steps"] == ledger.steps:
            executed.end_start()
        elif chosen.random() < 0.3:
            with open(f"{folder}/{EVALUATIONS_FILE}", "ab") as file:
                file.write(b"\n3d2e53a1")  # a line that a crash of the machine has torn
            begun += 1


@pytest.mark.parametrize("seed", range(40))
def test_row66_no_history_hides_an_evaluation(tmp_path, seed):
    live(str(tmp_path), random.Random(seed))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_row66_no_long_row_of_histories_hides_one(tmp_path, seed):
    live(str(tmp_path), random.Random(seed))


def test_row66_the_number_that_a_crash_lost_does_not_show(tmp_path):
    """Two histories that lost other numbers of evaluations publish the same."""
    found = []
    for lost in (0, 1, 2):
        folder = tmp_path / str(lost)
        folder.mkdir()
        ledger, executed = fresh("gaussian", 5), ExecutedSteps(str(folder))
        ledger.start = executed.new_start()
        executed.begin_start(10)
        for step in range(1, 1 + 5 * lost):
            executed.begin(step, TERMS)
            if due(step, 5) and step > 1:
                executed.begin_evaluation()
        again = ExecutedSteps(str(folder))
        resumed = fresh("gaussian", 5)
        resumed.start = again.new_start()
        again.enter_lost(resumed)
        found.append(resumed.heldout_losses)
    assert found[0] == found[1] == found[2]
    assert found[0].lost == 3


def test_a_schedule_counts_each_evaluation_once():
    for freq in (1, 2, 7, 40, 50):
        for first in range(1, 42):
            for last in range(42):
                steps = [step for step in range(first, last + 1) if due(step, freq)]
                assert scheduled(freq, first, last) == len(steps)
