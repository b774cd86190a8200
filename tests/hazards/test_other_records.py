"""Hazard 68: one record changes how other records are read.

For each format, one record of a data set is replaced by the worst that it can hold; every other
record must read as before, alone, in a pass over all, and as a window of a sample. The tests ask
the reader alone, and know nothing of how it reads.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchtitan_dp.data.records import jsonl, tables
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.samples.excerpts import Excerpts

from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.tokenizer import ByteTokenizer

COUNT, WORST = 20, 7  # records, and which is replaced
PLAIN = [
    {
        "who": f"unit {i}",
        "note": f"note {i} ü☃ " * (1 + i % 5),
        "chat": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": f"Because {i}."},
        ],
    }
    for i in range(COUNT)
]
MOST = 2**16  # bytes of a row in these tests


class Read(NamedTuple):
    """All that the reader says of a record."""

    text: str | None
    part: str | None
    fields: Any
    in_passing: Any
    unit: str | None
    window: list[int]


def open_chats(format: str, path: Path, fields: bool = True) -> RecordStore:
    """Open records, with an index of their own."""
    return open_store(
        format,
        str(path),
        text_field="note",
        unit_field="who" if fields else None,
        keys={"note": "data.text_field", "chat": "data.messages_field"},
        index_folder=str(path / ".index"),
    )


def read(format: str, path: Path, fields: bool = True) -> list[Read]:
    """Read all records in each way."""
    store = open_chats(format, path, fields)
    excerpts = Excerpts(store, ByteTokenizer(), 8)

    def window(index: int) -> list[int]:
        members = np.array([index])
        ids = excerpts.window(members, 0.6, excerpts.head(members).ids)
        return [int(one) for one in ids]

    every = list(store.all_fields())
    units = list(store.unit_names()) if fields else [None] * len(store)
    assert len(store) == len(every) == len(units) == COUNT
    return [
        Read(store.read(i), store.read(i, 9, 3), store.fields(i), every[i], units[i], window(i))
        for i in reversed(range(COUNT))  # after the worst, too
    ][::-1]


# ---------------------------------------------------------------------------------------- text

TEXTS = {
    "empty": b"",
    "huge": b"x" * 2**25,
    "torn": "☃".encode()[:2],
    "not UTF-8": b"\xff\xfe" * 1000,
    "of another format": b"\x1f\x8b" + bytes(range(256)),
    "zeros": bytes(2**20),
}


def as_text(root: Path, worst: object) -> Path:
    root.mkdir()
    for i, row in enumerate(PLAIN):
        text = str(row["note"]).encode()
        content = worst if i == WORST and isinstance(worst, bytes) else text
        (root / f"{i:02}.txt").write_bytes(content)
    return root


# --------------------------------------------------------------------------------------- jsonl

LINES = {
    "empty": b"",
    "huge": b'{"note": "' + b"x" * (MOST + 1) + b'"}',
    "deeply nested": b'{"note": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "deeper than the file": b"[" * 60_000,
    "torn": b'{"who": "unit 7", "note": "no',
    "not UTF-8": b'{"who": "unit 7", "note": "\xff"}',
    "half a surrogate pair": b'{"who": "\\ud800", "note": "\\ud800", "\\udfff": 1}',
    "of another type": b'{"who": [7], "note": {"a": 1}, "chat": 3.5}',
    "no object": b"[1, 2]",
    "a number": b'{"who": 1e999, "note": ' + b"9" * 5000 + b"}",
}


def as_jsonl(root: Path, worst: object) -> Path:
    root.mkdir()
    lines = [json.dumps(row).encode() for row in PLAIN]
    if isinstance(worst, bytes):
        lines[WORST] = worst
    (root / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return root


# ----------------------------------------------------------------------------- columns of tables

ROWS: dict[str, dict[str, Any]] = {
    "empty": {"who": None, "note": None, "chat": None},
    "huge": {"note": b"x" * (MOST + 1)},
    "huge in parts": {"chat": [{"role": b"user", "content": b"y" * 2**12}] * 17},
    "a bomb": {"chat": [{"role": b"user", "content": b"y" * (MOST - 1000)}] * 500},
    "many values": {"chat": [None] * 200_000},
    "torn": {"note": "☃".encode()[:2]},
    "not UTF-8": {"note": b"\xff\xfe"},
    "not UTF-8 within": {"chat": [{"role": b"user", "content": b"\xff"}]},
    "a unit that is not UTF-8": {"who": b"\xff"},
    "a huge unit": {"who": b"u" * (MOST + 1)},
    "nothing within": {"chat": [{"role": None, "content": None}, None]},
}


def strings(values: list[Any], codes: bool) -> pa.Array:
    """An array of strings, which need not be UTF-8; as numbers of a dictionary, or plain."""
    data = [one.encode() if isinstance(one, str) else one for one in values]
    if not codes:
        return pa.array(data, pa.binary()).view(pa.string())
    code = {
        one: number
        for number, one in enumerate(dict.fromkeys(one for one in data if one is not None))
    }
    words = pa.array(list(code), pa.binary()).view(pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(map(code.get, data), pa.int32()), words)


def table(worst: object, codes: bool) -> pa.Table:
    rows: list[dict[str, Any]] = [dict(row) for row in PLAIN]
    if isinstance(worst, dict):
        rows[WORST].update(worst)
    turns = [turn for row in rows for turn in row["chat"] or ()]
    fields = [strings([(turn or {}).get(name) for turn in turns], codes) for name in MESSAGE]
    chats = pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *(len(row["chat"] or ()) for row in rows)]), pa.int32()),
        pa.StructArray.from_arrays(fields, MESSAGE, mask=pa.array([t is None for t in turns])),
        mask=pa.array([row["chat"] is None for row in rows]),
    )
    texts = {name: strings([row[name] for row in rows], codes) for name in ("who", "note")}
    return pa.table({**texts, "chat": chats})


MESSAGE = ["role", "content"]


def as_parquet(root: Path, worst: object, codes: bool = True, **options: Any) -> Path:
    root.mkdir()
    options = {"dictionary_pagesize_limit": 2**31 - 1, "compression": "zstd", **options}
    pq.write_table(table(worst, codes), root / "a.parquet", **options)
    return root


def as_hf(root: Path, worst: object, codes: bool = False) -> Path:
    root.mkdir()
    data = table(worst, codes)
    with (
        pa.OSFile(str(root / "data-0.arrow"), "wb") as file,
        pa.ipc.new_stream(file, data.schema) as stream,
    ):
        stream.write_table(data)
    return root


def without_arrow_types(root: Path, worst: object) -> Path:
    """As writers other than pyarrow, whose files do not say what 32-bit type a column had."""
    return as_parquet(root, worst, store_schema=False)


def in_plain_pages(root: Path, worst: object) -> Path:
    return as_parquet(root, worst, use_dictionary=False, data_page_size=100, write_batch_size=1)


def with_codes(root: Path, worst: object) -> Path:
    return as_hf(root, worst, codes=True)


Write = Callable[[Path, object], Path]
CASES: dict[str, tuple[str, Write, dict[str, Any]]] = {
    "text": ("text", as_text, TEXTS),
    "jsonl": ("jsonl", as_jsonl, LINES),
    "parquet": ("parquet", as_parquet, ROWS),
    "parquet of other writers": ("parquet", without_arrow_types, ROWS),
    "parquet in plain pages": ("parquet", in_plain_pages, ROWS),
    "hf": ("hf", as_hf, ROWS),
    "hf with codes": ("hf", with_codes, ROWS),
}
EACH = [(case, worst) for case, (_, _, worsts) in CASES.items() for worst in worsts]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a small record passes."""
    monkeypatch.setattr(tables, "MOST_ROW_BYTES", MOST)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", MOST)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("case", "worst"), EACH, ids=[f"{case}-{worst}" for case, worst in EACH])
