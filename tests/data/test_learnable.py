"""What lines lack is counted once, refused where all lack it, and else said in a labelled line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_dp.data import readable
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.records import jsonl

NOTES = [{"patient_id": f"p{i % 5}", "date": "2020", "note": f"note {i}"} for i in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(root: Path, rows: list[Any], **how: Any) -> Records:
    """Records of lines, each an object or the bytes of a line as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (root / "notes.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return Records.open("jsonl", str(root / "notes.jsonl"), **{"text_field": "note", **how})


def refusal(root: Path, rows: list[Any], **how: Any) -> str:
    with pytest.raises(ValueError, match=r"^(data|training)\.") as caught:
        opened(root, rows, **how)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_lines_that_have_all_are_no_warning(tmp_path: Path) -> None:
    assert opened(tmp_path, NOTES).warnings == ()
    assert opened(tmp_path, NOTES, unit_field="patient_id").warnings == ()


@pytest.mark.parametrize("unit_field", [None, "patient_id"])
def test_no_line_with_the_text_is_refused_with_the_fields_there_are(
    tmp_path: Path, unit_field: str | None
) -> None:
    for _ in range(2):  # from what was kept, too
        message = refusal(tmp_path, NOTES, text_field="notes", unit_field=unit_field)
        assert message.startswith("data.text_field = 'notes': none of the 20 lines has a text")
        assert "(not private: their fields are date, note, patient_id)" in message
    assert opened(tmp_path, NOTES, unit_field=unit_field).warnings == ()


CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


@pytest.mark.parametrize(
    "how, key",
    [
        ({"prompt_field": "question", "text_field": "note"}, "data.prompt_field = 'question'"),
        ({"prompt_field": "note", "text_field": "answer"}, "data.text_field = 'answer'"),
        ({"messages_field": "note"}, "data.messages_field = 'note'"),
    ],
)
def test_no_line_with_a_prompt_answer_or_chat_is_refused(
    tmp_path: Path, how: dict[str, str], key: str
) -> None:
    assert refusal(tmp_path, NOTES, **how).startswith(f"{key}: none of the 20 lines has a ")


def test_one_line_that_has_it_is_enough(tmp_path: Path) -> None:
    """Refusals compare none with one: what else a data set holds decides nothing."""
    chats = [{"chat": CHAT}, {"chat": [{"role": "user"}]}, {"chat": "?"}]
    (warning,) = opened(tmp_path, chats, messages_field="chat").warnings
    assert warning.startswith("2 of 3 lines have no list of messages in data.messages_field")


def test_lines_that_lack_it_are_counted(tmp_path: Path) -> None:
    rows = [*NOTES, {"text": "x"}, {"note": 3}, {"note": ""}, b"broken {", b'["note"]', b""]
    surrogate = b'{"note": "\\ud800"}'
    expected = (
        "3 of 27 lines have no text in data.text_field = 'note' and contribute nothing; "
        "their fields are date, note, patient_id, text",
        "3 of 27 lines are no JSON objects and contribute nothing",
        "1 of 27 lines are empty in data.text_field = 'note' and contribute nothing",
    )
    for _ in range(2):
        assert opened(tmp_path, [*rows, surrogate]).warnings == expected


def test_lines_without_a_unit_are_counted_with_what_follows(tmp_path: Path) -> None:
    lacking: list[Any] = [{"note": "x"}] * 3 + [{"note": "x", "patient_id": None}]
    for _ in range(2):
        (warning,) = opened(tmp_path, [*NOTES, *lacking], unit_field="patient_id").warnings
        assert warning == (
            "4 of 24 lines have no data.unit_field = 'patient_id': each is a unit of its own that "
            "contributes nothing, and counts in the number of units, so that q and the delta "
            "check are against 9 units"
        )


def test_units_that_are_held_out_are_not_those_of_q(tmp_path: Path) -> None:
    rows = [*NOTES, *({"note": "x"} for _ in range(40))]
    found = opened(tmp_path, rows, unit_field="patient_id", heldout_fraction=0.5)
    assert len(found.heldout) > 0
    assert found.warnings[0].endswith(f"are against {len(found.train)} units")


def test_a_unit_that_is_a_number_with_a_point_is_named(tmp_path: Path) -> None:
    rows = [{"patient_id": 12.0, "note": "x"}] * 3
    message = refusal(tmp_path, rows, unit_field="patient_id")
    assert "it holds 12.0, a number with a point" in message
    assert "write whole numbers or strings" in message
    (warning,) = opened(tmp_path, [*NOTES, *rows], unit_field="patient_id").warnings
    assert "(3 hold a number with a point, as 12.0)" in warning


def test_a_unit_field_that_no_line_has_is_refused_with_the_fields_there_are(tmp_path: Path) -> None:
    message = refusal(tmp_path, NOTES, unit_field="patient")
    assert message.startswith("data.unit_field = 'patient': none of the 20 records has one")
    assert "their fields are date, note, patient_id" in message


@pytest.mark.parametrize("unit_field", [None, "patient_id"])
@pytest.mark.parametrize(
    "data, said",
    [
        (b"PAR1\x15\x04\n\x15\x00\nPAR1", "is Parquet, not JSON lines; set training.dataset"),
        (gzip.compress(b"".join(b"%d\n" % i for i in range(999))), "is gzip"),
        (b"\x28\xb5\x2f\xfd\n\n", "is zstd"),
        (b'[\n{"note":\n"x"}\n]', "is one JSON array"),
        (b"plain\nprose", "none of the 2 lines is a JSON object"),
    ],
)
def test_another_format_is_named_with_its_conversion(
    tmp_path: Path, data: bytes, said: str, unit_field: str | None
) -> None:
    message = refusal(tmp_path, [data], unit_field=unit_field)
    assert message.startswith("training.dataset_path: ")
    assert said in message


def test_first_bytes_alone_refuse_nothing(tmp_path: Path) -> None:
    """They are one record's: whether a run starts must not follow from one."""
    (warning,) = opened(tmp_path, [b"PAR1", *NOTES]).warnings
    assert warning == "1 of 21 lines are no JSON objects and contribute nothing"


def test_names_of_fields_are_bounded(tmp_path: Path) -> None:
    wide = [{f"field {i} {j}" + 99 * "x": 1 for i in range(99)} for j in range(9)]
    (warning,) = opened(tmp_path, [*NOTES, *wide]).warnings
    assert len(warning) < 1200
    assert warning.endswith(", …")


def test_lines_are_parsed_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For their units and for what they lack; a second start parses none."""
    parse, parsed = jsonl._read_object, []

    def counted(*args: Any) -> Any:
        parsed.append(1)
        return parse(*args)

    monkeypatch.setattr(jsonl, "_read_object", counted)
    opened(tmp_path, NOTES, unit_field="patient_id")
    assert len(parsed) == len(NOTES)
    Records.open("jsonl", str(tmp_path / "notes.jsonl"), text_field="note", unit_field="patient_id")
    assert len(parsed) == len(NOTES)
    assert {path.stat().st_mode & 0o777 for path in (cache / "torchtitan_dp/index").iterdir()} == {
        0o600
    }


@pytest.mark.parametrize(
    "rows, looked",
    [(NOTES * 9, 16), ([{"other": 1}] * 100 + NOTES, 104)],
    ids=["some have it", "the first have not"],
)
def test_without_units_a_bounded_part_is_parsed_and_more_only_to_find_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], looked: int
) -> None:
    monkeypatch.setattr(readable, "PARSED_BYTES", 500)
    monkeypatch.setattr(readable, "_CHUNK", 8)
    seen: list[object] = []
    real: Callable[..., Any] = readable.Census.counter

    def counter(self: readable.Census, *args: Any) -> Any:
        count = real(self, *args)
        return lambda fields: (seen.append(1), count(fields))[1]

    monkeypatch.setattr(readable.Census, "counter", counter)
    found = opened(tmp_path, rows)
    assert len(seen) == looked
    assert len(found.store) == len(rows)
    assert all(f"of the first {looked} lines" in warning for warning in found.warnings)


def test_a_held_out_unit_decides_no_start_where_the_number_of_units_is_secret(
    tmp_path: Path,
) -> None:
    """Of two neighbours, one with a unit that is held out and one with none, both start."""
    terms = {"unit_field": "patient_id", "heldout_fraction": 0.02, "needs_heldout": True}
    with_one = [*NOTES, {"patient_id": "q19", "note": "by its hash among 2%"}]
    assert "holds out none of 5 units" in refusal(tmp_path, NOTES, **terms)
    assert len(opened(tmp_path, with_one, **terms).heldout) == 1

    secret = {**terms, "number_is_secret": True}
    (warning,) = opened(tmp_path, NOTES, **secret).warnings
    assert "held-out losses are nan" in warning
    assert opened(tmp_path, with_one, **secret).warnings == ()
