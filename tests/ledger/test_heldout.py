"""Random histories of stops, crashes and resumes: every published held-out loss is counted."""

import dataclasses
import json
import random

import pytest

from torchtitan_dp.ledger import Account, ExecutedSteps, Ledger, Settings
from torchtitan_dp.ledger.caveats import caveats
from torchtitan_dp.ledger.executed import EVALUATIONS_FILE
from torchtitan_dp.ledger.heldout import HeldOutLosses, NoisedLoss, scheduled
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.runs import Run, total
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import PoissonGaussian, Segment
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
    changes = chosen.random() < 0.5  # the frequency, from one start to the next
    begun = 0  # whatever became of them

    def counted(ledger: Ledger) -> int:
        losses = ledger.heldout_losses
        count = losses.evaluations(ledger.steps, ledger.planned_steps)
        spent = losses.noise.epsilon(count, delta=losses.delta)
        assert ledger.heldout_epsilon() == pytest.approx(spent)
        again = Ledger.from_json(ledger.to_json())
        assert again.heldout_losses == losses
        return count

    for start in range(chosen.randint(1, 7)):
        if changes and start:
            freq, planned = chosen.choice([1, 3, 7, 10, 60]), 0
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
        if start == 0:
            assert begins_at == planned
        executed.begin_start(most_lost, ledger.heldout_losses)
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
            # Nothing that a clock decides changes it; with another frequency the step that a start
            # goes on from may have been due, and was not evaluated.
            assert begins_at - (changes and start > 0) <= counted(ledger) <= begins_at
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
        executed.begin_start(10, ledger.heldout_losses)
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


def after(steps: int, kind: str = "laplace", freq: int = 10, **fields: object) -> Ledger:
    """A ledger of a whole run of so many steps, with its held-out losses."""
    ledger = fresh(kind, freq)
    ledger.steps = ledger.planned_steps = steps
    losses = (NoisedLoss(s, 1.0, 0.1) for s in range(1, steps + 1) if due(s, freq))
    ledger.heldout_losses = ledger.heldout_losses.kept(*losses)
    for name, value in fields.items():
        setattr(ledger, name, value)
    return ledger


def test_a_stop_that_noised_losses_decided_has_an_epsilon_and_one_by_others_has_none():
    for ledger in (after(20, planned_steps=40), after(20, planned_steps=40, heldout_losses=None)):
        (early,) = [one for one in caveats(ledger, 1.0, 2.0) if "not all planned steps" in one]
        names_noised = "if weights or held-out losses with noise alone did" in early
        assert names_noised == (ledger.heldout_losses is not None)
        assert ("if other losses, norms" in early) == names_noised


def behind(earlier: Ledger, lost: Segment | None = None) -> Ancestor:
    segments = tuple(s for s in earlier.segments() if s.steps)
    names, planned = " ".join(earlier.names()), earlier.planned_steps
    return Ancestor(earlier.run, segments, names, planned, lost, earlier.evaluations())


def runs(*ledgers: Ledger, fingerprints: tuple[str, ...] | None = None) -> list[Run]:
    prints = fingerprints or ("same",) * len(ledgers)
    return [Run(str(i), one, one.taken(), prints[i]) for i, one in enumerate(ledgers)]


def test_weights_that_losses_may_have_chosen_bring_them_along(tmp_path):
    """To a unit that was held out there, and is trained on here, or held out in both."""
    earlier = after(20)
    plain, child = after(STEPS), after(STEPS, ancestors=[behind(earlier)])
    chosen = child.compose([*child.taken_in_all(), earlier.evaluations()])
    assert child.compose(child.executed()) == chosen > child.epsilon()
    assert child.compose(child.kept_and_planned()) == chosen
    account = Account(child, STEPS)
    assert account.epsilon() == child.epsilon() < account.epsilon_executed()
    assert account.epsilon_executed() >= chosen
    assert account.epsilon_planned() >= chosen
    assert child.heldout_epsilon() > plain.heldout_epsilon() + 0.5
    again = Ledger.from_json(child.to_json())
    assert again.ancestors == child.ancestors
    assert again.heldout_epsilon() == child.heldout_epsilon()


def test_the_steps_that_an_ancestor_lost_are_executed_ones():
    earlier = after(20, heldout_losses=None)
    lost = Segment(earlier.settings.mechanism, 30)
    child = after(STEPS, heldout_losses=None, ancestors=[behind(earlier, lost)])
    found = Account(child, STEPS).epsilon_executed()
    assert found >= child.compose(child.executed()) > child.epsilon()


