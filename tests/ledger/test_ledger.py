"""The ledger: published whole or not at all, its marks never undone, all that was begun counted."""

import json
import os
import re
import stat
from dataclasses import replace

import pytest

from tests.accounts import begun, ended, export, mechanism, publish, with_terms
from torchtitan_dp.checkpoint.bookkeeping import Account
from torchtitan_dp.ledger import Lineage, Settings, log, read_published
from torchtitan_dp.ledger.lineage import (
    Ancestor,
    HeldOutLoss,
    History,
    NoisedLoss,
    audited,
    not_private,
    of_weights,
)
from torchtitan_dp.ledger.schema import ledger_of
from torchtitan_dp.ledger.spending import (
    Run,
    caveats,
    counted_twice,
    epsilon,
    heldout_epsilon,
    total,
)
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.published_loss import releases

SETTINGS = Settings(
    mechanism(1.0, 0.01),
    max_grad_norm=0.5,
    delta=1e-5,
    expected_batch_size=32,
    accountant="rdp",
    sample_rate_source="privacy.sample_rate",
    neighbouring_relation="add_remove",
)


def behind(run, steps, planned=0, lost=0, **changes):
    """A run that initial weights come from."""
    return Ancestor(run, with_terms(SETTINGS, **changes), steps, planned or steps, lost)


def everything(lineage):
    return epsilon(lineage, lineage.left)


def test_published_file_holds_the_contract_and_is_its_owners_only(tmp_path):
    os.umask(0)  # the mode must not depend on it
    try:
        begun(Lineage(SETTINGS), tmp_path, 7)
        content = publish(ended(Lineage(SETTINGS), tmp_path, 10), tmp_path)
    finally:
        os.umask(0o022)
    path = tmp_path / "privacy.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == content
    assert content["epsilon"] == SETTINGS.epsilon(10)
    assert content["steps_executed"] == 20  # seven were lost: they count as the ten at stake
    assert content["epsilon_executed"] == SETTINGS.epsilon(20) > content["epsilon"]
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["privacy.json", "starts.log", "steps_executed.log"]


def test_read_back_what_was_published(tmp_path):
    assert read_published(str(tmp_path)) is None
    kept = Lineage(
        SETTINGS,
        steps=5,
        caveats=("one", "two"),
        ancestors=(behind("c", 2, 9, 3, noise_multiplier=2.0),),
        heldout_loss=HeldOutLoss(3.0, 4.0, 1e-5, 1.0, noised=NoisedLoss(5, 1.5, 0.25)),
        audit=None,
    )
    publish(kept, tmp_path)
    assert read_published(str(tmp_path)) == replace(kept, start="")
    assert Lineage.from_json(kept.to_json()) == kept  # as a checkpoint holds it


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"steps": 3}', b"\x00", b"\xff\xfe\x00{"])
def test_a_damaged_file_is_refused_and_named(tmp_path, content):
    (tmp_path / "privacy.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}/privacy\.json cannot be"):
        read_published(str(tmp_path))


# The terms.


@pytest.mark.parametrize(
    "attribute, key, value",
    [
        ("noise_multiplier", "privacy.noise_multiplier", 2.0),
        ("sample_rate", "privacy.sample_rate", 0.02),
        ("max_grad_norm", "privacy.max_grad_norm", 0.25),
        ("delta", "privacy.delta", 1e-6),
        ("expected_batch_size", "training.global_batch_size", 64),
        ("privacy_unit", "data.unit_field", "unit of data.unit_field 'user'"),
        ("neighbouring_relation", "privacy.sample_rate (neighbours)", "zero_out"),
        ("clip_function", "privacy.clip_function", "automatic"),
        ("clipping", "privacy.clipping", "per_layer"),
        ("secure_noise", "privacy.secure_noise", True),
        ("windows_per_draw", "data.windows_per_draw", 4),
        ("trained", "lora", "adapters"),
    ],
)
def test_a_resume_on_changed_terms_is_refused_with_values_and_the_remedy(attribute, key, value):
    assert SETTINGS.resumed(since=SETTINGS).changed(SETTINGS) == ""
    changed = with_terms(SETTINGS, **{attribute: value})
    with pytest.raises(ValueError, match=f"^{re.escape(f'{key} = {value}')}: ") as refusal:
        changed.resumed(since=SETTINGS)
    assert f"started with {SETTINGS.fields()[attribute]}; set it back" in str(refusal.value)
    assert "for another run name another job.dump_folder" in str(refusal.value)


def test_a_run_counts_the_worst_of_its_meshes():
    most, least = (replace(SETTINGS, samples_per_rank=n) for n in (64, 8))
    for then, now in ((most, least), (least, most)):
        assert now.resumed(since=then).samples_per_rank == 64


# Marks, which are kept forever.


