"""Held-out losses that are published: what they spend, in one run and over several."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from torchtitan_dp.ledger import Account, Lineage, Settings
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.runs import Run, total
from torchtitan_dp.ledger.settings import HeldOutLosses, NoisedLoss, scheduled
from torchtitan_dp.ledger.spending import (
    caveats,
    compose,
    epsilon,
    evaluations,
    heldout_epsilon,
    initial_steps,
    most_evaluations,
    own_steps,
    spending,
)
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.published_loss import LossNoise
from torchtitan_dp.privacy.segments import Mechanism, Segment
from torchtitan_dp.watch.validate import HeldOutValidator

STEPS = 40
TERMS = Settings(Mechanism(1.0, 0.1), 0.5, 1e-5, 5, "rdp", "", "zero_out")


def due(step: int, freq: int, last: int = STEPS) -> bool:
    """As the validator has it: `watch.validate`."""
    config: Any = SimpleNamespace(
        validation=SimpleNamespace(freq=freq), training=SimpleNamespace(steps=last, seq_len=8)
    )
    nothing: Any = None
    return HeldOutValidator(nothing, config, nothing, nothing).should_validate(step)


def test_row66_a_schedule_counts_each_evaluation_once_and_the_end():
    for freq, last in itertools.product((1, 2, 7, 40, 50), range(42)):
        steps = [step for step in range(1, last + 1) if due(step, freq, last)]
        assert set(steps) >= {1, last} or last == 0
        for first in range(1, 42):
            assert scheduled(freq, first, last) == sum(step >= first for step in steps)


def test_row66_no_crash_loses_more_evaluations_than_are_counted():
    for freq, last in itertools.product((1, 2, 3, 7, 50), range(1, 30)):
        losses = HeldOutLosses(LossNoise("laplace", 3.0), 4.0, 1e-5, 1.0, freq)
        steps = [step for step in range(1, last + 1) if due(step, freq, last)]
        for lost in range(1, last + 1):
            most = max(
                sum(first <= step < first + lost for step in steps)
                for first in range(1, last - lost + 2)
            )
            assert losses.most_lost(lost, last) == most


def after(steps: int, kind: str = "laplace", freq: int = 10, **fields: object) -> Lineage:
    """A whole run of so many steps, with its held-out losses."""
    results = tuple(NoisedLoss(s, 1.0, 0.1) for s in range(1, steps + 1) if due(s, freq))
    losses = HeldOutLosses(LossNoise(kind, 3.0), 4.0, 1e-5, 1.0, freq, losses=results)
    lineage = Lineage(TERMS, steps=steps, planned_steps=steps, heldout_losses=losses)
    return replace(lineage, **fields)


def test_a_stop_that_noised_losses_decided_has_an_epsilon_and_one_by_others_has_none():
    for lineage in (after(20, planned_steps=40), after(20, planned_steps=40, heldout_losses=None)):
        (early,) = [one for one in caveats(lineage, 1.0, 2.0) if "not all planned steps" in one]
        names_noised = "if weights or held-out losses with noise alone did" in early
        assert names_noised == (lineage.heldout_losses is not None)
        assert ("if other losses, norms" in early) == names_noised


def behind(earlier: Lineage, lost: int = 0) -> Ancestor:
    names, losses = " ".join(earlier.names()), evaluations(earlier)
    return Ancestor(earlier.run, TERMS, names, earlier.planned_steps, lost, evaluations=losses)


def everything(lineage: Lineage, *, planned: bool = False) -> float:
    return compose(lineage, spending(lineage, lost=True, planned=planned))


def runs(*lineages: Lineage, fingerprints: tuple[str | None, ...] | None = None) -> list[Run]:
    prints = fingerprints or ("same",) * len(lineages)
    return [Run(str(i), one, prints[i]) for i, one in enumerate(lineages)]


def test_weights_that_losses_may_have_chosen_bring_them_along():
    """To a unit that was held out there, and is trained on here, or held out in both."""
    earlier = after(20)
    plain, child = after(STEPS), after(STEPS, ancestors=(behind(earlier),))
    chosen = compose(child, [*initial_steps(child), *own_steps(child), evaluations(earlier)])
    assert everything(child) == chosen > epsilon(child)
    for planned in (True, False):
        assert compose(child, spending(child, lost=False, planned=planned)) == chosen
    account = Account(child, STEPS)
    assert account.epsilon(child) == epsilon(child) < account.epsilon_executed(child)
    assert account.epsilon_executed(child) >= chosen
    assert account.epsilon_planned(child) >= chosen
    assert heldout_epsilon(child) > heldout_epsilon(plain) + 0.5
    again = Lineage.from_json(child.to_json())
    assert again.ancestors == child.ancestors
    assert heldout_epsilon(again) == heldout_epsilon(child)


def test_the_steps_that_an_ancestor_lost_are_executed_ones():
    earlier = after(20, heldout_losses=None)
    child = after(STEPS, heldout_losses=None, ancestors=(behind(earlier, lost=30),))
    found = Account(child, STEPS).epsilon_executed(child)
    assert found >= everything(child) > epsilon(child)


def test_held_out_losses_of_several_runs_add_up():
    first, second = after(STEPS), after(STEPS, "gaussian")
    one, both = total(runs(first)), total(runs(first, second))
    assert one.heldout_epsilon == heldout_epsilon(first) == pytest.approx(5 / 3)
    assert one.epsilon == epsilon(first)
    losses = [evaluations(first), evaluations(second)]
    assert both.heldout_epsilon == accounting.compose(losses, delta=1e-5, accountant="pld")
    # A unit is on the same side in both, unless their records, or the share held out, differ.
    steps = [*own_steps(first), *own_steps(second)]
    assert both.epsilon == compose(first, steps)
    apart = total(runs(first, second, fingerprints=("a", "b")), overlapping=True)
    assert apart.heldout_epsilon is None
    assert apart.epsilon == compose(first, [*losses, *steps]) > both.epsilon
    assert total(runs(after(STEPS, heldout_losses=None))).heldout_epsilon is None


def test_a_run_and_weights_that_go_on_from_it_count_its_losses_once():
    earlier = after(20)
    child = after(STEPS, ancestors=(behind(earlier),))
    alone, both = total(runs(child)), total(runs(earlier, child))
    assert both.epsilon == epsilon(child)  # the same records: a unit is held out in both, or none
    assert alone.epsilon == everything(child)
    losses = [evaluations(earlier), evaluations(child)]
    assert both.heldout_epsilon == accounting.compose(losses, delta=1e-5, accountant="pld")


def test_an_ancestor_that_is_known_twice_counts_as_it_counts_most():
    """From two of its checkpoints: the older one's ledger lacks what a crash lost since."""
    less = after(20)
    more = replace(less, heldout_losses=replace(less.heldout_losses, lost=7))
    for order in ((less, more), (more, less)):
        child = after(STEPS, ancestors=tuple(behind(one) for one in order))
        assert most_evaluations(child.ancestors) == [evaluations(more)]
        children = [after(STEPS, ancestors=(behind(one),)) for one in order]
        for found in (total(runs(child)), total(runs(*children))):
            assert found.heldout_epsilon >= heldout_epsilon(child) * (1 - 1e-9)
        steps = [
            *initial_steps(children[0]),
            *own_steps(children[0]),
            *own_steps(children[1]),
            evaluations(more),
        ]
        assert total(runs(*children)).epsilon == compose(children[0], steps)


def test_held_out_losses_of_several_runs_count_what_their_ancestors_still_planned():
    """As those of one do: weights or losses may have decided when the ancestor stopped."""
    earlier = after(20, planned_steps=2000)
    first, second = (after(STEPS, ancestors=(behind(earlier),)) for _ in range(2))
    both = total(runs(first, second))
    assert both.heldout_epsilon > total(runs(first)).heldout_epsilon
    assert both.heldout_epsilon == accounting.compose(
        [
            *(evaluations(one) for one in (first, second, earlier)),
            *initial_steps(first),
            Segment(TERMS.mechanism, 1980),
        ],
        delta=1e-5,
        accountant="pld",
    )


def test_runs_whose_records_are_not_known_are_not_taken_for_runs_on_the_same():
    unknown = runs(after(STEPS), after(STEPS), fingerprints=(None, None))
    with pytest.raises(ValueError, match=r"'0' has no data_fingerprint\.private"):
        total(unknown)
    assert total(unknown, overlapping=True).heldout_epsilon is None
    assert total(unknown[:1]).heldout_epsilon is not None
