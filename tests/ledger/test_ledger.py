"""The ledger: published whole or not at all, never undone, and no step is lost."""

import dataclasses
import json
import os
import re
import stat
from pathlib import Path

import pytest

from tests.accounts import account, mechanism, steps_of, with_terms
from torchtitan_dp import ledger
from torchtitan_dp.checkpoint.initial import ledger_beside
from torchtitan_dp.ledger import (
    Account,
    ExecutedSteps,
    Ledger,
    RunSegment,
    Settings,
    files,
    read_published,
)
from torchtitan_dp.ledger.caveats import caveats
from torchtitan_dp.ledger.files import read_fingerprint
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.runs import Run, total
from torchtitan_dp.ledger.settings import NamedStep, name_steps, new_name, step_names, union
from torchtitan_dp.privacy import accounting

SETTINGS = Settings(
    mechanism(1.0, 0.01),
    max_grad_norm=0.5,
    delta=1e-5,
    expected_batch_size=32,
    accountant="rdp",
    sample_rate_source="privacy.sample_rate",
    neighbouring_relation="add_remove",
)


def publish(folder, kept, begun):
    """What a process that starts with `begun` steps in the folder's log publishes."""
    of = kept.settings.mechanism
    line = f"1 {of.noise_multiplier} {of.sample_rate} {kept.start}\n"
    (folder / "steps_executed.log").write_text(begun * line)
    return account(kept, ExecutedSteps(str(folder)), total_steps=1000).publish(str(folder))


