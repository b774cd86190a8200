"""The noise of a search's trials: all together spend its epsilon, and nearly all of it."""

import dataclasses
import math

import pytest

from tests.accounts import mechanism
from torchtitan_dp.ledger import Lineage, Settings
from torchtitan_dp.ledger.lineage import Ancestor, HeldOutLoss, not_private
from torchtitan_dp.ledger.spending import Run, total
from torchtitan_dp.privacy import accounting, published_loss
from torchtitan_dp.privacy.segments import Mechanism, Segment
from torchtitan_dp.tune.__main__ import _epsilon_of_loss, grid, split

DELTA = 1e-5


def planned(kind, steps, accountant="pld", ancestors=()):
    """The ledger of a run of so many steps that has not begun."""
    terms = Settings(kind, 1.0, DELTA, 5, accountant, "", "zero_out")
    loss = HeldOutLoss(1.0, 4.0, DELTA, 1.0)
    return Lineage(terms, planned_steps=steps, ancestors=ancestors, heldout_loss=loss)


def banded(sample_rate):
    return Mechanism(1.0, sample_rate, column=(1.0, 0.5, 0.375, 0.3125))


TRIALS = {
    "two alike": [(mechanism(1.0, 0.01), 50)] * 2,
    "nine alike": [(mechanism(1.0, 0.02), 30)] * 9,
    "batch x steps": [(mechanism(1.0, 0.01 * 4**n), 400 // 4**n) for n in range(4)],
    "bands": [(mechanism(1.0, 0.05), 40), (banded(0.05), 40), (banded(0.05), 40)],
    "estimated norms": [(mechanism(1.0, 0.05, 32), 10), (mechanism(1.0, 0.1, 32), 5)],
}


@pytest.mark.parametrize(
    "name, target",
    [("two alike", 0.5), ("nine alike", 8.0), *((name, 4.0) for name in [*TRIALS][2:])],
)
def test_all_trials_together_spend_the_target_and_each_the_same(name, target):
    each, multipliers = split([planned(*trial) for trial in TRIALS[name]], target)
    kinds = [kind.with_noise(s) for (kind, _), s in zip(TRIALS[name], multipliers, strict=True)]
    alone = [Segment(kind, steps) for kind, (_, steps) in zip(kinds, TRIALS[name], strict=True)]
    assert 0.99 * target <= accounting.compose(alone, delta=DELTA, accountant="pld") <= target
    for segment in alone:
        assert 0.99 * each <= accounting.compose([segment], delta=DELTA, accountant="pld") <= each


@pytest.mark.parametrize("trials", [2, 9])
@pytest.mark.parametrize("target", [0.5, 4.0])
def test_all_published_losses_together_spend_the_target(trials, target):
    """One of each trial, whose start finds its noise from an epsilon."""
    ledgers = [planned(mechanism(5.0, 0.01), 50) for _ in range(trials)]
    each = _epsilon_of_loss(ledgers, target)
    sigma = published_loss.noise_for(target_epsilon=each, delta=DELTA)
    loss = HeldOutLoss(sigma, 4.0, DELTA, each)
    ledgers = [dataclasses.replace(one, heldout_loss=loss) for one in ledgers]
    spent = accounting.compose(
        [Segment(Mechanism(sigma / math.sqrt(trials), 1.0), 1)], delta=DELTA, accountant="pld"
    )
    assert 0.99 * target <= spent <= target
    found = total([Run(one.run, one, "") for one in ledgers])
    assert found.heldout_epsilon == pytest.approx(spent, rel=1e-6)


def ancestors(sigma, steps):
    terms = planned(mechanism(sigma, 0.02), steps, "rdp").settings
    return (Ancestor("another/1", terms, steps, steps, 0),)


def test_what_the_initial_weights_spent_counts_once():
    before = ancestors(1.0, 100)
    spent = before[0].settings.epsilon(100)
    ledgers = [planned(mechanism(1.0, 0.02), 20, "rdp", before) for _ in range(3)]
    _, multipliers = split(ledgers, spent + 1)
    parts = [Segment(mechanism(sigma, 0.02), 20) for sigma in multipliers]
    parts.append(Segment(mechanism(1.0, 0.02), 100))
    together = accounting.compose(parts, delta=DELTA, accountant="rdp")
    assert 0.99 * (spent + 1) <= together <= spent + 1
    with pytest.raises(ValueError, match=r"initial weights have spent \d"):
        split(ledgers, spent * 0.9)


def test_weights_that_are_not_private_are_refused():
    ledgers = [not_private(planned(mechanism(1.0, 0.02), 20), "so") for _ in range(2)]
    with pytest.raises(ValueError, match="not private"):
        split(ledgers, 1.0)


def test_a_grid_has_every_combination_once():
    tries = ["training.global_batch_size/training.steps=8/40,16/20", "optimizer.lr=1e-3,3e-3,1e-2"]
    found = grid(tries)
    assert len(found) == 6
    assert {one["training.steps"] for one in found if one["training.global_batch_size"] == "8"} == {
        "40"
    }


@pytest.mark.parametrize(
    "tries, names",
    [
        (["optimizer.lr"], "write KEY="),
        (["optimizer.lr=1e-3,"], "write KEY="),
        (["optimizer.lr/training.steps=1e-3/4,3e-3"], "write KEY="),
        (["optimizer.lr=1e-3"], "nothing to compare"),
        (["optimizer.lr=1e-3,1e-3"], "would spend twice"),
        (["optimizer.lr=1e-3,3e-3", "optimizer.lr=1e-2,1"], "optimizer.lr is there twice"),
        (["privacy.delta=1e-3,1e-5"], "privacy.delta is not tried"),
        (["training.seq_len=32,64"], "training.seq_len is not tried"),
    ],
)
def test_what_cannot_be_tried(tries, names):
    with pytest.raises(ValueError, match=r"^--try") as refused:
        grid(tries)
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)
