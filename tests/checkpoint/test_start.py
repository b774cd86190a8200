"""How a run starts is decided once: drawn, initial or its own weights, and the ledger with them."""

import os

import pytest
import torch

from tests import build
from tests.accounts import publish
from tests.checkpoint import test_safe_load
from tests.checkpoint.test_safe_load import flip
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint.start import (
    Start,
    Weights,
    check_start,
    confirmed,
    decide_start,
    plan_start,
)
from torchtitan_dp.checkpoint.terms import settings_of
from torchtitan_dp.ledger import Lineage

META = {"weight": torch.empty(2, 3, device="meta")}
UNITS = 40


def config(folder, *overrides):
    return build.config("--checkpoint.enable", f"--job.dump_folder={folder}", *overrides)


def ledger(folder, steps):
    """That of a run with so many steps."""
    return Lineage(settings_of(config(folder), UNITS, 1.0), steps=steps, run="r", start="s")


def save(place, text):
    """A checkpoint that holds a weight, and `text` as its ledger."""
    state = {"weight": torch.arange(6.0).reshape(2, 3), "train_state": {"ledger": text}}
    test_safe_load.save(state, place)
    return place


def own(folder, *steps):
    for step in steps:
        save(folder / "checkpoint" / f"step-{step}", ledger(folder, step).to_json())


def truncate(place):
    path = place / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def test_weights_are_drawn_where_nothing_is_there(tmp_path):
    assert decide_start(config(tmp_path)) == Start(Weights.DRAWN)
    own(tmp_path, 9, 10)
    assert decide_start(config(tmp_path)).step == 10  # the largest number, not the last word
    start = decide_start(build.config("--checkpoint.no-enable", f"--job.dump_folder={tmp_path}"))
    assert (start.loads, start.resumes, start.own_ledger, start.initial) == (
        False,
        False,
        None,
        None,
    )


@pytest.mark.parametrize(
    "key, place, in_hf, weights",
    [
        ("checkpoint.initial_load_path", "/w", False, Weights.INITIAL_DCP),
        ("checkpoint.initial_load_path", "/w", True, Weights.INITIAL_HF),
        ("model.hf_assets_path", "/hf", True, Weights.INITIAL_HF),
    ],
)
def test_initial_weights_are_found_by_their_key(tmp_path, key, place, in_hf, weights):
    in_format = ["--checkpoint.initial_load_in_hf"] if in_hf else []
    start = decide_start(config(tmp_path, f"--{key}={place}", *in_format))
    assert start == Start(weights, place, key)
    assert (start.loads, start.resumes) == (True, False)


def test_a_checkpoint_of_its_own_comes_before_initial_weights(tmp_path):
    own(tmp_path, 2, 4)
    start = decide_start(config(tmp_path, "--checkpoint.initial_load_path=/nowhere"))
    assert (start.weights, start.step) == (Weights.OWN, 4)
    assert start.own_ledger == ledger(tmp_path, 4)
    assert start.initial is None
    check_start(start, META, "here")
    with pytest.raises(ValueError, match=r"^here: its weight is \[9\]"):
        check_start(start, {"weight": torch.empty(9, device="meta")}, "here")


def test_the_newest_is_taken_whose_files_have_their_sizes(tmp_path):
    own(tmp_path, 2, 4)
    truncate(tmp_path / "checkpoint" / "step-4")
    start = decide_start(config(tmp_path))
    assert (start.step, start.own_ledger) == (2, ledger(tmp_path, 2))
    truncate(tmp_path / "checkpoint" / "step-2")
    start = decide_start(config(tmp_path))
    assert start.resumes  # not from the beginning, as if there were none
    with pytest.raises(ValueError, match=r"^no checkpoint in .* is whole \(step-4: "):
        check_start(start, META, "here")


def test_initial_weights_bring_the_ledger_in_them_or_beside_them(tmp_path):
    earlier = ledger(tmp_path, 7)
    inside = save(tmp_path / "elsewhere" / "step-7", earlier.to_json())
    start = decide_start(config(tmp_path / "run", f"--checkpoint.initial_load_path={inside}"))
    assert start.initial.ledger == earlier
    assert not start.initial.any_begun
    publish(earlier, tmp_path / "elsewhere", 7)
    (tmp_path / "elsewhere" / "hf").mkdir()
    start = Start(Weights.INITIAL_HF, str(tmp_path / "elsewhere" / "hf"))
    assert start.initial.ledger.steps == 7
    assert start.initial.any_begun
    assert Start(Weights.INITIAL_HF, str(tmp_path)).initial.ledger is None


def test_an_unreadable_ledger_leaves_the_plan_to_the_folders_account(tmp_path):
    """The load, which refuses it, is yet to come; until then the terms are those of the folder."""
    save(tmp_path / "checkpoint" / "step-3", "{")
    start, account = decide_start(config(tmp_path)), ledger(tmp_path, 3)
    assert (start.resumes, start.own_ledger) == (True, None)
    assert plan_start(config(tmp_path), UNITS, start, account).ledger.steps == 3


def test_row46_a_checkpoint_of_another_run_is_refused_where_steps_were_begun(tmp_path):
    """The folder's lost steps would count on the terms of that run, whose noise may be larger."""
    own(tmp_path, 3)
    start, terms = decide_start(config(tmp_path)), settings_of(config(tmp_path), UNITS, 0.5)
    account = Lineage(terms, steps=20, run="another", planned_steps=20)
    with pytest.raises(ValueError, match=r"step-3' is of run r, and steps of run another"):
        plan_start(config(tmp_path), UNITS, start, account)


def revised(folder):
    start = decide_start(config(folder))
    return start.step, confirmed(start, os.path.join(folder, "checkpoint")).step


def test_what_all_ranks_read_revises_the_decision(tmp_path):
    own(tmp_path, 2, 4)
    flip(tmp_path / "checkpoint" / "step-4", "weight")
    assert on_ranks(2, revised, str(tmp_path)) == [(4, 2)] * 2
    assert (tmp_path / "checkpoint.damaged" / "step-4").is_dir()


@pytest.mark.parametrize(
    "mode, reported",
    [("DISABLED", [[2], [2, 4], [2, 4, 5]]), ("ASYNC", [[], [2], [2, 4, 5]])],
)
def test_a_checkpoint_is_reported_as_saved_once_it_is_on_disk(monkeypatch, mode, reported):
    """One in the background when the next save has waited for it; the last one is never there."""
    from torchtitan_dp.checkpoint import manager

    monkeypatch.setattr(manager.CheckpointManager, "save", lambda *_: None)
    saved, found = [], []
    one = object.__new__(manager.Checkpointer)
    one.enable, one.load_only, one.interval = True, False, 2
    one.enable_first_step_checkpoint = False
    one.async_mode, one._under_way, one.on_saved = manager.AsyncMode[mode], None, saved.append
    one.require_finite = lambda step: None
    for step in range(1, 6):
        one.save(step, last_step=step == 5)
        if step in (2, 4, 5):
            found.append(list(saved))
    one.enable = False
    assert found == reported
