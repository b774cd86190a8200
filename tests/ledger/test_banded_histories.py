"""Random histories of stops, crashes and resumes under correlated noise: the ledger never counts
fewer rounds than the group that was drawn most."""

import random
from collections import Counter

import pytest

from torchtitan_dp.ledger import ExecutedSteps, Ledger, Settings
from torchtitan_dp.privacy.mechanism import BandedGaussian, composition

STEPS = 40


def rounds(ledger: Ledger) -> int:
    return sum(part.steps for part in composition(ledger.executed()))


def settings(bands: int) -> Settings:
    mechanism = BandedGaussian(1.0, 0.02, bands=bands)
    return Settings(mechanism, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove")


def live(folder: str, chosen: random.Random) -> None:
    """Live through a history in a folder, and assert after each start and step that it counts."""
    bands, most_lost = chosen.choice([2, 3, 4, 8]), chosen.choice([1, 2, 3, 10])
    terms = settings(bands)
    saved: list[dict[str, object]] = []
    drawn: Counter[int] = Counter()  # group -> steps that drew from it, whatever became of them
    for _ in range(chosen.randint(1, 7)):
        ledger = Ledger(terms)
        if saved and chosen.random() < 0.9:
            # Mostly the newest, as training does; an older one where that is damaged.
            place = -1 if chosen.random() < 0.7 else chosen.randrange(len(saved))
            ledger.resume_from(Ledger.from_json(saved[place]), new_segment=False)
        executed = ExecutedSteps(folder)
        ledger.start = executed.new_start()
        executed.adopt(ledger.taken())
        executed.enter_lost(ledger)
        assert rounds(ledger) >= max(drawn.values(), default=0)
        executed.begin_start(most_lost)
        since_saved = 0
        for _ in range(chosen.randint(0, 9)):
            step = ledger.steps + 1
            if step > STEPS or since_saved == most_lost:
                break
            executed.begin(step, terms)
            drawn[step % bands] += 1
            since_saved += 1
            if chosen.random() < 0.1:
                break  # a crash in the middle of its update
            ledger.steps = step
            assert rounds(ledger) >= max(drawn.values())
            if chosen.random() < 0.4:
                saved.append(ledger.to_json())
                since_saved = 0
        if since_saved == 0 and chosen.random() < 0.5:
            executed.end_start()
        elif chosen.random() < 0.2:
            with open(f"{folder}/steps_executed.log", "ab") as file:
                file.write(b"7 1.0 0.")  # a line that a crash of the machine has torn


@pytest.mark.parametrize("seed", range(12))
def test_no_history_counts_fewer_rounds_than_the_group_that_was_drawn_most(tmp_path, seed):
    live(str(tmp_path), random.Random(seed))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_no_long_row_of_histories_counts_fewer(tmp_path, seed):
    live(str(tmp_path), random.Random(seed))
