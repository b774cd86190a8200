"""The data of a run: what has nothing to learn is counted, and refused where all of it has not."""

import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.data.chats import chat
from tests.data.stores import as_jsonl, records_in, source, write
from torchtitan_dp.data.dataset import Records, Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer, HFTokenizer

NOTES = [{"patient_id": f"p{i % 5}", "date": "2020", "note": f"note {i}"} for i in range(20)]


def opened(root: Path, rows: list[Any], *, place: Path | None = None, **how: Any) -> Records:
    """Open rows as JSON Lines; `how` is for `source` and `records_in`."""
    known = {"heldout_fraction", "needs_heldout", "number_is_secret", "in_groups"}
    terms = {key: how.pop(key) for key in known & how.keys()}
    files = source(as_jsonl(root / "d", rows), "jsonl", **{"text_field": "note", **how})
    return records_in(files, str(place or root / "store"), **terms)


def warned(root: Path, rows: list[Any], **how: Any) -> tuple[str, ...]:
    records = opened(root, rows, **how)
    samples = Samples(records.store, 64, has_answers=records.source.reading.has_answers)
    return records.warnings + records.check_targets(samples)


def refusal(root: Path, rows: list[Any], **how: Any) -> str:
    with pytest.raises(ValueError, match=r"^(data|privacy|training)\..*\Z") as caught:
        warned(root, rows, **how)
    return str(caught.value)


def test_what_was_left_out_or_may_not_belong_is_one_line_each(tmp_path: Path) -> None:
    """Spellings of a name, and files of other endings."""
    rows: list[Any] = [*NOTES, *({"patient_id": name, "note": "x"} for name in ("P0.", "P 1"))]
    root = write(tmp_path / "d", dict.fromkeys(["b.ndjson", "c/d.JSONL", "e.jsonl.bz2"], b"{}"))
    other, spellings = opened(tmp_path, rows, unit_field="patient_id").warnings
    assert root == tmp_path / "d"
    assert other.startswith("3 of 4 files in training.dataset_path are not read (")
    assert spellings.startswith("2 units may be 1: names differ only by case, blanks")


def test_another_tokenizer_is_another_setting_on_the_same_records(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"n": 0, "o": 1}, []))
    first, *others = (
        opened(tmp_path, NOTES, place=tmp_path / str(i), tokenizer=tokenizer)
        for i, tokenizer in enumerate((ByteTokenizer(), HFTokenizer(backend, None, None)))
    )
    assert [one.fingerprint for one in others] == [first.fingerprint]
    assert all(one.settings != first.settings for one in others)


def test_row43_records_of_no_unit_are_counted_and_contribute_nothing(tmp_path: Path) -> None:
    lacking: list[Any] = [{"note": "x"}] * 3 + [{"note": "x", "patient_id": None}]
    first, second = warned(tmp_path, [*NOTES, *lacking], unit_field="patient_id")
    assert first.startswith(
        "4 of 24 lines have no usable data.unit_field = 'patient_id': each counts"
    )
    assert first.endswith("so q and the delta check are against 9 units")
    assert second.startswith("4 of 9 units have no target and contribute nothing (records: 4 have")


def test_row43_training_and_held_out_units_are_disjoint_and_all(tmp_path: Path) -> None:
    rows = [*NOTES, *({"note": "x"} for _ in range(40))]
    found = opened(tmp_path, rows, unit_field="patient_id", heldout_fraction=0.5)
    assert sorted([*found.train, *found.heldout]) == list(range(45))
    assert len(found.heldout) > 0
    assert found.warnings[0].endswith(f"are against {len(found.train)} units")


def test_row47_a_held_out_unit_decides_no_start_where_the_number_is_secret(tmp_path: Path) -> None:
    """Of two neighbours, one with a unit that is held out and one with none, both start."""
    terms = {"unit_field": "patient_id", "heldout_fraction": 0.02, "needs_heldout": True}
    with_one = [*NOTES, {"patient_id": "q19", "note": "by its hash among 2%"}]
    assert "holds out none of 5 units" in refusal(tmp_path, NOTES, **terms)
    assert len(opened(tmp_path, with_one, **terms).heldout) == 1
    secret = {**terms, "number_is_secret": True}
    (warning,) = opened(tmp_path, NOTES, **secret).warnings
    assert "held-out losses are nan" in warning
    (warning,) = opened(tmp_path, with_one, **secret).warnings
    assert "a loss of 1 held-out units says little" in warning


def test_row43_names_by_position_are_refused_where_the_number_is_secret(tmp_path: Path) -> None:
    for how in ({"heldout_fraction": 0.1}, {"in_groups": True}):
        message = refusal(tmp_path, NOTES, number_is_secret=True, **how)
        assert "one line more would change which are held out" in message
        opened(tmp_path, NOTES, number_is_secret=True, unit_field="patient_id", **how)


def test_row48_the_fingerprint_is_of_contents_fields_and_split(tmp_path: Path) -> None:
    rows = [{"ask": "p", "other": "o", "note": "a", "chat": chat("p", "a")}] * 3
    other = [*rows[:2], {**rows[0], "note": "b"}]
    hows: list[dict[str, Any]] = [{}, {"prompt_field": "ask"}, {"prompt_field": "other"}]
    hows += [{"messages_field": "chat"}, {"unit_field": "note"}, {"heldout_fraction": 0.01}]
    found = [opened(tmp_path, rows, **how).fingerprint for how in hows]
    assert opened(tmp_path, rows, place=tmp_path / "another").fingerprint == found[0]
    assert len({*found, opened(tmp_path, other).fingerprint}) == 7


def test_a_refused_store_leaves_no_thread_though_its_error_is_kept(tmp_path: Path) -> None:
    """A pool within a generator lives as long as an error's traceback: freed by garbage collection
    in a thread that is being started, it hangs the process (seen once, with the CUDA build)."""
    with pytest.raises(ValueError, match="none of the 2 records") as kept:
        opened(tmp_path, [{"other": "x"}, {"other": "y"}])
    assert kept.value.__traceback__
    assert not [one.name for one in threading.enumerate() if one.name.startswith("tokens")]
