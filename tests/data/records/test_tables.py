"""Parquet and saved Hugging Face data sets read as jsonl does; broken cells stop nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan_dp.data.records import tables
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.samples.samples import SampleStore

from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.data.units import open_units

pa = pytest.importorskip("pyarrow")

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because ☃."}]
ROWS: list[dict[str, Any]] = [
    {
        "who": i % 4,
        "note": f"note {i} ü☃ " * (i % 7),
        "prompt": f"ask {i}",
        "chat": CHAT[: 1 + i % 2],
    }
    for i in range(50)
]


def as_jsonl(root: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    root.mkdir(parents=True)
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def as_parquet(root: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Path:
    import pyarrow.parquet as pq

    root.mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(rows), root / "a.parquet", **{"row_group_size": 7, **options}
    )
    return root


def as_hf(root: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """As `Dataset.save_to_disk` writes: an Arrow stream in batches."""
    root.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(root / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=9)
    (root / "state.json").write_text("{}")
    (root / "cache-1.arrow").write_bytes(b"no data of the set")
    return root


WRITERS = {"jsonl": as_jsonl, "parquet": as_parquet, "hf": as_hf}
Open = Callable[..., RecordStore]


@pytest.fixture
def open_(tmp_path: Path) -> Open:
    def open_here(format: str, path: Path, field: str = "note", **options: Any) -> RecordStore:
        keys = {field: "data.text_field"}
        index = str(tmp_path / "index")
        return open_store(
            format, str(path), text_field=field, keys=keys, index_folder=index, **options
        )

    return open_here


def texts(store: RecordStore) -> list[str | None]:
    return [store.read(i) for i in range(len(store))]


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_rows_read_as_lines_do(format: str, tmp_path: Path, open_: Open) -> None:
    lines = open_("jsonl", as_jsonl(tmp_path / "lines"), unit_field="who")
    store = open_(format, WRITERS[format](tmp_path / "table"), unit_field="who")
    assert texts(store) == texts(lines) == [row["note"] for row in ROWS]
    for cut in ((3, 0), (8, 5), (0, 2), (None, 4)):
        assert [store.read(9, *cut)] == [lines.read(9, *cut)]
    assert [store.size(i) for i in range(50)] == [lines.size(i) for i in range(50)]
    assert list(store.unit_names()) == list(lines.unit_names()) == [str(i % 4) for i in range(50)]
    name = {"parquet": "a.parquet", "hf": "data-00000-of-00001.arrow"}[format]
    assert list(store.record_ids()) == [f"{name}:{row}" for row in range(1, 51)]
    assert store.record_id(49) == f"{name}:50"
    with pytest.raises(IndexError):
        store.read(50)
    owners = [open_units(s, "who", index_folder=str(tmp_path / "u")) for s in (store, lines)]
    assert len({tuple(map(tuple, map(o.records, range(4)))) for o in owners}) == 1


def samples(format: str, path: Path, how: dict[str, str], monkeypatch: Any) -> list[Any]:
    from torchtitan_dp.data.reading import reading

    records = Records.open(format, str(path), **how)
    field = how.get("prompt_field")
    read = None
    if field is not None:
        read = reading(how["text_field"], field, None, "", ByteTokenizer())
    store = SampleStore(records.store, ByteTokenizer(), 64, records.units, reading=read)
    return [store.sample(unit) for unit in range(len(records.units))]


@pytest.mark.parametrize("how", [{}, {"unit_field": "who"}, {"prompt_field": "prompt"}])
def test_all_formats_have_the_same_draws_and_samples(
    how: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    how = {"text_field": "note", **how}
    found = {}
    for format, write in WRITERS.items():
        found[format] = samples(format, write(tmp_path / format), how, monkeypatch)
    assert len(found["jsonl"]) > 3
    for format in ("parquet", "hf"):
        for ours, theirs in zip(found[format], found["jsonl"], strict=True):
            assert repr(ours) == repr(theirs)


def test_chats_are_lists_of_structs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_dp.data.chat_template import messages_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for format, write in WRITERS.items():
        records = Records.open(format, str(write(tmp_path / format)), messages_field="chat")
        fields = [records.store.fields(i) for i in range(50)]
        found = [messages_of((one or {}).get("chat")) for one in fields]
        assert found == [messages_of(row["chat"]) for row in ROWS]


def test_a_large_row_group_is_read_in_batches_and_never_kept(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_("parquet", as_parquet(tmp_path / "t", row_group_size=50))
    expected = texts(store)
    assert len(store._decoded) == 1  # type: ignore[attr-defined]
    monkeypatch.setattr(tables, "GROUP_BYTES", 100)
    again = open_("parquet", tmp_path / "t")
    assert texts(again) == expected
    assert list(again._decoded.values()) == [[]]  # type: ignore[attr-defined]


def test_few_groups_stay_in_memory(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CACHE_BYTES", 1500)
    store = open_("parquet", as_parquet(tmp_path / "t"))
    rng = np.random.default_rng(0)
    for index in rng.integers(50, size=100).tolist():
        assert store.read(index) == ROWS[index]["note"]
        kept = store._decoded.values()  # type: ignore[attr-defined]
        assert 0 < sum(b.nbytes for one in kept for b in one) <= 1500


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_a_cell_that_is_no_text_reads_as_nothing(format: str, tmp_path: Path, open_: Open) -> None:
    rows: list[dict[str, Any]] = [{"note": "a"}, {"note": None}, {"note": ""}, {"note": "b"}]
    store = open_(format, WRITERS[format](tmp_path / "nulls", rows))
    assert texts(store) == ["a", None, "", "b"]
    numbers = open_(format, WRITERS[format](tmp_path / "numbers", [{"note": 1}, {"note": 2}]))
    assert texts(numbers) == [None, None]


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_text_that_is_not_utf8_reads_as_nothing(format: str, tmp_path: Path, open_: Open) -> None:
    import pyarrow.parquet as pq

    root = tmp_path / "d"
    root.mkdir()
    data = [b"one", b"\xff\xfe", b"three"]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(data))]
    table = pa.table({"note": pa.Array.from_buffers(pa.string(), 3, buffers)})
    if format == "parquet":
        pq.write_table(table, root / "a.parquet")
    else:
        with (
            pa.OSFile(str(root / "data-0.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    assert texts(open_(format, root)) == ["one", None, "three"]


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_a_cell_above_the_limit_reads_as_nothing(
    format: str, tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_ROW_BYTES", 1000)
    rows = [{"note": "x" * size} for size in (5, 2000, 900)]
    store = open_(format, WRITERS[format](tmp_path / "d", rows))
    assert [text and len(text) for text in texts(store)] == [5, None, 900]
    assert [bool(fields) for fields in store.all_fields()] == [True, False, True]


def test_a_category_is_text(tmp_path: Path, open_: Open) -> None:
    import pyarrow.parquet as pq

    (tmp_path / "d").mkdir()
    column = pa.array(["a", "b", "a", None]).dictionary_encode()
    pq.write_table(pa.table({"note": column}), tmp_path / "d/a.parquet")
    assert texts(open_("parquet", tmp_path / "d")) == ["a", "b", "a", None]


def test_a_broken_page_reads_as_nothing_and_leaves_other_groups(
    tmp_path: Path, open_: Open
) -> None:
    root = as_parquet(tmp_path / "d", compression="snappy", use_dictionary=False)
    expected = texts(open_("parquet", root))
    data = bytearray((root / "a.parquet").read_bytes())
    import pyarrow.parquet as pq

    column = pq.read_metadata(root / "a.parquet").row_group(2).column(1)
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    (root / "a.parquet").write_bytes(data)
    store = open_("parquet", root)
    assert texts(store) == [None if 14 <= i < 21 else text for i, text in enumerate(expected)]
    found = [None if fields is None else fields["note"] for fields in store.all_fields()]
    assert found == texts(store)


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_a_file_of_another_format_is_refused_in_one_line(
    format: str, tmp_path: Path, open_: Open
) -> None:
    root = WRITERS[format](tmp_path / "d")
    name = {"parquet": "b.parquet", "hf": "data-00001-of-00002.arrow"}[format]
    (root / name).write_bytes(b"something else, and long enough to be looked at")
    with pytest.raises(ValueError, match=f"{name} is no {format} file, or damaged") as error:
        open_(format, root)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["parquet", "hf"])
@pytest.mark.parametrize("key", ["text_field", "unit_field", "prompt_field", "messages_field"])
def test_a_missing_column_is_refused_by_its_key(
    format: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = {"text_field": "note", key: "nope"}
    with pytest.raises(ValueError, match=rf"data\.{key} = 'nope': .* its columns are who, note, "):
        Records.open(format, str(WRITERS[format](tmp_path / "d")), **fields)


def test_a_folder_of_several_splits_names_the_remedy(tmp_path: Path, open_: Open) -> None:
    as_hf(tmp_path / "d" / "train")
    with pytest.raises(ValueError, match="name the folder of one split"):
        open_("hf", tmp_path / "d")


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_the_fingerprint_follows_contents_and_no_place(
    format: str, tmp_path: Path, open_: Open
) -> None:
    write = WRITERS[format]
    one = open_(format, write(tmp_path / "one"))
    assert open_(format, write(tmp_path / "two")).fingerprint == one.fingerprint
    other = [*ROWS[:-1], {**ROWS[-1], "note": "changed"}]
    assert open_(format, write(tmp_path / "three", other)).fingerprint != one.fingerprint
    assert one.place_hash.startswith(format)
    assert one.stored_bytes(np.arange(50)).min() > 0


def test_datasets_own_folder_is_read(tmp_path: Path, open_: Open) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS).filter(lambda row: row["who"] != 3)
    data.save_to_disk(str(tmp_path / "d"), num_shards=3)
    expected = [row["note"] for row in ROWS if row["who"] != 3]
    assert texts(open_("hf", tmp_path / "d")) == expected


def test_large_row_groups_are_slow_which_a_command_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex
    import subprocess
    import sys

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = as_parquet(
        tmp_path / "d", [{"note": f"{i}" * 500} for i in range(300)], row_group_size=300
    )
    assert Records.open("parquet", str(root), text_field="note").warnings == ()
    monkeypatch.setattr(tables, "LARGE_GROUP", 250_000)
    (warning,) = Records.open("parquet", str(root), text_field="note").warnings
    assert "half is decoded to read one row" in warning
    command = shlex.split(warning.partition("small ones: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    (root / "a.parquet").unlink()
    regrouped = Records.open("parquet", str(root), text_field="note")
    assert len(regrouped.store) == 300
    assert regrouped.warnings == ()


def test_groups_and_files_may_be_empty(tmp_path: Path, open_: Open) -> None:
    import pyarrow.parquet as pq

    root = as_parquet(tmp_path / "d", row_group_size=50)
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table.slice(0, 0), root / "b.parquet")
    with pq.ParquetWriter(root / "c.parquet", table.schema) as file:
        for part in (table.slice(0, 0), table.slice(0, 3), table.slice(0, 0), table.slice(3, 2)):
            file.write_table(part)
    store = open_("parquet", root, unit_field="who")
    assert texts(store) == [row["note"] for row in ROWS + ROWS[:5]]
    assert [fields["note"] for fields in store.all_fields() if fields] == texts(store)
    assert store.record_id(50) == "c.parquet:1"
    assert store.stored_bytes(np.arange(55)).min() > 0


def test_rows_before_a_broken_page_read_alike_by_position_and_in_order(
    tmp_path: Path, open_: Open
) -> None:
    import pyarrow.parquet as pq

    rows = [{"note": f"note {i} " * 50} for i in range(200)]
    root = as_parquet(
        *(tmp_path / "d", rows),
        row_group_size=200,
        data_page_size=1024,
        use_dictionary=False,
        write_batch_size=10,
        compression="snappy",
    )
    data = bytearray((root / "a.parquet").read_bytes())
    column = pq.read_metadata(root / "a.parquet").row_group(0).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 400] = b"\xff" * 400
    (root / "a.parquet").write_bytes(data)
    store = open_("parquet", root)
    found = texts(store)
    assert found == [None if fields is None else fields["note"] for fields in store.all_fields()]
    assert found[0] == rows[0]["note"]
    assert found[-1] is None


def test_a_column_of_a_type_that_is_not_read_is_refused(tmp_path: Path, open_: Open) -> None:
    root = tmp_path / "d"
    root.mkdir()
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])
    with pa.OSFile(str(root / "data-0.arrow"), "wb") as file:
        table = pa.table({"note": runs})
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(
        ValueError, match=r"data\.text_field = 'note': .* has it as run_end_"
    ) as error:
        open_("hf", root)
    assert str(error.value).endswith("write it as text, numbers, lists or structs")


def test_rows_have_their_own_sizes(tmp_path: Path, open_: Open) -> None:
    """Whether their values lie in a dictionary, as in Parquet by default, or are written out."""
    one = tables.VALUE_BYTES
    notes = [one + len(row["note"].encode()) for row in ROWS]
    chats = [
        one + sum(3 * one + len((m["role"] + m["content"]).encode()) for m in row["chat"])
        for row in ROWS
    ]
    for format, write in (("parquet", as_parquet), ("plain", in_plain_pages), ("hf", as_hf)):
        root = write(tmp_path / format)
        for field, expected in (("note", notes), ("chat", chats)):
            store = open_(format.replace("plain", "parquet"), root, field)
            assert store.stored_bytes(np.arange(50)).tolist() == expected


def in_plain_pages(root: Path) -> Path:
    return as_parquet(root, use_dictionary=False)
