"""The ledger: published whole or not at all, its marks never undone, each step counted once."""

import dataclasses
import json
import os
import re
import stat
from dataclasses import replace

import pytest

from tests.accounts import begun, ended, mechanism, publish, steps_of, with_terms
from torchtitan_dp import ledger
from torchtitan_dp.checkpoint.initial import ledger_beside
from torchtitan_dp.ledger import Account, Lineage, Settings, files, read_published
from torchtitan_dp.ledger.files import read_fingerprint
from torchtitan_dp.ledger.lineage import Ancestor, inherited, of_weights, resumed, rewound
from torchtitan_dp.ledger.runs import Run, total
from torchtitan_dp.ledger.settings import NamedStep, name_steps, new_name, step_names, union
from torchtitan_dp.ledger.spending import (
    caveats,
    compose,
    epsilon,
    initial_steps,
    own_steps,
    spending,
)

SETTINGS = Settings(
    mechanism(1.0, 0.01),
    max_grad_norm=0.5,
    delta=1e-5,
    expected_batch_size=32,
    accountant="rdp",
    sample_rate_source="privacy.sample_rate",
    neighbouring_relation="add_remove",
)


def behind(run, steps, **changes):
    """A run that initial weights come from."""
    return Ancestor(run, with_terms(SETTINGS, **changes), " ".join(step_names(run, steps)))


def test_published_file_holds_the_contract_and_is_its_owners_only(tmp_path):
    os.umask(0)  # the mode must not depend on it
    try:
        begun(Lineage(SETTINGS), tmp_path, 7)
        spent = publish(ended(Lineage(SETTINGS), tmp_path, 10), tmp_path, 1000)
    finally:
        os.umask(0o022)
    path = tmp_path / "privacy.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == spent
    assert spent["epsilon"] == SETTINGS.epsilon(10)
    assert spent["steps_executed"] == 20  # seven were lost, and count as the ten that were at stake
    assert spent["epsilon_executed"] == SETTINGS.epsilon(20) > spent["epsilon"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "privacy.json",
        "starts.log",
        "steps_executed.log",
    ]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_file_before(tmp_path, monkeypatch, failing):
    publish(Lineage(SETTINGS), tmp_path)
    text = (tmp_path / "privacy.json").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        publish(Lineage(SETTINGS), tmp_path)
    assert (tmp_path / "privacy.json").read_bytes() == text


def test_content_is_synced_before_it_replaces(tmp_path, monkeypatch):
    calls = []
    sync, over = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda *a: (calls.append("fsync"), sync(*a)))
    monkeypatch.setattr(files.os, "replace", lambda *a: (calls.append("replace"), over(*a)))
    publish(Lineage(SETTINGS), tmp_path)
    assert calls == ["fsync", "replace"]


def test_read_back_what_was_published(tmp_path):
    assert read_published(str(tmp_path)) is None
    kept = Lineage(
        SETTINGS,
        steps=5,
        caveats=("one", "two"),
        step_names="a1 a2 a3 b1 b2",
        ancestors=(behind("c", 2, noise_multiplier=2.0),),
        lost=3,
    )
    publish(kept, tmp_path)
    told = read_published(str(tmp_path))
    assert told.taken() == kept.taken()
    assert replace(told, start="", lost=0) == replace(kept, start="", lost=0)
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
        ("rope", "rope", "yarn"),
    ],
)
def test_a_resume_on_changed_terms_is_refused_with_both_values_and_the_remedy(
    attribute, key, value
):
    loaded = Lineage(SETTINGS, steps=3)
    assert resumed(Lineage(SETTINGS), loaded).steps == 3
    changed = Lineage(with_terms(SETTINGS, **{attribute: value}))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{key} = {value}')}: ") as refusal:
        resumed(changed, loaded)
    assert f"started with {SETTINGS.fields()[attribute]}; set it back" in str(refusal.value)
    assert "from these weights (another job.dump_folder, checkpoint.initial_load_path)" in str(
        refusal.value
    )


def test_a_batch_size_that_moves_q_is_refused_by_the_key_that_was_changed():
    changed = with_terms(SETTINGS, expected_batch_size=64, sample_rate=0.02)
    with pytest.raises(ValueError, match=r"^training\.global_batch_size = 64.*32"):
        changed.refuse_change(since=SETTINGS)


