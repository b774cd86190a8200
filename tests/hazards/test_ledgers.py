"""Hazards of what is saved, loaded and taken up again at a start, by row: the trainer's methods, on
stand-ins; ../checkpoint/test_resume.py shows the same on whole runs."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch

from tests import build
from tests.accounts import begun, ended, export, publish, with_terms
from tests.hazards.test_trainer import SETTINGS, STEP, bookkeeping
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint import bookkeeping as bookkeeping_module
from torchtitan_dp.checkpoint.bookkeeping import Bookkeeping
from torchtitan_dp.checkpoint.plan import settings_of
from torchtitan_dp.checkpoint.start import decide_start, with_initial
from torchtitan_dp.gradients.optimizer import DPOptimizer
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.lineage import Ancestor, History, not_private
from torchtitan_dp.ledger.spending import inherited
from torchtitan_dp.train.trainer import DPTrainer

# Checkpoints.


def saving(**changes):
    ledger = Lineage(SETTINGS, steps=STEP)
    return SimpleNamespace(
        clipped_sum=MagicMock(accumulating=False),
        books=bookkeeping(ledger),
        ledger=ledger,
        job_config=build.config(),
        step=STEP,
        ntokens_seen=12_345,  # what was really seen
        **changes,
    )


def test_row44_a_checkpoint_holds_expectations_and_the_ledger():
    trainer = saving()
    state = DPTrainer.state_dict(trainer)
    assert set(state) == {"step", "ntokens_seen", "ledger"}
    assert state["step"] == STEP
    assert state["ntokens_seen"] == STEP * 6 * trainer.job_config.training.seq_len
    assert Lineage.from_json(state["ledger"]) == trainer.ledger
    trainer.clipped_sum.accumulating = True
    with pytest.raises(RuntimeError, match="un-noised"):
        DPTrainer.state_dict(trainer)


def accumulating():
    built = build.build()
    built.accumulate(*build.data(samples=1))
    during = built.gradients.clipped_sum.accumulating
    built.gradients.clipped_sum.reset()
    return during, built.gradients.clipped_sum.accumulating


def test_row44_a_sum_says_that_it_is_accumulating():
    assert on_ranks(1, accumulating) == [(True, False)]


def loading(folder, sigma=1.0, private=True):
    """What a load does, in a trainer whose configuration has this noise, and the state to load."""
    config = build.config(f"--job.dump_folder={folder}", f"--privacy.noise_multiplier={sigma}")
    terms = settings_of(build.config(), 10, 1.0)
    loaded = ended(Lineage(terms, private=private, caveats=("a seed",), run="r"), folder, STEP)
    did, books = [], bookkeeping(Lineage(terms, run="r"), config)
    books._units, books._draw_keys = 10, lambda: did.append("keys")
    state = {"step": STEP, "ntokens_seen": 0, "ledger": loaded.to_json()}
    return did, SimpleNamespace(books=books, step=0), state


@pytest.mark.parametrize("private", [True, False])
def test_row11_31_and_45_loading_takes_the_step_the_marks_and_fresh_keys(tmp_path, private):
    did, trainer, state = loading(tmp_path, private=private)
    with (
        patch.object(bookkeeping_module, "broadcast_from_rank0", lambda text: text),
        patch.object(bookkeeping_module.dist, "get_rank", lambda: 0),
    ):
        DPTrainer.load_state_dict(trainer, state)
    ledger = trainer.books.ledger
    assert (trainer.step, ledger.steps, ledger.run) == (STEP, STEP, "r")
    assert (ledger.private, ledger.caveats[0]) == (private, "a seed")
    assert did == ["keys"]


def test_row31_a_checkpoint_under_other_terms_is_not_loaded(tmp_path):
    _, trainer, state = loading(tmp_path, sigma=9.0)
    rank0 = patch.object(bookkeeping_module.dist, "get_rank", lambda: 0)
    with rank0, pytest.raises(ValueError, match=r"= 9\.0: this run was started with"):
        DPTrainer.load_state_dict(trainer, state)


def test_row45_weights_loaded_without_their_ledger_are_not_trained_on():
    books = bookkeeping(Lineage(SETTINGS))
    books._is_loaded = False
    trainer = MagicMock(books=books, model_parts=[torch.nn.Linear(2, 2)], step=1)
    trainer.job_config.training.steps = 1  # no step is left, so that nothing is rehearsed
    trainer.checkpointer.start.resumes = True
    with pytest.raises(RuntimeError, match="without its ledger"):
        DPTrainer.batch_generator(trainer, [])


# The ledger at a start.


def records(tokens="t" * 64):
    """A loader of ten units, as far as a start looks at it."""
    return SimpleNamespace(
        fingerprint="f" * 64,
        settings={},
        units=np.arange(10),
        describe=list,
        samples=SimpleNamespace(store=SimpleNamespace(fingerprint=tokens)),
    )


def opened(folder, *overrides):
    """The ledger that a start in this folder opens."""
    config = build.config(f"--job.dump_folder={folder}", *overrides)
    books = Bookkeeping(config, records(), decide_start(config), torch.device("cpu"))
    return books.ledger.to_json(), books.log.count


def stopped_after_a_step(folder, lineage):
    """What a run that was killed after its first step leaves behind."""
    publish(lineage, folder)
    begun(lineage, folder, 1)


BY_TARGET = ("--privacy.noise_multiplier=None", "--privacy.target_epsilon=8")


def test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger(tmp_path):
    """Sigma is read, not found again; "not private" stays; steps begun are counted."""
    first, count = on_ranks(1, opened, str(tmp_path), *BY_TARGET)[0]
    assert count == 0
    kept = json.loads(first)
    kept["settings"]["noise_multiplier"] *= 1.01
    earlier = not_private(Lineage.from_json(json.dumps(kept)), "a seed")
    stopped_after_a_step(tmp_path, earlier)
    second, count = on_ranks(1, opened, str(tmp_path), *BY_TARGET)[0]
    again = Lineage.from_json(second)
    assert again.settings == earlier.settings
    assert (again.private, again.caveats, count) == (False, ("a seed",), 1)


def test_row23_no_noise_is_not_private(tmp_path):
    text, _ = on_ranks(1, opened, str(tmp_path), "--privacy.noise_multiplier=0")[0]
    assert Lineage.from_json(text).private is False


# Initial weights.


def starting_from(folder, *overrides):
    """The history of a first start from the weights in this folder."""
    return with_initial(History(), build.config(*overrides), str(folder))


def test_row45_weights_without_a_ledger_must_be_said_to_be_public(tmp_path):
    with pytest.raises(ValueError, match=r"^privacy\.initial_weights_public = false: "):
        starting_from(tmp_path)
    kept = starting_from(tmp_path, "--privacy.initial_weights_public")
    assert kept.private
    assert ["public" in caveat for caveat in kept.caveats] == [True]


def test_row45_not_private_sticks_to_initial_weights(tmp_path):
    export(not_private(Lineage(SETTINGS, steps=STEP), "a seed"), tmp_path)
    later = starting_from(tmp_path, "--privacy.initial_weights_public")
    assert later.private is False
    assert "of the initial weights: a seed" in later.caveats


def test_row45_initial_weights_bring_all_that_they_spent(tmp_path):
    """Their own steps, and those of the weights that they had started from."""
    louder = with_terms(SETTINGS, noise_multiplier=4.0)
    first = Ancestor("first", louder, 7, 9, 1)
    export(Lineage(SETTINGS, steps=STEP, planned_steps=10, ancestors=(first,)), tmp_path)
    spent = inherited(starting_from(tmp_path).ancestors)
    assert set(spent) == {louder.segment(9), louder.segment(1), SETTINGS.segment(10)}


def test_row45_what_initial_weights_showed_and_their_units_are_assumptions(tmp_path):
    """A line is no file, and sigma was chosen when their run had ended."""
    export(Lineage(SETTINGS, steps=STEP), tmp_path)
    assumed = starting_from(tmp_path).caveats[-1]
    assert "decided this run's noise, rate or steps" in assumed
    assert "its units of privacy are not larger" in assumed


@pytest.mark.parametrize("counted", [0, 2, 3])
def test_row45_weights_loaded_without_their_optimizer_are_not_trained_on(counted):
    layer = torch.nn.Linear(2, 2)
    adamw = torch.optim.AdamW(layer.parameters())
    for _ in range(counted):
        layer(torch.ones(2)).sum().backward()
        adamw.step()
    trainer = MagicMock(model_parts=[layer], step=2)
    trainer.job_config.training.steps = 2
    trainer.checkpointer.start.resumes = True
    trainer.dp_optimizer = DPOptimizer(
        adamw, {}, noise_multiplier=1, max_grad_norm=1, expected_batch_size=1
    )
    if counted == 2:
        DPTrainer.batch_generator(trainer, [])
    else:
        with pytest.raises(RuntimeError, match=f"step 2, .* of .{counted}."):
            DPTrainer.batch_generator(trainer, [])


def test_row31_a_longer_run_may_not_overshoot_its_target(tmp_path):
    (text, _), *_ = on_ranks(1, opened, str(tmp_path), *BY_TARGET, "--training.steps=10")
    stopped_after_a_step(tmp_path, Lineage.from_json(text))
    refusal = "noise was fixed at its first start, and 20 training.steps would spend"
    with pytest.raises(AssertionError, match=refusal):
        on_ranks(1, opened, str(tmp_path), *BY_TARGET, "--training.steps=20")
