"""How a run starts is decided once: from drawn, exported or its own weights, with their history."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import build
from tests.accounts import ended
from tests.checkpoint import test_folder
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint.plan import choose_loss, settings_of, settle
from torchtitan_dp.checkpoint.start import Start, check_start, confirmed, decide_start, plan_start
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.lineage import History, NoisedLoss
from torchtitan_dp.privacy import published_loss

META = {"weight": torch.empty(2, 3, device="meta")}
UNITS = 40
HF = "--checkpoint.initial_load_in_hf"


def config(folder, *overrides):
    return build.config("--checkpoint.enable", f"--job.dump_folder={folder}", *overrides)


def ledger(folder, steps):
    """That of a run with so many steps."""
    return Lineage(settings_of(config(folder), UNITS, 1.0), steps=steps, run="r", start="s")


def save(place, text):
    """A checkpoint that holds a weight, and `text` as its ledger."""
    state = {"weight": torch.arange(6.0).reshape(2, 3), "train_state": {"ledger": text}}
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    test_folder.save(state, place)
    return place


def own(folder, *steps):
    for step in steps:
        save(folder / "checkpoint" / f"step-{step}", ledger(folder, step).to_json())


def truncate(place):
    path = place / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def test_a_checkpoint_of_its_own_comes_before_initial_weights(tmp_path):
    own(tmp_path, 2, 4)
    start = decide_start(config(tmp_path, "--checkpoint.initial_load_path=/nowhere", HF))
    assert (start.resumes, start.step) == (True, 4)
    assert start.own_ledger == ledger(tmp_path, 4)
    check_start(start, META, "here")
    with pytest.raises(ValueError, match=r"^here: its weight is \[9\]"):
        check_start(start, {"weight": torch.empty(9, device="meta")}, "here")


def test_a_checkpoint_that_others_may_write_to_ends_the_start(tmp_path):
    """And is not passed over for an older one: somebody may be about to change that, too."""
    own(tmp_path, 2, 4)
    os.chmod(tmp_path / "checkpoint" / "step-4" / ".metadata", 0o666)
    with pytest.raises(ValueError, match=r"step-4/\.metadata' may be written by others"):
        decide_start(config(tmp_path))


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
    account = ended(Lineage(terms, run="another", planned_steps=20), tmp_path, 20)
    with pytest.raises(ValueError, match=r"of step 3, was saved by a start that starts\.log"):
        plan_start(config(tmp_path), UNITS, start, account)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_history_of_a_start_has_one_of_three_ways(tmp_path, steps):
    terms = settings_of(config(tmp_path), UNITS, 1.0)
    fresh = plan_start(config(tmp_path), UNITS, Start(), None).ledger
    assert (fresh.steps, fresh.lost, fresh.ancestors, fresh.settings) == (0, 0, (), terms)
    begun = ended(Lineage(terms, run="r", caveats=("one",), planned_steps=9), tmp_path, 5)
    again = plan_start(config(tmp_path), UNITS, Start(), begun).ledger  # its weights are gone
    assert (again.steps, again.lost, again.run, again.caveats[0]) == (0, 5, "r", "one")
    loaded = Lineage(terms, steps=steps, start=begun.start, caveats=("two",), private=False)
    save(tmp_path / "checkpoint" / f"step-{steps}", loaded.to_json())
    gone_on = plan_start(config(tmp_path), UNITS, decide_start(config(tmp_path)), begun).ledger
    assert (gone_on.steps, gone_on.run, gone_on.private) == (steps, "r", False)
    assert gone_on.caveats[:2] == ("one", "two")


@pytest.mark.parametrize("planned, told", [(10, 0), (8, 0), (12, 1)])
def test_more_steps_than_planned_at_first_are_a_caveat(tmp_path, planned, told):
    terms = settings_of(config(tmp_path), UNITS, 1.0)
    history = History(steps=3, planned_steps=10)
    later = settle(config(tmp_path, f"--training.steps={planned}"), UNITS, history, terms).ledger
    assert sum("raised from 10 to 12" in caveat for caveat in later.caveats) == told
    assert later.planned_steps == max(planned, 10)


def with_loss(folder, earlier, *overrides):
    """The terms of the loss that a start publishes at its end; `earlier` as of an earlier start."""
    options = "--validation.enable", "--data.heldout_fraction=0.3", "--privacy.delta=1e-4"
    asked = config(folder, *options, "--validation.publish_epsilon=1", *overrides)
    return choose_loss(asked, None if earlier is None else History(heldout_loss=earlier, steps=5))


def test_row66_the_terms_of_a_published_loss_are_fixed_at_the_first_start(tmp_path):
    first = with_loss(tmp_path, None)
    assert 0.999 <= published_loss.epsilon(first.releases(1), delta=1e-4) <= 1
    assert with_loss(tmp_path, first) == first
    for key, value in (
        ("epsilon", "2.0"),
        ("epsilon", "None"),
        ("delta", "1e-05"),
        ("clip", "3.0"),
    ):
        said = rf"^validation\.publish_{key} = {value}: this run was started with "
        with pytest.raises(ValueError, match=said):
            with_loss(tmp_path, first, f"--validation.publish_{key}={value}")
    done = dataclasses.replace(first, begun=1, noised=NoisedLoss(5, 1.0, 0.1))
    assert with_loss(tmp_path, done, "--training.steps=5") == done
    with pytest.raises(ValueError, match=r"^training\.steps = 6: .* after step 5 was published"):
        with_loss(tmp_path, done, "--training.steps=6")
    killed = dataclasses.replace(first, begun=1)  # before its result: both will count
    assert with_loss(tmp_path, killed, "--training.steps=5").releases(5).steps == 2
    for epsilon in ("1e9", "1e12"):
        with pytest.raises(ValueError, match=r"^validation\.publish_epsilon = .*: no usable noise"):
            with_loss(tmp_path, None, f"--validation.publish_epsilon={epsilon}")


def revised(folder):
    start = decide_start(config(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        truncate(Path(folder, "checkpoint", "step-4"))
    return start.step, confirmed(start, os.path.join(folder, "checkpoint")).step


def test_what_all_ranks_read_revises_the_decision(tmp_path):
    own(tmp_path, 2, 4)
    assert on_ranks(2, revised, str(tmp_path)) == [(4, 2)] * 2
    assert (tmp_path / "checkpoint.damaged" / "step-4").is_dir()


@pytest.mark.parametrize(
    "mode, reported", [("DISABLED", [[2], [2, 4], [2, 4, 5]]), ("ASYNC", [[], [2], [2, 4, 5]])]
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