def test_a_run_counts_the_worst_of_its_meshes():
    most, least = (replace(SETTINGS, samples_per_rank=n) for n in (64, 8))
    for then, now in ((most, least), (least, most)):
        assert resumed(Lineage(now), Lineage(then, steps=2)).settings.samples_per_rank == 64


# Marks, which are kept forever.


def test_not_private_sticks(tmp_path):
    kept = Lineage(SETTINGS).marked_not_private("why").marked_not_private("why")
    assert (kept.private, kept.caveats) == (False, ("why",))
    assert Lineage.from_json(kept.to_json()).private is False
    spent = publish(kept, tmp_path)
    assert (spent["private"], spent["epsilon"], spent["epsilon_executed"]) == (False, None, None)
    told = read_published(str(tmp_path))
    assert (told.private, told.caveats) == (False, ("why",))


def test_marks_of_earlier_weights_are_inherited():
    private = Lineage(SETTINGS, caveats=("the initial weights are assumed to be public",))
    later = inherited(Lineage(SETTINGS, caveats=("mine",)), private)
    assert (later.private, later.caveats) == (True, ("mine", *private.caveats))
    assert later.run == private.run
    later = inherited(later, Lineage(SETTINGS, private=False, caveats=("mine", "seed")))
    assert (later.private, later.caveats) == (False, ("mine", *private.caveats, "seed"))


@pytest.mark.parametrize("planned, told", [(10, 0), (8, 0), (12, 1)])
def test_more_steps_than_planned_at_first_are_a_caveat(planned, told):
    first = Lineage(SETTINGS, planned_steps=10)
    later = resumed(Lineage(SETTINGS, planned_steps=planned), first)
    assert sum("raised from 10 to 12" in caveat for caveat in later.caveats) == told
    assert later.planned_steps == max(planned, 10)


# The records.

SET = {"data.unit_field": None, "data.heldout_fraction": 0.1, "data.text_field": "note"}


def test_other_data_is_refused(tmp_path):
    ledger.check_fingerprint(str(tmp_path), "a" * 64, SET)  # a first start: nothing to compare
    ledger.write_fingerprint(str(tmp_path), "a" * 64, SET)
    ledger.check_fingerprint(str(tmp_path), "a" * 64, SET)
    assert read_fingerprint(str(tmp_path)) == "a" * 64
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records are") as refused:
        ledger.check_fingerprint(str(tmp_path), "b" * 64, SET)
    assert not re.search("aaaa|bbbb", str(refused.value))  # fingerprints are private
    assert stat.S_IMODE((tmp_path / "data_fingerprint.private").stat().st_mode) == 0o600
    publish(Lineage(SETTINGS), tmp_path)
    assert "a" * 12 not in (tmp_path / "privacy.json").read_text()


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"data.unit_field": "who"}, "data.unit_field = 'who': this run was started with None"),
        ({"data.heldout_fraction": 0.2}, "data.heldout_fraction = 0.2: this run was started with"),
        ({"data.text_field": "text"}, "data.text_field = 'text': this run was started with 'note'"),
    ],
)
def test_the_setting_that_changed_is_named(tmp_path, changed, said):
    ledger.write_fingerprint(str(tmp_path), "a" * 64, SET)
    with pytest.raises(ValueError, match=r"^data\.") as refused:
        ledger.check_fingerprint(str(tmp_path), "b" * 64, {**SET, **changed})
    assert str(refused.value).startswith(said)
    assert "set it back, or start afresh" in str(refused.value)


def test_a_damaged_fingerprint_is_refused(tmp_path):
    (tmp_path / "data_fingerprint.private").write_text("a" * 64 + "\n[1\n")
    with pytest.raises(ValueError, match="line 2: no settings; restore the file"):
        ledger.check_fingerprint(str(tmp_path), "b" * 64, SET)


# What is spent.


def test_what_ancestors_spent_is_included(tmp_path):
    begun(Lineage(SETTINGS), tmp_path, loses=3)
    kept = ended(Lineage(SETTINGS, ancestors=(behind("a", 20),)), tmp_path, 10)
    spent = publish(kept, tmp_path)
    assert spent["epsilon"] == pytest.approx(SETTINGS.epsilon(30))
    assert spent["epsilon_executed"] == pytest.approx(SETTINGS.epsilon(33))


