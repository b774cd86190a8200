"""Random histories of a folder: what is published of lost steps is never below what was begun, and
follows from public events alone (hazard rows 46, 59, 66)."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accounts import opened
from torchtitan_dp.base.process import Fault
from torchtitan_dp.ledger import Lineage, Losable, RunLog, Settings
from torchtitan_dp.ledger.lineage import HeldOutLoss, NoisedLoss, of_weights
from torchtitan_dp.ledger.log import EXECUTED_FILE, STARTS_FILE
from torchtitan_dp.ledger.spending import spent
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.segments import Mechanism, composition

STEPS = 40


def fresh(bands: int = 1) -> Lineage:
    """A run before its first step."""
    mechanism = Mechanism(1.0, 0.02) if bands == 1 else Mechanism(1.0, 0.02, column=cut_off(bands))
    settings = Settings(mechanism, 0.5, 1e-5, 5, "rdp", "privacy.sample_rate", "add_remove")
    loss = HeldOutLoss(3.0, 4.0, 1e-5, 1.0)
    return Lineage(settings, planned_steps=STEPS, heldout_loss=loss, run="r")


class Killed(Exception):
    """The machine failed."""


class Folder:
    """A run's folder, trained in as the trainer does, and what was really begun there."""

    def __init__(self, place: Path, bands: int = 1) -> None:
        self.place, self.bands = place, bands
        self.published = fresh(bands)
        self.checkpoints: list[Lineage] = []
        self.begun: list[int] = []  # the numbers of steps
        self.losses = 0

    def check(self, lineage: Lineage) -> None:
        """Assert that an account is not below the truth, in steps, in each group, in losses."""
        assert lineage.steps_executed >= len(self.begun)
        groups = Counter(number % self.bands for number in self.begun)
        parts = composition(spent(lineage))
        assert sum(part.steps for part in parts) >= max(groups.values(), default=0)
        loss = lineage.heldout_loss
        assert loss is not None
        assert loss.begun >= self.losses

    def look(self) -> None:
        """Look into the folder from outside."""
        log = RunLog(str(self.place))
        seen = log.enter_lost(self.published)
        assert log.undercounted(seen) == ""
        self.check(seen)

    def start(self, interval: int, *, in_background: bool = False) -> "Start":
        """Start from the newest checkpoint."""
        log, lineage = RunLog(str(self.place)), fresh(self.bands)
        if self.checkpoints:
            assert log.knows(self.checkpoints[-1].start)
            lineage = of_weights(self.published, self.checkpoints[-1])
        most = min(interval * (1 + in_background), STEPS)
        lineage = opened(lineage, log, Losable(most, interval))
        self.check(lineage)
        return Start(self, log, lineage, interval, in_background)