def test_published_file_holds_the_contract_and_is_its_owners_only(tmp_path):
    os.umask(0)  # the mode must not depend on it
    try:
        spent = publish(tmp_path, Ledger(SETTINGS, steps=10), 20)
    finally:
        os.umask(0o022)
    path = tmp_path / "privacy.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == spent
    assert spent["epsilon"] == SETTINGS.epsilon(10)
    assert spent["steps_executed"] == 20
    assert spent["epsilon_executed"] == SETTINGS.epsilon(20) > spent["epsilon"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["privacy.json", "steps_executed.log"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_file_before(tmp_path, monkeypatch, failing):
    publish(tmp_path, Ledger(SETTINGS, steps=10), 10)
    before = (tmp_path / "privacy.json").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path, Ledger(SETTINGS, steps=20), 20)
    assert (tmp_path / "privacy.json").read_bytes() == before


def test_content_is_synced_before_it_replaces(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda *a: (calls.append("fsync"), sync(*a)))
    monkeypatch.setattr(files.os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    publish(tmp_path, Ledger(SETTINGS), 0)
    assert calls == ["fsync", "replace"]


def test_read_back_what_was_published(tmp_path):
    assert read_published(str(tmp_path)) is None
    later = with_terms(SETTINGS, noise_multiplier=2.0)
    kept = Ledger(
        later,
        steps=7,
        caveats=["one", "two"],
        finished=[RunSegment(SETTINGS, 4)],
        step_names="a1 a2 a3 b1 b2",
        ancestors=[Ancestor("0123", (RunSegment(later, 2),), "c1 c2")],
    )
    publish(tmp_path, kept, 9)
    told = read_published(str(tmp_path))
    assert told.taken() == kept.taken()
    hidden = {"step_names": "", "start": "", "lost": None, "lost_exactly": 0}
    assert dataclasses.replace(told, **hidden) == dataclasses.replace(kept, **hidden)
    assert Ledger.from_json(kept.to_json()) == kept  # as a checkpoint holds it


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"steps": 3}', "\x00\x00"])
def test_a_damaged_file_is_refused_and_named(tmp_path, content):
    (tmp_path / "privacy.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "privacy.json"))):
        read_published(str(tmp_path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "privacy.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ValueError, match=r"privacy\.json cannot be read"):
        read_published(str(tmp_path))


@pytest.mark.parametrize(
    "attribute, key, value",
    [
        ("noise_multiplier", "privacy.noise_multiplier", 2.0),
        ("sample_rate", "privacy.sample_rate", 0.02),
        ("max_grad_norm", "privacy.max_grad_norm", 0.25),
        ("delta", "privacy.delta", 1e-6),
        ("expected_batch_size", "training.global_batch_size", 64),
        ("privacy_unit", "data.unit_field", "unit of data.unit_field 'user'"),
    ],
)
def test_a_changed_term_is_refused_with_both_values(attribute, key, value):
    SETTINGS.refuse_change(since=SETTINGS)
    changed = with_terms(SETTINGS, **{attribute: value})
    with pytest.raises(ValueError, match=f"^{re.escape(key)} = ") as refusal:
        changed.refuse_change(since=SETTINGS)
    assert str(value) in str(refusal.value)
    assert str(SETTINGS.fields()[attribute]) in str(refusal.value)


def test_a_changed_neighbouring_relation_is_refused():
    changed = dataclasses.replace(SETTINGS, neighbouring_relation="zero_out")
    with pytest.raises(ValueError, match=r"zero_out.*add_remove"):
        changed.refuse_change(since=SETTINGS)


def test_a_batch_size_that_moves_q_is_refused_by_the_key_that_was_changed():
    terms = dataclasses.replace(SETTINGS, sample_rate_source="training.global_batch_size / records")
    changed = with_terms(terms, expected_batch_size=64, sample_rate=0.02)
    with pytest.raises(ValueError, match=r"^training\.global_batch_size = 64.*32"):
        changed.refuse_change(since=terms)


def test_not_private_sticks(tmp_path):
    kept = Ledger(SETTINGS)
    kept.mark_not_private("why")
    kept.mark_not_private("why")
    assert (kept.private, kept.caveats) == (False, ["why"])
    assert Ledger.from_json(kept.to_json()).private is False
    spent = publish(tmp_path, kept, 1)
    assert spent["private"] is False
    assert spent["epsilon"] is None
    assert spent["epsilon_executed"] is None
    before = read_published(str(tmp_path))
    assert (before.private, before.caveats) == (False, ["why"])


def test_caveats_of_earlier_weights_are_inherited():
    private = Ledger(SETTINGS, caveats=["the initial weights are assumed to be public"])
    later = Ledger(SETTINGS, caveats=["mine"])
    later.inherit(private)
    assert (later.private, later.caveats) == (True, ["mine", *private.caveats])
    later.inherit(Ledger(SETTINGS, private=False, caveats=["mine", "seed"]))
    assert (later.private, later.caveats) == (False, ["mine", *private.caveats, "seed"])


def test_every_step_ever_begun_is_counted(tmp_path):
    executed = ExecutedSteps(str(tmp_path))
    assert executed.count == 0
    for step in (1, 2, 3):
        executed.begin(step, SETTINGS)
    again = ExecutedSteps(str(tmp_path))  # killed, and resumed from step 1
    assert again.count == 3
    again.begin(2, SETTINGS)
    assert again.count == ExecutedSteps(str(tmp_path)).count == 4
    assert stat.S_IMODE((tmp_path / "steps_executed.log").stat().st_mode) == 0o600


@pytest.mark.parametrize("torn", [b"1", b"10 0.5 0.0", b"10 1.0 0.01 0f"])
def test_a_torn_line_was_begun_too_and_on_the_worst_terms(tmp_path, torn):
    (tmp_path / "steps_executed.log").write_bytes(b"8 2.0 0.5 a\n9 0.5 0.001 a\n" + torn)
    executed = ExecutedSteps(str(tmp_path))
    assert executed.count == 3
    executed.begin(10, SETTINGS)
    for read in (executed, ExecutedSteps(str(tmp_path))):  # it does not swallow the next
        assert union(read.begun(SETTINGS)) == [
            steps_of(0.5, 0.001, 1),
            steps_of(0.5, 0.5, 1),
            steps_of(1.0, 0.01, 1),
            steps_of(2.0, 0.5, 1),
        ]


@pytest.mark.parametrize("line", ["x 1.0 0.01 a", "3 1.0 0.01", "3 one 0.01 a", ""])
def test_a_line_that_is_no_step_is_refused(tmp_path, line):
    (tmp_path / "steps_executed.log").write_text(f"1 1.0 0.01 a\n{line}\n2 1.0 0.01 a\n")
    with pytest.raises(ValueError, match=r"steps_executed\.log, line 2"):
        ExecutedSteps(str(tmp_path))


def test_a_step_is_on_disk_before_its_update(tmp_path, monkeypatch):
    synced, path = [], tmp_path / "steps_executed.log"

    def sync(descriptor):
        of_log = os.path.samestat(os.fstat(descriptor), path.stat())
        synced.append(path.read_bytes() if of_log else "folder")

    monkeypatch.setattr(files.os, "fsync", sync)
    executed = ExecutedSteps(str(tmp_path))
    start = executed.new_start()
    executed.begin(1, SETTINGS)
    assert synced == [f"1 1.0 0.01 {start}\n".encode(), "folder"]  # whose entry is new
    executed.begin(2, SETTINGS)
    assert len(synced) == 3


def test_a_torn_line_has_one_name_in_a_folder_and_another_in_each_copy(tmp_path):
    """Copies that went on may tear at the same byte of different steps; a first line may, too."""
    names = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "steps_executed.log").write_bytes(b"9 1.0 0.01 a\n10 1.0 0.0")
        executed = ExecutedSteps(str(folder))
        names.append(executed.begun(SETTINGS)[-1].name)
        executed.begin(10, SETTINGS)
        names.append(ExecutedSteps(str(folder)).begun(SETTINGS)[-1].name)
    assert names[0] == names[1] != names[2] == names[3]


def test_other_data_is_refused(tmp_path):
    ledger.check_fingerprint(str(tmp_path), "a" * 64, SET)  # a first start: nothing to compare
    ledger.write_fingerprint(str(tmp_path), "a" * 64, SET)
    ledger.check_fingerprint(str(tmp_path), "a" * 64, SET)
    assert read_fingerprint(str(tmp_path)) == "a" * 64
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records are") as refused:
        ledger.check_fingerprint(str(tmp_path), "b" * 64, SET)
    assert not re.search("aaaa|bbbb", str(refused.value))  # fingerprints are private
    assert stat.S_IMODE((tmp_path / "data_fingerprint.private").stat().st_mode) == 0o600


SET = {"data.unit_field": None, "data.heldout_fraction": 0.1, "data.text_field": "note"}


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


def test_a_fingerprint_of_one_line_is_still_read(tmp_path):
    (tmp_path / "data_fingerprint.private").write_text("a" * 64 + "\n")
    ledger.check_fingerprint(str(tmp_path), "a" * 64, SET)
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records \(or data\.unit_"):
        ledger.check_fingerprint(str(tmp_path), "b" * 64, SET)
    (tmp_path / "data_fingerprint.private").write_text("a" * 64 + "\n[1\n")
    with pytest.raises(ValueError, match="line 2: no settings; restore the file"):
        ledger.check_fingerprint(str(tmp_path), "b" * 64, SET)


def test_fingerprint_is_not_published(tmp_path):
    ledger.write_fingerprint(str(tmp_path), "a" * 64, SET)
    publish(tmp_path, Ledger(SETTINGS), 0)
    assert "a" * 12 not in (tmp_path / "privacy.json").read_text()


def test_executed_steps_are_never_fewer_than_the_lineages(tmp_path):
    """A checkpoint copied from elsewhere comes without its log."""
    settings = Settings(mechanism(1.0, 0.01), 1.0, 1e-5, 4, "rdp", "test", "zero_out")
    told = publish(tmp_path, Ledger(settings, steps=60), 10)
    assert told["steps_executed"] == 60
    assert told["epsilon_executed"] >= told["epsilon"]


# Segments.


def test_a_log_that_another_run_writes_to_is_not_written_on(tmp_path):
    """A lock that somebody removed, or a file system without locks: neither run knows of all."""
    one, other = ExecutedSteps(str(tmp_path)), ExecutedSteps(str(tmp_path))
    one.begin(1, SETTINGS)
    with pytest.raises(SystemExit, match=r"steps_executed\.log .* another run"):
        other.begin(1, SETTINGS)
    one.begin(2, SETTINGS)
    assert ExecutedSteps(str(tmp_path)).count == 2
    os.remove(tmp_path / "steps_executed.log")
    with pytest.raises(SystemExit, match="another run"):
        one.begin(3, SETTINGS)


def test_a_segment_starts_where_the_settings_change():
    loaded, quieter = Ledger(SETTINGS, steps=30), with_terms(SETTINGS, noise_multiplier=2)
    with pytest.raises(ValueError, match=r"open a new segment with privacy\.new_segment"):
        Ledger(quieter).resume_from(loaded, new_segment=False)
    kept = Ledger(quieter)
    kept.resume_from(loaded, new_segment=True)
    assert (kept.steps, kept.finished) == (30, [RunSegment(SETTINGS, 30)])
    assert kept.run == loaded.run
    assert any("fixed before" in caveat for caveat in kept.caveats)
    kept.steps = 40
    own = [s.spending() for s in kept.segments()]
    assert [s.steps for s in own] == [30, 10]
    assert kept.epsilon() == accounting.compose(own, delta=1e-5, accountant="rdp")
    assert loaded.epsilon() < kept.epsilon() < Ledger(SETTINGS, steps=40).epsilon()
    assert [s.steps for s in kept.segments(20)] == [20, 0]  # what it had spent then
    assert kept.epsilon(20) == SETTINGS.epsilon(20)
    again = Ledger(quieter)  # resumed on the same terms: no third segment
    again.resume_from(kept, new_segment=True)
    assert [s.steps for s in again.segments()] == [30, 10]


@pytest.mark.parametrize("change", [{"delta": 1e-6}, {"privacy_unit": "patient"}])
def test_some_terms_no_segment_may_change(change):
    with pytest.raises(ValueError, match="no new segment may change"):
        Ledger(dataclasses.replace(SETTINGS, **change)).resume_from(
            Ledger(SETTINGS), new_segment=True
        )


def test_what_ancestors_spent_is_included(tmp_path):
    kept = Ledger(
        SETTINGS,
        steps=10,
        ancestors=[Ancestor("a", (RunSegment(SETTINGS, 20),), " ".join(step_names("b", 20)))],
    )
    spent = publish(tmp_path, kept, 13)
    assert spent["epsilon"] == pytest.approx(SETTINGS.epsilon(30))
    assert spent["epsilon_executed"] == pytest.approx(SETTINGS.epsilon(33))


def test_epsilon_as_the_run_goes_on_is_never_below_what_was_spent(tmp_path):
    kept = Ledger(SETTINGS, steps=10)
    account = Account(kept, total_steps=200)
    for step in (11, 57, 130, 200):
        kept.steps = step
        assert kept.epsilon() <= account.epsilon() <= Ledger(SETTINGS, steps=200).epsilon() * 1.001
    assert account.epsilon() == pytest.approx(kept.epsilon())  # exact at the end


def test_epsilon_does_not_show_where_a_start_began():
    """Of a run that is under way; hazard row 59. The points that are computed are the same."""
    told = []
    for stopped_at in (0, 3, 50, 57):
        kept = Ledger(SETTINGS)
        kept.resume_from(Ledger(SETTINGS, steps=stopped_at), new_segment=False)
        started = Account(kept, total_steps=200)
        kept.steps = stopped_at
        assert started.epsilon() >= kept.epsilon()
        kept.steps = 58
        told.append((started.epsilon(), started.epsilon_executed()))
    assert len(set(told)) == 1


# Which step is which.


def test_the_steps_of_a_lineage_have_its_terms_in_order():
    louder = with_terms(SETTINGS, noise_multiplier=0.5)
    segments = [RunSegment(SETTINGS, 2), RunSegment(louder, 1)]
    assert name_steps(segments, ["a", "b", "c"], "run") == [
        NamedStep("a", mechanism(1.0, 0.01).as_logged()),
        NamedStep("b", mechanism(1.0, 0.01).as_logged()),
        NamedStep("c", mechanism(0.5, 0.01).as_logged()),
    ]
    with pytest.raises(ValueError, match="zip"):
        name_steps(segments, ["a", "b"], "run")


def test_a_step_counts_once_and_others_add_up():
    one, more, other = (
        [NamedStep(name, mechanism(1.0, 0.01).as_logged()) for name in step_names(start, steps)]
        for start, steps in (("a", 5), ("a", 8), ("b", 5))
    )
    assert union([*one, *more, *other]) == [SETTINGS.spending(13)]
    elsewhere = NamedStep(
        one[0].name, mechanism(2.0, 0.01).as_logged()
    )  # on other terms it is another
    assert union([*one, elsewhere]) == [SETTINGS.spending(5), steps_of(2.0, 0.01, 1)]


def test_names_hide_the_start_and_are_each_their_own():
    start = new_name()
    names = step_names(start, 1000)
    assert len(set(names)) == 1000
    assert names[:10] == step_names(start, 10)
    assert not set(names) & set(step_names(new_name(), 1000))
    assert len(start) == 32  # 128 bits: a name cannot be traced to its start by trying them all


def test_each_load_is_a_start_of_its_own(tmp_path):
    """Or the steps of the second would have the names of the first's, and count as the same."""
    executed = ExecutedSteps(str(tmp_path))
    starts = set()
    for _ in range(2):
        starts.add(executed.new_start())
        executed.begin(1, SETTINGS)
        executed.begin(2, SETTINGS)
    assert len(starts) == 2
    assert union(ExecutedSteps(str(tmp_path)).begun(SETTINGS)) == [SETTINGS.spending(4)]


def test_a_resumed_lineage_keeps_its_steps():
    first = Ledger(SETTINGS, steps=4)
    second = Ledger(SETTINGS)
    second.resume_from(first, new_segment=False)
    second.steps = 9
    assert second.names() == [*step_names(first.start, 4), *step_names(second.start, 5)]
    assert union([*first.taken(), *second.taken()]) == [SETTINGS.spending(9)]
    second.rewind()
    assert (second.steps, second.taken()) == (0, [])


def test_the_log_and_the_lineage_name_a_step_alike(tmp_path):
    executed, kept = ExecutedSteps(str(tmp_path)), Ledger(SETTINGS)
    kept.start = executed.new_start()
    for step in (1, 2, 3):
        executed.begin(step, SETTINGS)
    kept.steps = 2
    for read in (executed, ExecutedSteps(str(tmp_path))):
        assert read.begun(SETTINGS)[:2] == kept.taken()
        read.enter_lost(kept)
        assert (kept.lost, kept.lost_exactly) == (SETTINGS.spending(1), 1)


def test_a_checkpoint_without_its_log_brings_its_steps(tmp_path):
    executed = ExecutedSteps(str(tmp_path))
    lineage = [NamedStep(name, mechanism(1.0, 0.01).as_logged()) for name in step_names("a", 3)]
    executed.begin(1, SETTINGS)
    executed.adopt(lineage)
    executed.adopt(lineage)  # they are there already
    again = ExecutedSteps(str(tmp_path))
    assert again.count == executed.count == 4
    assert union([*again.begun(SETTINGS), *lineage]) == [SETTINGS.spending(4)]
    assert again.missing(lineage) == executed.missing(lineage) == 0


# Steps that crashes lost.


def started(folder, *, block=10, steps=0, ends=False):
    """A start that trained for so many steps; the ledger of its weights knows of none."""
    executed = ExecutedSteps(str(folder))
    executed.new_start()
    executed.begin_start(block)
    for step in range(1, steps + 1):
        executed.begin(step, SETTINGS)
    if ends:
        executed.end_start()
    return executed


def lost(executed, **changes):
    """The lost steps as they are published, and their number."""
    kept = Ledger(SETTINGS, **changes)
    executed.enter_lost(kept)
    return kept.published_lost().steps, kept.lost_exactly


@pytest.mark.parametrize(
    "steps, ends, published",
    [
        (0, True, 0),
        (0, False, 10),  # as much as if it had lost some
        (1, False, 10),
        (10, False, 10),
        (11, False, 20),  # an asynchronous save was lost as well
        (3, True, 10),  # its checkpoint was damaged later
    ],
)
def test_lost_steps_are_published_by_blocks(tmp_path, steps, ends, published):
    running = started(tmp_path, steps=steps, ends=ends)
    assert lost(running)[1] == steps  # itself is no crash yet
    assert lost(ExecutedSteps(str(tmp_path))) == (published, steps)
    kept = Ledger(SETTINGS, steps=3)
    ExecutedSteps(str(tmp_path)).enter_lost(kept)
    assert kept.steps_executed == 3 + published
    assert kept.spare().steps == published - steps
    assert kept.compose(kept.executed()) == SETTINGS.epsilon(3 + published)
    assert stat.S_IMODE((tmp_path / "starts.log").stat().st_mode) == 0o600


def test_each_crash_counts_as_what_it_could_lose(tmp_path):
    """Whatever checkpoint.interval a later start has: it neither hides steps nor shows them."""
    started(tmp_path, block=10, steps=4)
    for block in (2, 1000):
        started(tmp_path, block=block, ends=True)
        assert lost(ExecutedSteps(str(tmp_path))) == (10, 4)
    started(tmp_path, block=3, steps=1)
    assert lost(ExecutedSteps(str(tmp_path))) == (10 + 3, 5)


def test_steps_of_no_recorded_start_count_each(tmp_path):
    """Of a folder of version 0.1.0, which published their number."""
    (tmp_path / "steps_executed.log").write_text("1 1.0 0.01 a\n2 1.0 0.01 a\n")
    assert lost(ExecutedSteps(str(tmp_path))) == (2, 2)


@pytest.mark.parametrize("torn", ["b", "begin", "begin 0f3", "en", "begin 0f3 0"])
def test_a_torn_line_of_a_start_is_a_crash_and_swallows_nothing(tmp_path, torn):
    started(tmp_path, ends=True)
    with open(tmp_path / "starts.log", "a") as file:
        file.write(torn)
    assert lost(ExecutedSteps(str(tmp_path))) == (10, 0)
    started(tmp_path)
    assert lost(ExecutedSteps(str(tmp_path))) == (20, 0)


def test_lost_steps_count_on_the_worst_terms_ever_begun(tmp_path):
    executed = started(tmp_path, block=4)
    executed.begin(1, with_terms(SETTINGS, noise_multiplier=0.5, sample_rate=0.001))
    executed.begin(2, with_terms(SETTINGS, noise_multiplier=2.0, sample_rate=0.02))
    kept = Ledger(SETTINGS, steps=1)
    ExecutedSteps(str(tmp_path)).enter_lost(kept)
    assert kept.published_lost() == steps_of(0.5, 0.02, 4)


def crashed_run(folder, lost):
    """A run of 60 and 40 steps on two terms, whose second start crashed; its ledger."""
    quieter = with_terms(SETTINGS, noise_multiplier=2.0)
    kept = Ledger(SETTINGS, planned_steps=100)
    for settings, steps, more in ((SETTINGS, 60, 0), (quieter, 20, lost), (quieter, 20, 0)):
        executed = ExecutedSteps(str(folder))
        later = Ledger(settings, planned_steps=100)
        later.resume_from(kept, new_segment=True)
        later.start = executed.new_start()
        executed.enter_lost(later)
        executed.begin_start(50)
        for step in range(steps + more):
            executed.begin(step + 1, settings)
        later.steps += steps
        kept = later
        if not more:
            executed.end_start()
    Account(kept, 100).publish(str(folder))
    return kept


def test_a_descendant_counts_and_hides_the_steps_that_its_ancestor_lost(tmp_path):
    """Or an export would bring along less than it says of itself; hazards 45, 46 and 59."""
    told = []
    for lost in (5, 17):
        folder = tmp_path / str(lost)
        (folder / "weights").mkdir(parents=True)
        kept = crashed_run(folder, lost)
        exported = Account(kept, 100).exported()
        assert exported["steps_executed"] == 150
        (folder / "hf").mkdir()
        files.write_published(str(folder / "hf"), exported)
        of_export, of_run = (ledger_beside(str(folder / name)) for name in ("hf", "weights"))
        assert of_export.ledger.published_lost() == steps_of(1.0, 0.01, 50)
        own = Ancestor(
            kept.run,
            tuple(kept.segments()),
            " ".join(kept.names()),
            100,
            of_export.ledger.lost,
        )
        child = Ledger(with_terms(SETTINGS, noise_multiplier=8.0), ancestors=[own, own])
        child = Ledger.from_json(child.to_json())
        assert child.compose(child.executed()) == pytest.approx(exported["epsilon"])
        assert child.compose(child.planned()) == pytest.approx(exported["epsilon"])
        assert any("steps were lost: 50" in caveat for caveat in caveats(child, 1.0, 1.0))
        (all_begun,) = of_run.all_begun
        spent = union(all_begun.taken())
        assert accounting.compose(spent, delta=1e-5, accountant="rdp") == pytest.approx(
            exported["epsilon"]
        )
        run = Run(str(folder), kept, [], "f")
        told.append((spent, total([run]).epsilon, total([run]).steps_executed))
        assert told[-1][1] == pytest.approx(exported["epsilon"])
    assert told[0] == told[1]


def test_weights_that_came_without_their_log_say_so(tmp_path):
    """Steps that were lost there are not known here."""
    kept = crashed_run(tmp_path, 5)
    assert ExecutedSteps(str(tmp_path)).missing(kept.taken()) == 0
    assert ExecutedSteps(str(tmp_path / "elsewhere")).missing(kept.taken()) == 100


# What version 0.1.0 wrote.

BEFORE = Path(__file__).parent / "written_by_0_1_0"


def test_files_of_version_0_1_0_are_read_and_count_the_same(tmp_path):
    for name in ("privacy.json", "steps_executed.log"):
        (tmp_path / name).write_bytes((BEFORE / name).read_bytes())
    said = json.loads((BEFORE / "privacy.json").read_text())
    told = read_published(str(tmp_path))
    kept = Ledger.from_json((BEFORE / "ledger.json").read_text())
    assert told.taken() == kept.taken()
    assert told.taken_before() == kept.taken_before()
    assert told.epsilon() == kept.epsilon() == said["epsilon"]
    executed = ExecutedSteps(str(tmp_path))
    for ledger_ in (told, kept):
        executed.enter_lost(ledger_)
        assert ledger_.lost_exactly == 1  # the fifth of the first start
        assert ledger_.steps_executed == said["steps_executed"]
        assert ledger_.compose(ledger_.executed()) >= said["epsilon_executed"]


def test_more_steps_than_planned_at_first_are_a_caveat():
    first = Ledger(SETTINGS, planned_steps=10)
    for planned, told in ((10, 0), (8, 0), (12, 1)):
        later = Ledger(SETTINGS, planned_steps=planned)
        later.resume_from(first, new_segment=False)
        assert sum("raised from 10 to 12" in caveat for caveat in later.caveats) == told
        assert later.planned_steps == max(planned, 10)