def test_epsilon_as_the_run_goes_on_is_never_below_what_was_spent():
    first = Lineage(SETTINGS, steps=10)
    account = Account(first, total_steps=200)
    for step in (11, 57, 130, 200):
        kept = replace(first, steps=step)
        assert epsilon(kept) <= account.epsilon(kept) <= SETTINGS.epsilon(200) * 1.001
    assert account.epsilon(kept) == pytest.approx(epsilon(kept))  # exact at the end


def test_epsilon_does_not_show_where_a_start_began():
    """Of a run that is under way; hazard row 59. The points that are computed are the same."""
    told = set()
    for stopped_at in (0, 3, 50, 57):
        kept = resumed(Lineage(SETTINGS), Lineage(SETTINGS, steps=stopped_at))
        started = Account(kept, total_steps=200)
        assert started.epsilon(kept) >= epsilon(kept)
        kept = replace(kept, steps=58)
        told.add((started.epsilon(kept), started.epsilon_executed(kept)))
    assert len(told) == 1


def test_a_lineage_keeps_its_steps_through_a_resume_and_goes_back():
    first = Lineage(SETTINGS, steps=4)
    second = replace(resumed(Lineage(SETTINGS), first), steps=9)
    assert second.names() == [*step_names(first.start, 4), *step_names(second.start, 5)]
    assert union([*first.taken(), *second.taken()]) == [SETTINGS.segment(9)]
    assert of_weights(second, first).taken() == first.taken()
    assert (rewound(second).steps, rewound(second).taken()) == (0, [])
    assert (epsilon(second, 4), own_steps(second, 4)) == (
        SETTINGS.epsilon(4),
        [SETTINGS.segment(4)],
    )


def test_a_step_counts_once_and_others_add_up():
    terms = mechanism(1.0, 0.01)
    one, more, other = (
        [NamedStep(name, terms) for name in step_names(start, steps)]
        for start, steps in (("a", 5), ("a", 8), ("b", 5))
    )
    assert name_steps(SETTINGS, step_names("a", 5), "run") == one
    assert union([*one, *more, *other]) == [SETTINGS.segment(13)]
    elsewhere = NamedStep(one[0].name, mechanism(2.0, 0.01))  # on other terms it is another
    assert union([*one, elsewhere]) == [SETTINGS.segment(5), steps_of(2.0, 0.01, 1)]


def test_names_hide_the_start_and_are_each_their_own():
    start = new_name()
    names = step_names(start, 1000)
    assert len(set(names)) == 1000
    assert names[:10] == step_names(start, 10)
    assert not set(names) & set(step_names(new_name(), 1000))
    assert len(start) == 32  # 128 bits: a name cannot be traced to its start by trying them all


@pytest.mark.parametrize("place", ["hf", "weights"])
def test_a_descendant_counts_and_hides_the_steps_that_its_ancestor_lost(tmp_path, place):
    """Or an export would bring along less than it says of itself; hazards 45, 46 and 59."""
    told = []
    for lost in (5, 17):
        folder = tmp_path / str(lost)
        (folder / "hf").mkdir(parents=True)
        begun(Lineage(SETTINGS), folder, lost, loses=50)
        kept = ended(Lineage(SETTINGS, planned_steps=100, run="r"), folder, 100)
        published = publish(kept, folder, 100)
        exported = Account(read_published(str(folder)), 100).exported(read_published(str(folder)))
        assert exported["steps_executed"] == published["steps_executed"] == 150
        files.write_published(str(folder / "hf"), exported)
        found = ledger_beside(str(folder / place))
        assert found.ledger.lost == 50
        of_run = Ancestor(
            "r", SETTINGS, " ".join(kept.names()), 100, found.ledger.lost, found.any_begun
        )
        child = Lineage(with_terms(SETTINGS, noise_multiplier=8.0), ancestors=(of_run, of_run))
        child = Lineage.from_json(child.to_json())
        # Weights without a ledger of their own may be of any step that was begun there.
        assert initial_steps(child) == [SETTINGS.segment(100)] + [SETTINGS.segment(50)] * (
            place == "weights"
        )
        for planned in (True, False):
            spent = compose(child, spending(child, lost=True, planned=planned))
            assert spent == pytest.approx(exported["epsilon"])
        assert any("steps were lost: 50" in caveat for caveat in caveats(child, 1.0, 1.0))
        found = total([Run(str(folder), child, "f")])
        assert found.epsilon == pytest.approx(exported["epsilon"])
        told.append((spent, dataclasses.replace(found)))
    assert told[0] == told[1]
