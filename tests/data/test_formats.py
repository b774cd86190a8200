"""The readers of each format: what a row is read as, and which files are refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.stores import (
    WRITERS,
    as_arrow,
    as_lines,
    as_parquet,
    left,
    source,
    state,
    store_of,
    texts,
    write,
)
from torchtitan_dp.data import formats
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.prepare import prepared

TABLES = ["parquet", "arrow", "hf"]
FILE = {"parquet": "a.parquet", "arrow": "a.arrow", "hf": "data-00000-of-00001.arrow"}


def refuse(path: Path, format: str, match: str, **how: Any) -> None:
    """Require that a path is refused in one line."""
    with pytest.raises(ValueError, match=rf"^{match}.*\Z"):
        prepared(source(path, format, **how), str(path.parent / "store"))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_LINE_BYTES", 250_000)
    monkeypatch.setattr(formats, "MOST_ROW_BYTES", 1000)


TEXTS = [
    ("ünï ☃\r\n".encode(), "ünï ☃\r\n"),
    (b"\xef\xbb\xbfmarked", "marked"),
    (b"", ""),
    (b"caf\xc3", None),
    (b"\xff", None),
    (b"ok \xed\xa0\x80", None),
    (b"x" * 1001, None),
]


@pytest.mark.usefixtures("small_limits")
def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    root = write(tmp_path / "d", {f"{i}": data for i, (data, _) in enumerate(TEXTS)})
    assert texts(store_of(root, tmp_path)) == [text for _, text in TEXTS]


LINES = [
    (b'{"text": "one", "n": 1}', "one"),
    (b'{"text": "\\ud83d\\ude00\\n"}', "\U0001f600\n"),
    (b'\xef\xbb\xbf{"text": "marked"}', "marked"),
    (b'{"text": ""}', ""),
    (b'{"text": "cr"}\r', "cr"),
    (b"", None),
    (b"\r", None),
    (b'{"text": "half', None),
    (b'{"text": "\xc3"}', None),
    (b'{"text": "\\ud800"}', None),
    (b'{"body": "x"}', None),
    (b'{"text": 3}', None),
    (b'{"text": null}', None),
    (b'["text"]', None),
    (b"[" * 200_000, None),
    (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", None),
    (b'{"text": "' + b"x" * 250_000 + b'"}', None),
]


def packed(data: bytes, codec: str) -> bytes:
    codecs = {".gz": "gzip", ".zst": "zstd"}
    return pa.compress(data, codecs[codec], asbytes=True) if codec else data


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("ending", ["", "\n"], ids=["no newline at the end", "newline"])
@pytest.mark.parametrize("codec", ["", ".gz", ".zst"])
def test_row42_every_line_keeps_its_place(tmp_path: Path, ending: str, codec: str) -> None:
    data = as_lines(line for line, _ in LINES) + b"last" + ending.encode()
    root = write(tmp_path / "d", {f"a.jsonl{codec}": packed(data, codec)})
    assert texts(store_of(root, tmp_path, "jsonl")) == [*(text for _, text in LINES), None]


ROWS = [f"{i} " + "".join(chr(97 + (i * j * j) % 23) for j in range(60)) for i in range(300)]


@pytest.mark.parametrize("codec", [".gz", ".zst"])
def test_compressed_files_are_read_to_their_end_or_refused(tmp_path: Path, codec: str) -> None:
    lines, name = as_lines(ROWS), f"a.jsonl{codec}"
    parts = packed(lines[:5000], codec) + packed(b"", codec) + packed(lines[5000:], codec)
    root = write(tmp_path / "d", {name: parts})
    whole = store_of(root, tmp_path, "jsonl")
    assert texts(whole) == ROWS
    stores.delete(whole.folder)
    data = packed(lines, codec)
    damaged = data[:-1], data[: len(data) // 2], data[:20] + b"\xff" * 100 + data[120:], lines
    for one in damaged:
        write(root, {name: one})
        refuse(root, "jsonl", r"training\.dataset_path: .* cannot be read to its end")
        assert left(tmp_path / "store") == []


CSV = [
    (b'1,"two\nlines\r\n"\r\n', "two\nlines\r\n"),
    (b"\r\n", None),
    (b"too few\r\n", None),
    (b"too,many,\r\n", None),
    (b"4,ok \xe2\x98\x83\r\n", "ok ☃"),
    (b"5,torn \xe2\x98\r\n", None),
    (b'6,"a ""quote"", and more"\n', 'a "quote", and more'),
    (b'7,in the mid"dle\n', 'in the mid"dle'),
    (b'"8\xff",kept\n', "kept"),
    (b'"7"a,"at the"b"egin"\n', 'at theb"egin"'),
    (b"9," + b"x" * 1000 + b"\n", "x" * 1000),
    (b'10,"' + b"x," * 501 + b'"\n', None),
    (b"10," + b"x" * 1001 + b"\n", None),
    (b"11,a\0b\r", "a\0b"),
    (b"12,", ""),
]


@pytest.mark.usefixtures("small_limits")
def test_csv_rows_keep_their_places(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbfwho,text\r\n" + b"".join(line for line, _ in CSV)
    root = write(tmp_path / "d", {"a.csv": data})
    assert texts(store_of(root, tmp_path, "csv")) == [text for _, text in CSV]


def binary(data: Iterable[bytes | None]) -> Any:
    """Make a column of texts, which need not be UTF-8."""
    return pa.array(data, pa.binary()).view(pa.string())


@pytest.mark.parametrize("format", ["arrow", "hf"])
def test_offsets_out_of_a_file_break_two_values_alone(tmp_path: Path, format: str) -> None:
    root = WRITERS[format](tmp_path / "d", [{"text": text} for text in ("aaa", "bbb", "ccc")])
    good, bad = (np.array([0, 3, at, 9], np.int32).tobytes() for at in (6, 2**30))
    data = (root / FILE[format]).read_bytes()
    assert data.count(good) == 1
    write(root, {FILE[format]: data.replace(good, bad)})
    assert texts(store_of(root, tmp_path, format)) == ["aaa", None, None]


@pytest.mark.parametrize("format", TABLES)
def test_a_column_of_the_wrong_type_is_refused(tmp_path: Path, format: str) -> None:
    for key, values, needed in (
        ("text_field", [1, b"a", ["a"]], "texts"),
        ("unit_field", [1.5], "texts or whole numbers"),
        ("messages_field", ["a", ["a"]], "lists of structs with a role"),
    ):
        for value in values:
            root = WRITERS[format](tmp_path / "d", pa.table({"text": ["a"], "x": [value]}))
            match = rf"data\.{key} = 'x': .* has it as .*; name a column of {needed}"
            refuse(root, format, match, **{key: "x"})


@pytest.mark.parametrize("format", [*TABLES, "csv"])
def test_columns_that_are_missing_or_there_twice_are_refused(tmp_path: Path, format: str) -> None:
    root = WRITERS[format](tmp_path / "d", [{"who": "a", "text": "b"}])
    for key in ("text_field", "unit_field", "prompt_field"):
        match = (
            rf"data\.{key} = 'nope': .* no such column; its columns \(not private\) are who, text"
        )
        refuse(root, format, match, **{key: "nope"})
    write(root, {"a.csv": b"text,text\na,b\n"})
    if format != "csv":
        WRITERS[format](root, pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]))
    refuse(root, format, r"data\.text_field = 'text': .* has 2 columns of that name; keep one")


def test_rows_behind_a_damaged_page_keep_their_places(tmp_path: Path) -> None:
    expected = [f"note {i} " * 20 for i in range(450)]
    plain = {"use_dictionary": False, "data_page_size": 100, "write_batch_size": 1}
    rows = [{"text": text} for text in expected]
    root = as_parquet(tmp_path / "d", rows, row_group_size=150, compression="snappy", **plain)
    data = bytearray((root / "a.parquet").read_bytes())
    column = pq.read_metadata(root / "a.parquet").row_group(1).column(0)
    end = column.data_page_offset + column.total_compressed_size
    data[end - 50 : end] = b"\xff" * 50
    write(root, {"a.parquet": bytes(data)})
    found = texts(store_of(root, tmp_path, "parquet"))
    lost = found.index(None)
    assert 150 < lost < 300
    assert found == [*expected[:lost], *[None] * (300 - lost), *expected[300:]]


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"{i}", "who": i % 4} for i in range(50)]
    data = datasets.Dataset.from_list(rows).filter(lambda row: row["who"] != 3)
    data.save_to_disk(str(tmp_path / "d"), num_shards=3)
    expected = [row["text"] for row in rows if row["who"] != 3]
    assert texts(store_of(tmp_path / "d", tmp_path, "hf")) == expected


def test_row80_files_that_state_json_does_not_name_are_not_read(tmp_path: Path) -> None:
    """An earlier save still has withdrawn records, and a second copy of all others."""
    root = WRITERS["hf"](tmp_path / "d", [{"text": "a"}])
    for i in (1, 0, 10):
        as_arrow(root, [{"text": f"{i}"}], f"data-{i}.arrow", pa.ipc.new_stream)
    write(root, {"state.json": state("data-10.arrow", "./data-1.arrow")})
    assert texts(store_of(root, tmp_path, "hf")) == ["10", "1"]
    (notice,) = (data := source(root, "hf")).notices(data.files())
    assert notice.startswith(
        "2 of 4 files in training.dataset_path are not read (data-0.arrow, say), "
    )
    for one in (root / "data-1.arrow", root / "*.arrow"):
        refuse(
            one, "hf", r"training\.dataset_path = .* no folder .*: .* training\.dataset = 'arrow'"
        )


LISTS = [
    ("arrow", "state.json"),
    ("parquet", "_delta_log/00000000000000000000.json"),
    ("parquet", "metadata/v1.metadata.json"),
]


@pytest.mark.parametrize("format, name", LISTS)
def test_row80_a_folder_with_a_list_that_is_not_read_is_refused(
    tmp_path: Path, format: str, name: str
) -> None:
    root = WRITERS[format](tmp_path / "d", [{"text": "a"}])
    write(root, {name: b"{}"})
    refuse(root, format, rf"training\.dataset_path = .*: {name} lists the files that .* by a glob")
    assert texts(store_of(root / f"*.{format}", tmp_path, format)) == ["a"]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
INDICES = b'{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}'
OTHER = b"something else, and long enough to be looked at"
COMMAS = r"\(of UTF-8, separated by commas\)"


PATH = r"training\.dataset_path"
FIELD = r"data\.text_field = 'text'"
NAMED_TWICE = state("../d/state.json", "state.json")
BAD_FILES = [
    ("parquet", "a.parquet", OTHER, f"{PATH}: .*a.parquet is no Parquet file"),
    ("arrow", "a.arrow", OTHER, f"{PATH}: .*a.arrow is no Arrow file"),
    ("parquet", "a.parquet.tmp", b"", rf"{PATH} = .* record: .*there is a\.parquet\.tmp\)"),
    ("csv", "a.csv", b'text\na\n"b\nc\n', f"{PATH}: .*a.csv: a quote.* line 3 "),
    ("parquet", "a.parquet", POINTER, f"{PATH}: .*of a Git LFS pointer: git lfs pull"),
    ("csv", "a.csv", b"text;who\na;b\n", rf"{FIELD}: .*text;who {COMMAS}"),
    (
        "csv",
        "a.csv",
        "text\n".encode("utf-16"),
        f"{PATH}: .*/a.csv is no text in UTF-8 .parquet..: set training",
    ),
    (
        "csv",
        "a.csv",
        b"PAR1\x15\x04,P000",
        f"{PATH}: [^P]*/a.csv is no text in UTF-8 .parquet..: set tr[^P]*$",
    ),
    ("csv", "a.csv", b"text\n", f"{PATH} = .* holds no record: it needs .*csv"),
    ("csv", "a.csv", b'{"text": "a"}\n', f"{PATH}: .*/a.csv looks like jsonl"),
    ("jsonl", "a.jsonl", b'{"note": "a"}\n', f"{FIELD}: none .* \\(not private: the first has"),
    ("text", ".hidden", b"x", f"{PATH} = .* holds no record"),
    ("hf", "train/data-0.arrow", b"", f"{PATH} = .* the folder of one split"),
    ("hf", "state.json", b"{}", f"{PATH} = .* state.json lists no files"),
    ("hf", "state.json", state("a"), f"{PATH} = .* names .*/a, which is missing; save"),
    ("hf", "state.json", NAMED_TWICE, ".* state.json names a file twice"),
    ("hf", "state.json", INDICES, rf"{PATH} = .* selects rows \(flatten_indices\(\) first\)"),
]


@pytest.mark.parametrize("format, name, data, message", BAD_FILES)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    tmp_path: Path, format: str, name: str, data: bytes, message: str
) -> None:
    refuse(write(tmp_path / "d", {name: data}), format, message)


def test_mistakes_name_key_value_and_remedy(tmp_path: Path) -> None:
    for format, key, value, message in (
        ("jsonl", "text_field", "", "name the JSON field"),
        ("jsonl", "unit_field", "", "name the JSON field"),
        ("text", "unit_field", "who", "text files have no fields"),
        ("text", "prompt_field", "q", "text has none"),
        ("csv", "messages_field", "m", "csv has none"),
    ):
        refuse(tmp_path, format, rf"data\.{key} = '{value}': {message}", **{key: value})