def test_held_out_losses_of_several_runs_add_up():
    first, second = after(STEPS), after(STEPS, "gaussian")
    one, both = total(runs(first)), total(runs(first, second))
    assert one.heldout_epsilon == first.heldout_epsilon() == pytest.approx(5 / 3)
    assert one.epsilon == first.epsilon()
    assert both.heldout_epsilon == accounting.compose(
        [first.evaluations(), second.evaluations()], delta=1e-5, accountant="pld"
    )
    # A unit is on the same side in both, unless their records, or the share held out, differ.
    assert both.epsilon == first.compose([*first.taken_in_all(), *second.taken_in_all()])
    apart = total(runs(first, second, fingerprints=("a", "b")), overlapping=True)
    assert apart.heldout_epsilon is None
    every = [first.evaluations(), second.evaluations()]
    every += [*first.taken_in_all(), *second.taken_in_all()]
    assert apart.epsilon == first.compose(every) > both.epsilon
    assert total(runs(after(STEPS, heldout_losses=None))).heldout_epsilon is None


def test_a_run_and_weights_that_go_on_from_it_count_its_losses_once():
    earlier = after(20)
    child = after(STEPS, ancestors=[behind(earlier)])
    alone, both = total(runs(child)), total(runs(earlier, child))
    assert both.epsilon == child.epsilon()  # the same records: a unit is held out in both, or none
    assert alone.epsilon == child.compose(child.executed())
    assert both.heldout_epsilon == accounting.compose(
        [earlier.evaluations(), child.evaluations()], delta=1e-5, accountant="pld"
    )


def test_an_ancestor_that_is_known_twice_counts_as_it_counts_most():
    """From two of its checkpoints: the older one's ledger lacks what a crash lost since."""
    less = after(20)
    more = after(20)
    more.run, more.heldout_losses = less.run, dataclasses.replace(more.heldout_losses, lost=7)
    for order in ((less, more), (more, less)):
        child = after(STEPS, ancestors=[behind(one) for one in order])
        assert child.evaluations_before() == [more.evaluations()]
        children = [after(STEPS, ancestors=[behind(one)]) for one in order]
        for found in (total(runs(child)), total(runs(*children))):
            assert found.heldout_epsilon >= child.heldout_epsilon() * (1 - 1e-9)
        expected = [s for one in children for s in one.taken_in_all()] + [more.evaluations()]
        assert total(runs(*children)).epsilon == pytest.approx(child.compose(expected), rel=0.05)
        assert total(runs(*children)).epsilon >= children[0].compose(
            [*children[0].before(), *children[0].own(), *children[1].own(), more.evaluations()]
        )


def test_held_out_losses_of_several_runs_count_what_their_ancestors_still_planned():
    """As those of one do: weights or losses may have decided when the ancestor stopped."""
    earlier = after(20, planned_steps=2000)
    first, second = (after(STEPS, ancestors=[behind(earlier)]) for _ in range(2))
    both = total(runs(first, second))
    assert both.heldout_epsilon > total(runs(first)).heldout_epsilon
    assert both.heldout_epsilon == accounting.compose(
        [
            *(one.evaluations() for one in (first, second, earlier)),
            *first.before(),
            Segment(TERMS.mechanism, 1980),
        ],
        delta=1e-5,
        accountant="pld",
    )


def test_steps_kept_come_with_the_losses_that_chose_the_weights_behind_them():
    earlier = after(20)
    child = after(STEPS, ancestors=[behind(earlier)])
    assert child.kept() == [*child.taken_in_all(), earlier.evaluations()]
    assert child.compose(child.kept()) > child.epsilon()


def test_row66_another_frequency_later_does_not_show_how_many_a_crash_lost(tmp_path):
    """A start counts what it could lose with its own frequency."""
    found = []
    for lost in (0, 1, 4, 9):
        folder = tmp_path / str(lost)
        folder.mkdir()
        ledger, executed = fresh("gaussian", 1), ExecutedSteps(str(folder))
        ledger.start = executed.new_start()
        executed.begin_start(10, ledger.heldout_losses)
        for step in range(1, 1 + lost):
            executed.begin(step, TERMS)
            executed.begin_evaluation()
        again = ExecutedSteps(str(folder))
        resumed = fresh("gaussian", 7)
        resumed.start = again.new_start()
        again.enter_lost(resumed)
        found.append(resumed.heldout_losses.lost)
    assert found == [10] * 4


def test_runs_whose_records_are_not_known_are_not_taken_for_runs_on_the_same(tmp_path):
    unknown = runs(after(STEPS), after(STEPS), fingerprints=(None, None))
    with pytest.raises(ValueError, match=r"'0' has no data_fingerprint\.private"):
        total(unknown)
    assert total(unknown, overlapping=True).heldout_epsilon is None
    assert total(unknown[:1]).heldout_epsilon is not None