def test_not_private_sticks(tmp_path):
    kept = not_private(not_private(Lineage(SETTINGS), "why"), "why")
    assert (kept.private, kept.caveats) == (False, ("why",))
    assert Lineage.from_json(kept.to_json()).private is False
    told = publish(kept, tmp_path)
    assert (told["private"], told["epsilon"], told["epsilon_executed"]) == (False, None, None)
    assert read_published(str(tmp_path)) == kept
    assert audited(kept, 10).audit.otherwise_private is False


def test_weights_of_other_steps_keep_marks_and_a_loss_that_is_not_theirs_goes():
    loss = HeldOutLoss(3.0, 4.0, 1e-5, 1.0, begun=2, noised=NoisedLoss(9, 1.0, 0.1))
    kept = Lineage(SETTINGS, steps=9, caveats=("one",), heldout_loss=loss, start="s")
    back = of_weights(kept, Lineage(SETTINGS, steps=8, start="t"))
    assert (back.steps, back.start, back.caveats, back.run) == (8, "t", ("one",), kept.run)
    assert back.heldout_loss == replace(loss, noised=None)
    assert of_weights(kept, Lineage(SETTINGS, steps=9)).heldout_loss == loss
    assert of_weights(kept, History()).steps == 0


# What is spent.


def test_all_that_ancestors_began_or_planned_is_included(tmp_path):
    begun(Lineage(SETTINGS), tmp_path, loses=3)
    ancestor = replace(behind("a", 20, planned=25, lost=4), losses=2, noise_of_losses=5.0)
    told = publish(ended(Lineage(SETTINGS, ancestors=(ancestor,)), tmp_path, 10), tmp_path)
    for key, steps in (("epsilon", 39), ("epsilon_executed", 42), ("epsilon_planned", 42)):
        both = [SETTINGS.segment(steps), releases(5.0, 2)]
        assert told[key] == pytest.approx(SETTINGS.compose(both))
    assert Ancestor.from_fields(ancestor.fields()) == ancestor
    found = " ".join(told["caveats"])
    assert "20 of 25 by run a" in found
    assert "steps were lost: 7 are counted" in found


def test_epsilon_as_the_run_goes_on_is_never_below_what_was_spent():
    first = Lineage(SETTINGS, steps=10, lost=3)
    account = Account(first, total_steps=200)
    for step in (11, 57, 130, 200):
        kept = replace(first, steps=step)
        assert SETTINGS.epsilon(step) <= account.epsilon(kept) <= SETTINGS.epsilon(200) * 1.001
        assert everything(kept) <= account.epsilon_executed(kept) <= account.epsilon_planned(kept)
    assert account.epsilon(kept) == pytest.approx(SETTINGS.epsilon(200))  # exact at the end


def test_epsilon_does_not_show_where_a_start_began():
    """Of a run that is under way; hazard row 59. The points that are computed are the same."""
    told = set()
    for stopped_at in (0, 3, 50, 57):
        started = Account(Lineage(SETTINGS, steps=stopped_at), total_steps=200)
        kept = Lineage(SETTINGS, steps=58)
        told.add((started.epsilon(kept), started.epsilon_executed(kept)))
    assert len(told) == 1


def test_a_descendant_counts_and_hides_the_steps_that_its_ancestor_lost(tmp_path):
    """Or an export would bring along less than it says of itself; hazards 45, 46 and 59."""
    told = []
    for lost in (5, 17):
        folder = tmp_path / str(lost)
        folder.mkdir()
        begun(Lineage(SETTINGS), folder, lost, loses=50)
        kept = ended(Lineage(SETTINGS, planned_steps=100, run="r"), folder, 100)
        assert publish(kept, folder)["steps_executed"] == 150
        content = export(read_published(str(folder)), folder / "hf")
        assert content["steps_executed"] == 150
        found = ledger_of(content)
        of_run = Ancestor("r/1", found.settings, found.steps, found.planned_steps, found.lost)
        child = Lineage(with_terms(SETTINGS, noise_multiplier=8.0), ancestors=(of_run,))
        assert everything(child) == pytest.approx(content["epsilon"])
        assert any("steps were lost: 50" in caveat for caveat in caveats(child, 1.0, 1.0))
        told.append(total([Run(str(folder), child, "f")]))
        assert told[-1].epsilon == pytest.approx(content["epsilon"])
    assert told[0] == told[1]


# Several runs.


def run_of(steps, name="", folder="", **fields):
    return Run(folder or name, Lineage(SETTINGS, steps=steps, run=name, **fields), "f")


def test_runs_add_up_and_copies_count_their_prefix_twice():
    runs = [run_of(5, "a", "one", lost=2), run_of(8, "a", "two"), run_of(1, "b", planned_steps=3)]
    found = total(runs)
    assert found.epsilon == pytest.approx(SETTINGS.epsilon(16))
    assert found.epsilon_planned == pytest.approx(SETTINGS.epsilon(18))
    assert found.steps_executed == 16
    assert counted_twice(runs) == ["steps counted twice: 'two' and 'one' are copies"]
    assert counted_twice(runs[1:]) == []