class Start:
    """One start, in a process."""

    def __init__(
        self, folder: Folder, log: RunLog, lineage: Lineage, interval: int, in_background: bool
    ) -> None:
        self.folder, self.log, self.lineage = folder, log, lineage
        self.interval, self.in_background = interval, in_background
        self.under_way: Lineage | None = None
        self.chance: random.Random | None = None  # of failures; None: there are none
        self.saves = True

    def step(self) -> None:
        """Take a step, save where that is due, and publish a loss after the last one."""
        number = self.lineage.steps + 1
        self.log.begin_step(number)
        self.folder.begun.append(number)
        self.fail(0.04)
        self.lineage = replace(self.lineage, steps=number)
        self.folder.check(self.lineage)
        if number % self.interval == 0 and self.saves:
            self.save(self.in_background)

    def finish(self) -> None:
        """Publish a loss after the last step, if that was not done."""
        step, loss = self.lineage.steps, self.lineage.heldout_loss
        assert loss is not None
        if not loss.is_due(step):
            return
        self.log.begin_loss(step)
        self.folder.losses += 1
        self.fail(0.3)
        loss = replace(loss, begun=loss.begun + 1, noised=NoisedLoss(step, 1.0, 0.1))
        self.lineage = self.folder.published = replace(self.lineage, heldout_loss=loss)
        self.folder.check(self.lineage)

    def save(self, in_background: bool = False) -> None:
        """Publish, and save a checkpoint; the one before, in the background, is whole by then."""
        self.folder.published = self.lineage
        self.fail(0.04)
        if self.under_way is not None:
            self.folder.checkpoints.append(self.under_way)
            self.log.saved(self.under_way.steps)
        self.under_way = self.lineage if in_background else None
        if not in_background:
            self.folder.checkpoints.append(self.lineage)
            self.fail(0.04)
            self.log.saved(self.lineage.steps)

    def fail(self, probability: float) -> None:
        """Die, with a checkpoint under way or a line of a log half written, or neither."""
        if self.chance is None or self.chance.random() >= probability:
            return
        if self.under_way is not None and self.chance.random() < 0.5:
            self.folder.checkpoints.append(self.under_way)
        if self.chance.random() < 0.3:
            name = self.chance.choice([STARTS_FILE, EXECUTED_FILE])
            with open(self.folder.place / name, "ab") as file:
                file.write(b"saved 3f 1")
        raise Killed


def live(folder: Folder, chosen: random.Random) -> None:
    """Live through a history, and assert after each event that all is counted."""
    for _ in range(chosen.randint(1, 9)):
        kind = chosen.random()
        if kind < 0.3:  # newer checkpoints are damaged
            del folder.checkpoints[chosen.randrange(len(folder.checkpoints) + 1) :]
        start = folder.start(chosen.choice([1, 2, 3, 5, 10]), in_background=chosen.random() < 0.4)
        start.chance, start.saves = chosen, chosen.random() < 0.9
        try:
            for _ in range(chosen.randint(0, 15)):
                if start.lineage.steps < STEPS:
                    start.step()
                folder.look()
            if chosen.random() < 0.6:  # a stop as requested, or the end
                start.save()
                start.log.end_start(start.lineage.steps)
                if start.lineage.steps == STEPS:
                    start.finish()
        except (Killed, Fault):
            pass
        folder.look()


@pytest.mark.parametrize("seed", range(60))
def test_row46_no_history_publishes_fewer_steps_than_were_begun(tmp_path, seed):
    chosen = random.Random(seed)
    live(Folder(tmp_path, chosen.choice([1, 1, 2, 3, 4])), chosen)


def finished(place: Path, events: list[str], interval: int, clock: random.Random) -> Lineage:
    """Train to the end through public events; a clock decides how many steps fit between two."""
    place.mkdir()
    folder = Folder(place)
    for event in events:
        start = folder.start(interval)
        left = (STEPS - 1 - start.lineage.steps) // 2
        for _ in range(clock.randint(1, max(left, 1))):
            start.step()
        if event == "crash":
            continue
        start.save()
        start.log.end_start(start.lineage.steps)
        if event == "damage":
            folder.checkpoints = [c for c in folder.checkpoints if c.steps < start.lineage.steps]
    start = folder.start(interval)
    while start.lineage.steps < STEPS:
        start.step()
    start.save()
    start.log.end_start(STEPS)
    start.finish()
    return start.lineage


@pytest.mark.parametrize("seed", range(20))
def test_row59_what_is_published_follows_from_public_events_alone(tmp_path, seed):
    chosen = random.Random(seed)
    events = chosen.choices(["crash", "stop", "damage"], k=chosen.randint(0, 4))
    interval = chosen.choice([1, 4, 10])
    found = [
        finished(tmp_path / str(clock), events, interval, random.Random(1000 * seed + clock))
        for clock in range(4)
    ]
    assert {one.steps_executed for one in found} == {
        STEPS + interval * (events.count("crash") + events.count("damage"))
    }
    assert len({one.heldout_loss for one in found}) == 1
