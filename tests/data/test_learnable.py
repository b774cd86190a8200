"""What units lack is counted, refused where all lack it, and else said in a labelled line."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan_dp.data.records import jsonl
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore

from tests.data import chats
from torchtitan_dp.data import learnable
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.reading import reading
from torchtitan_dp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from torchtitan_dp.data.units import word

NOTES = [{"patient_id": f"p{i % 5}", "date": "2020", "note": f"note {i}"} for i in range(20)]
T = 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def samples_of(records: Records, root: Path, **how: Any) -> SampleStore:
    """The samples of training, by a tokenizer of bytes."""
    names = how.get("text_field", "note"), how.get("prompt_field"), how.get("messages_field")
    tokenizer: Tokenizer = how.get("tokenizer", ByteTokenizer())
    assets, read = "", None
    if names[2] is not None:
        assets = chats.folder(root / "tokenizer")
        tokenizer = load_tokenizer(assets)
    if names[1:] != (None, None):
        read = reading(*names, assets, tokenizer)
    sampling = "random" if read is not None and how.get("unit_field") else "concat"
    return SampleStore(
        records.store, tokenizer, T, records.units, reading=read, unit_sampling=sampling
    )


def said(records: Records, samples: SampleStore, counts: bool = True) -> tuple[str, ...]:
    """All warnings of a start."""
    unit = word(records.settings["data.unit_field"])  # type: ignore[arg-type]
    terms = records.facts, records.wanted, unit
    found = learnable.check_targets(samples, records.train, *terms, counts=counts)
    return records.warnings + found


def opened(root: Path, rows: list[Any], **how: Any) -> Records:
    """Records of lines, each an object or the bytes of a line as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (root / "notes.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    known = {k: v for k, v in how.items() if k != "tokenizer"}
    return Records.open("jsonl", str(root / "notes.jsonl"), **{"text_field": "note", **known})


def warned(root: Path, rows: list[Any], counts: bool = True, **how: Any) -> tuple[str, ...]:
    records = opened(root, rows, **how)
    return said(records, samples_of(records, root, **how), counts)


def refusal(root: Path, rows: list[Any], **how: Any) -> str:
    with pytest.raises(ValueError, match=r"^(data|training)\.") as caught:
        warned(root, rows, **how)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_lines_that_have_all_are_no_warning(tmp_path: Path) -> None:
    assert warned(tmp_path, NOTES) == ()
    assert warned(tmp_path, NOTES, unit_field="patient_id") == ()


@pytest.mark.parametrize("unit_field, units", [(None, "20 records"), ("patient_id", "5 units")])
def test_no_line_with_the_text_is_refused_with_the_fields_there_are(
    tmp_path: Path, unit_field: str | None, units: str
) -> None:
    message = refusal(tmp_path, NOTES, text_field="notes", unit_field=unit_field)
    assert message.startswith(f"data.text_field = 'notes': none of the {units} has a target")
    assert message.endswith("(not private: their fields are date, note, patient_id)")
    assert warned(tmp_path, NOTES, unit_field=unit_field) == ()


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
    assert refusal(tmp_path, NOTES, **how).startswith(f"{key}: none of the 20 records has a ")


def test_what_lines_hold_in_the_place_of_messages_is_counted(tmp_path: Path) -> None:
    """Refusals compare none with one: what else a data set holds decides nothing."""
    rows: list[Any] = [{"chat": CHAT}, {"chat": "?"}, {"chat": None}, {"other": CHAT}]
    rows += [{"chat": [{"from": "human", "value": "?"}]}] * 3
    rows += [{"chat": [{"role": "user", "content": content}]} for content in ([], None, "?")]
    rows += [{"chat": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n"}]}]
    setting = "data.messages_field = 'chat'"
    assert warned(tmp_path, rows, messages_field="chat") == (
        f"{setting}: 7 of 11 records have no list of messages there and contribute nothing; they "
        "hold a list of objects with 'from' and 'value', a text, messages whose content is a "
        "list, messages whose content is null, null",
        f"{setting}: 1 of 11 records have no such JSON field and contribute nothing; their fields "
        "are other",
        f"{setting}: 1 of 11 records have no turn of the role 'assistant' and contribute nothing; "
        "their roles are user",
        f"{setting}: 1 of 11 records have only empty turns of the role 'assistant' and contribute "
        "nothing; their roles are assistant, user",
    )


def test_lines_that_lack_it_are_counted(tmp_path: Path) -> None:
    rows = [*NOTES, {"text": "x"}, {"note": 3}, {"note": ""}, b"broken {", b'["note"]', b""]
    surrogate = b'{"note": "\\ud800"}'
    for _ in range(2):
        assert set(warned(tmp_path, [*rows, surrogate])) == {
            "training.dataset_path: 3 of 27 records are no JSON objects and contribute nothing",
            "data.text_field = 'note': 2 of 27 records have no text there and contribute nothing; "
            "they hold a number, text with half a character",
            "data.text_field = 'note': 1 of 27 records have no such JSON field and contribute "
            "nothing; their fields are text",
            "data.text_field = 'note': 1 of 27 records are empty and contribute nothing",
        }


def test_a_units_lacking_record_is_no_lack_of_the_unit(tmp_path: Path) -> None:
    rows = [*NOTES, {"patient_id": "p0", "note": ""}, {"patient_id": "p9", "note": 1}]
    (warning,) = warned(tmp_path, rows, unit_field="patient_id")
    assert warning.startswith("data.text_field = 'note': 1 of 6 units have no text there")


def test_lines_without_a_unit_are_counted_with_what_follows(tmp_path: Path) -> None:
    lacking: list[Any] = [{"note": "x"}] * 3 + [{"note": "x", "patient_id": None}]
    for _ in range(2):
        assert warned(tmp_path, [*NOTES, *lacking], unit_field="patient_id") == (
            "4 of 24 lines have no usable data.unit_field = 'patient_id': each is a unit of its "
            "own that contributes nothing, and counts in the number of units, so that q and the "
            "delta check are against 9 units",
            "training.dataset_path: 4 of 9 units are no JSON objects of a known unit and "
            "contribute nothing",
        )


def test_units_that_are_held_out_are_not_those_of_q(tmp_path: Path) -> None:
    rows = [*NOTES, *({"note": "x"} for _ in range(40))]
    found = opened(tmp_path, rows, unit_field="patient_id", heldout_fraction=0.5)
    assert len(found.heldout) > 0
    assert found.warnings[0].endswith(f"are against {len(found.train)} units")


def test_a_unit_that_is_a_number_with_a_point_is_named(tmp_path: Path) -> None:
    rows = [{"patient_id": 12.0, "note": "x"}] * 3
    message = refusal(tmp_path, rows, unit_field="patient_id")
    assert "they hold 12.0, a number with a point" in message
    assert "write whole numbers or strings" in message


def test_a_unit_field_that_no_line_has_is_refused_with_the_fields_there_are(tmp_path: Path) -> None:
    message = refusal(tmp_path, NOTES, unit_field="patient")
    assert message.startswith("data.unit_field = 'patient': none of the 20 records has one")
    assert "their fields are date, note, patient_id" in message


@pytest.mark.parametrize("unit_field", [None, "patient_id"])
@pytest.mark.parametrize(
    "data, said",
    [
        (b"PAR1\x15\x04\n\x15\x00\nPAR1", "is Parquet; set training.dataset = 'parquet'"),
        (gzip.compress(b"".join(b"%d\n" % i for i in range(999))), "is gzip"),
        (b"\x28\xb5\x2f\xfd\n\n", "is zstd"),
        (b'[\n{"note":\n"x"}\n]', "is one JSON array"),
        (b"%PDF-1.7\n%", "is PDF; extract its text"),
        (
            '{"note": "x"}\n{"note": "y"}'.encode("utf-16"),
            "UTF-16; convert it: iconv -f UTF-16 ",
        ),
        ('{"note": "x"}\n{"note": "y"}'.encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8 'notes."),
        ('{"note": "x"}\n{"note": "y"}'.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8 'notes."),
        (
            b'\n{\n "note": "x"\n}\n{\n "note": "y"\n}',
            "goes on over several lines; write one a",
        ),
        (b"plain\nprose", "'jsonl' needs one a line, {"),
    ],
)
def test_another_format_is_named_with_its_conversion(
    tmp_path: Path, data: bytes, said: str, unit_field: str | None
) -> None:
    message = refusal(tmp_path, [data], unit_field=unit_field)
    assert message.startswith("training.dataset_path: none of the ")
    assert said in message


def test_first_bytes_alone_refuse_nothing(tmp_path: Path) -> None:
    """They are one record's: whether a run starts must not follow from one."""
    (warning,) = warned(tmp_path, [b"PAR1", *NOTES])
    assert warning.endswith("1 of 21 records are no JSON objects and contribute nothing")


def test_names_of_fields_are_bounded(tmp_path: Path) -> None:
    wide = [{f"field {i} {j}" + 99 * "x": 1 for i in range(99)} for j in range(9)]
    (warning,) = warned(tmp_path, [*NOTES, *wide])
    assert len(warning) < 1500
    assert warning.endswith(", …")


def test_units_are_grouped_in_one_pass(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start parses no line for that."""
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


def test_the_first_token_is_no_target(tmp_path: Path) -> None:
    """Nothing predicts it: a text of one token, without marks, has nothing to learn."""
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = tokenizer.eos_id = None
    (warning,) = warned(tmp_path, [*NOTES, {"note": "x"}], tokenizer=tokenizer)
    assert "1 of 21 records have no target within training.seq_len = 64" in warning
    how: dict[str, Any] = {"prompt_field": "ask", "tokenizer": tokenizer}
    rows = [{"ask": "", "note": "x"}, {"ask": "?", "note": "x"}]
    (warning,) = warned(tmp_path, rows, **how)
    assert "1 of 2 records have no target within training.seq_len = 64" in warning


@pytest.mark.parametrize("place", [0, 499, 501, 999])
def test_one_target_among_all_units_is_enough(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal depends on no part of them that happened to be looked at."""
    rows = [{"note": "" if i != place else "x"} for i in range(1000)]
    monkeypatch.setattr(learnable, "MOST_UNITS", 10)
    (warning,) = warned(tmp_path, rows)
    count = 10 if place not in (0, 999) else 9
    assert warning == (
        f"data.text_field = 'note': {count} of 10 (of 1,000) records are empty and contribute "
        "nothing"
    )
    assert warned(tmp_path, rows, counts=False) == ()


def test_a_start_after_a_plan_looks_for_one_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = opened(tmp_path, NOTES)
    samples, looked = samples_of(records, tmp_path), []
    real = samples.heads
    monkeypatch.setattr(samples, "heads", lambda unit: (looked.append(unit), real(unit))[1])
    assert said(records, samples, counts=False) == ()
    assert looked == [0]
    monkeypatch.setattr(learnable, "MOST_UNITS", 5)
    assert said(records, samples) == ()
    assert looked == [0, 0, 4, 9, 14, 19]


@pytest.mark.parametrize(
    "seq_len, read_bytes, most", [(64, 1, 1000), (8192, 1, 128), (2**20, 1, 4), (64, 2**28, 32)]
)
def test_the_looks_take_seconds(seq_len: int, read_bytes: int, most: int) -> None:
    """However long samples are, and however large the row groups of a Parquet file."""
    assert learnable.looks(seq_len, read_bytes) == most


ODD: dict[str, list[Any]] = {  # schemas, and values of one column each
    "string": ["one", "", None, "two " * 99, "x", None, "three"],
    "large_string": ["one", "", None, "ü", "\0", " "],
    "dictionary<values=string, indices=int32, ordered=0>": ["one", "one", None, "", "two"],
    "binary": [b"one", b"\xff", None],
    "int64": [1, None, 3],
    "bool": [True, None],
    "double": [1.5, float("nan"), None],
    "timestamp[s]": [0, None],
    "list<item: string>": [["one"], [], None, [None]],
    "struct<text: string>": [{"text": "one"}, None, {"text": None}],
    "null": [None, None],
}
TURN = ("role", "content")
CHATS: list[Any] = [
    [("user", "?"), ("assistant", "!")],
    [("user", "?"), ("Assistant", "!")],
    [("user", "?"), ("assistant", " ")],
    [("assistant", "!"), ("user", "?")],
    [("user", None), ("assistant", "!")],
    [(None, "?"), ("assistant", "!")],
    [("model", "!")],
    [("system", "x" * 999), ("user", "?"), ("assistant", "y" * 999)],
    [],
    None,
]


def odd_table(kind: str, values: list[Any], repeats: int, rng: np.random.Generator) -> Any:
    import pyarrow as pa

    order = rng.integers(len(values), size=repeats)
    cells = [values[i] for i in order]
    if kind == "chats":
        turn = pa.struct([(name, pa.string()) for name in TURN])
        rows = [c if c is None else [dict(zip(TURN, one, strict=True)) for one in c] for c in cells]
        return pa.array(rows, pa.list_(turn))
    if kind.startswith("dictionary"):
        return pa.array(cells, pa.string()).dictionary_encode()
    if kind.startswith("list"):
        return pa.array(cells, pa.list_(pa.string()))
    if kind.startswith("struct"):
        return pa.array(cells, pa.struct([("text", pa.string())]))
    return pa.array(cells, pa.type_for_alias(kind))


@pytest.mark.parametrize("unit_field", [None, "who"])
@pytest.mark.parametrize("kind", [*ODD, "chats"])
def test_plan_and_training_read_the_same(kind: str, unit_field: str | None, tmp_path: Path) -> None:
    """Units that are counted without a target are those whose samples have no label in training,
    under every schema, and those without a usable text as pyarrow or `json` alone reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(7)
    values = CHATS if kind == "chats" else ODD[kind]
    column = odd_table(kind, values, 60, rng)
    table = pa.table({"x": column, "who": rng.integers(20, size=60), "other": ["other"] * 60})
    (tmp_path / "d").mkdir()
    pq.write_table(table, tmp_path / "d/a.parquet", row_group_size=int(rng.integers(1, 60)))
    how: dict[str, Any] = {"unit_field": unit_field, "text_field": "other"}
    how["messages_field" if kind == "chats" else "text_field"] = "x"
    records = Records.open("parquet", str(tmp_path / "d"), **how)
    samples = samples_of(records, tmp_path, **how)
    loader = RecordLoader(samples, records.train, ranks=1, rank=0, batch_size=1)
    trained = np.zeros(len(records.train), dtype=bool)
    for draw in range(1 if unit_field is None else 40):  # of a random record of each unit
        for part in loader.microbatches(np.arange(len(records.train)), key=bytes([draw] * 32)):
            trained[part.positions_B] |= (part.labels_BT != IGNORE_INDEX).any(dim=1).numpy()

    usable: dict[Any, bool] = {}
    for i, row in enumerate(table.to_pylist()):
        unit = i if unit_field is None else row["who"]
        usable[unit] = usable.get(unit, False) or has_target(row["x"], kind)
    assert trained.sum() == sum(usable.values())
    if not trained.any():
        with pytest.raises(ValueError, match="has a target to learn: "):
            said(records, samples)
        return
    lines = said(records, samples)
    counts = [int(line.partition(": ")[2].split()[0]) for line in lines]
    assert sum(counts) == (~trained).sum()


def has_target(value: Any, kind: str) -> bool:
    if kind != "chats":
        return isinstance(value, str) and value != ""
    turns = [tuple(one.values()) for one in value or []]
    if any(role is None or content is None for role, content in turns):
        return False
    roles = {role for role, _ in turns}
    answered = any(role == "assistant" and content.strip() for role, content in turns)
    return answered and roles <= {"system", "user", "assistant"}


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array(["one", "two"])
    names = ["note", "note", "other"]
    pq.write_table(pa.Table.from_arrays([text] * 3, names), tmp_path / "a.parquet")
    for fields in ({"text_field": "note"}, {"text_field": "other", "unit_field": "note"}):
        with pytest.raises(ValueError, match=r"= 'note': .*a.parquet has 2 such columns; write it"):
            Records.open("parquet", str(tmp_path / "a.parquet"), **fields)  # type: ignore[arg-type]
    records = Records.open("parquet", str(tmp_path / "a.parquet"), text_field="other")
    assert said(records, samples_of(records, tmp_path)) == ()


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