def test_an_export_that_several_runs_began_with_counts_once_and_two_exports_twice():
    one, two = behind("a/1", 5), behind("a/2", 5)
    children = [run_of(2, name, ancestors=(one,)) for name in "bc"]
    assert total(children).epsilon == pytest.approx(SETTINGS.epsilon(9))
    others = [children[0], run_of(2, "c", ancestors=(two,))]  # of another copy, for all we know
    assert total(others).epsilon == pytest.approx(SETTINGS.epsilon(14))
    (line,) = counted_twice([run_of(5, "a"), children[0]])
    assert line.startswith("steps counted twice: 'b', which began with weights of 'a'")
    assert total([run_of(5, "a"), children[0]]).epsilon == pytest.approx(SETTINGS.epsilon(12))


# The held-out loss that a run publishes.


def with_loss(steps, planned, sigma=3.0, begun=0, noised=None, **fields):
    loss = HeldOutLoss(sigma, 4.0, 1e-5, 1.0, begun, noised and NoisedLoss(noised, 1.0, 0.1))
    return Lineage(SETTINGS, steps=steps, planned_steps=planned, heldout_loss=loss, **fields)


def of_losses(*segments):
    return accounting.compose(segments, delta=1e-5, accountant="pld")


@pytest.mark.parametrize(
    "lineage, count",
    [
        (with_loss(3, 9), 1),  # at the end
        (with_loss(9, 9, begun=1, noised=9), 1),
        (with_loss(9, 9, begun=1), 2),  # a crash came between its line and its result
        (with_loss(9, 12, begun=1, noised=9), 2),  # more steps were planned since
        (with_loss(9, 9, begun=3, noised=9), 3),
    ],
)
def test_row66_each_loss_ever_begun_and_the_one_to_come_count(lineage, count):
    assert heldout_epsilon(lineage) == of_losses(releases(3.0, count))
    assert Lineage.from_json(lineage.to_json()) == lineage


def test_row66_published_losses_of_several_runs_add_up():
    """A unit is on the same side in both, unless their records, or the share held out, differ."""
    first, second = with_loss(9, 9, begun=1, noised=9), with_loss(9, 9, 2.0, 1, 9)
    both = [Run("1", first, "same"), Run("2", second, "same")]
    found, losses = total(both), (releases(3.0, 1), releases(2.0, 1))
    assert found.heldout_epsilon == of_losses(*losses)
    assert found.epsilon == pytest.approx(SETTINGS.epsilon(18))
    apart = total([replace(run, fingerprint=run.folder) for run in both], overlapping=True)
    assert apart.heldout_epsilon is None
    assert apart.epsilon == pytest.approx(SETTINGS.compose([*losses, SETTINGS.segment(18)]))
    assert total([run_of(9, "a")]).heldout_epsilon is None
    unknown = [replace(run, fingerprint=None) for run in both]
    with pytest.raises(ValueError, match=r"'1' has no data_fingerprint\.private"):
        total(unknown)
    assert total(unknown[:1]).heldout_epsilon is not None


def test_row66_a_held_out_unit_pays_all_that_the_initial_weights_spent():
    ancestor = replace(behind("a/1", 20, planned=30, lost=2), losses=2, noise_of_losses=5.0)
    child = with_loss(9, 9, begun=1, noised=9, ancestors=(ancestor,))
    parts = releases(3.0, 1), SETTINGS.segment(32), releases(5.0, 2)
    assert heldout_epsilon(child) == of_losses(*parts)
    assert total([Run("1", child, "f")]).heldout_epsilon == of_losses(*parts)


SET = {"data.unit_field": None, "data.heldout_fraction": 0.1, "data.text_field": "note"}


def test_other_data_is_refused(tmp_path):
    log.check_fingerprint(str(tmp_path), "a" * 64, SET)  # a first start: nothing to compare
    log.write_fingerprint(str(tmp_path), "a" * 64, SET)
    log.check_fingerprint(str(tmp_path), "a" * 64, SET)
    assert log.read_fingerprint(str(tmp_path)) == "a" * 64
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records are") as refused:
        log.check_fingerprint(str(tmp_path), "b" * 64, SET)
    assert not re.search("aaaa|bbbb", str(refused.value))  # fingerprints are private
    assert stat.S_IMODE((tmp_path / "data_fingerprint.private").stat().st_mode) == 0o600
    for key, value, before in (
        ("data.unit_field", "who", "it unset"),
        ("data.text_field", "t", "'note'"),
    ):
        said = f"{key} = {value!r}: this run was started with {before}, on which"
        with pytest.raises(ValueError, match=re.escape(said)):
            log.check_fingerprint(str(tmp_path), "a" * 64, {**SET, key: value})
    (tmp_path / "data_fingerprint.private").write_text("a" * 64 + "\n[1\n")
    with pytest.raises(ValueError, match="line 2: no settings; restore the file"):
        log.check_fingerprint(str(tmp_path), "b" * 64, SET)