def test_row68_every_other_record_reads_as_before(case: str, worst: str, tmp_path: Path) -> None:
    format, write, worsts = CASES[case]
    before = read(format, write(tmp_path / "before", None), fields=format != "text")
    after = read(format, write(tmp_path / "after", worsts[worst]), fields=format != "text")
    for i in range(COUNT):
        if i != WORST:
            assert before[i] == after[i]
            assert after[i].text == PLAIN[i]["note"]
            assert len(after[i].window) == 8
    assert after[WORST].text != before[WORST].text or after[WORST].fields != before[WORST].fields


@pytest.mark.slow
@pytest.mark.parametrize("store_schema", [False, True])
def test_row68_a_bomb_of_gigabytes_is_never_decoded(store_schema: bool, tmp_path: Path) -> None:
    """Nine messages of 250 MB in a file of some kilobytes, in a process with 3 GB of memory."""
    import resource
    import subprocess
    import sys

    root = tmp_path / "bomb"
    message = {"role": b"user", "content": b"a" * 250_000_000}
    as_parquet(root, {"chat": [message] * 9}, write_statistics=False, store_schema=store_schema)
    assert (root / "a.parquet").stat().st_size < 20_000
    program = (
        "from tests.hazards.test_other_records import *\n"
        f"store = open_chats('parquet', Path({str(root)!r}))\n"
        "found = list(store.all_fields())\n"
        "assert [one is None for one in found] == [i == WORST for i in range(COUNT)]\n"
        "for i in (WORST + 1, WORST, 0, COUNT - 1):\n"
        "    assert store.fields(i) == found[i]\n"
        "assert list(store.unit_names()) == [row['who'] for row in PLAIN]\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (3 * 10**9, 3 * 10**9))

    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("small_limits")
def test_row68_rows_before_a_damaged_page_are_read_one_by_one(tmp_path: Path) -> None:
    """A batch that fails takes none of the rows along that can be read."""
    root = in_plain_pages(tmp_path / "d", None)
    before = read("parquet", root)
    data = bytearray((root / "a.parquet").read_bytes())
    column = pq.read_metadata(root / "a.parquet").row_group(0).column(1)
    last = column.data_page_offset + column.total_compressed_size
    data[last - 20 : last] = b"\xff" * 20
    (root / "a.parquet").write_bytes(data)
    after = read("parquet", root)
    assert after[: COUNT - 2] == before[: COUNT - 2]
    assert after[-1].text is None
