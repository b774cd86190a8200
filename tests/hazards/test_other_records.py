"""Hazard 68: one record changes how others are read. In each format one is replaced by the worst
that it can hold: of every other one the store has the ids, unit and reason for none as before."""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from tests.data.chats import PLAIN as TEMPLATE
from tests.data.stores import (
    WRITERS,
    Row,
    Stored,
    as_arrow,
    as_hf,
    as_parquet,
    source,
    store_of,
    stored,
    write,
)
from tests.processes import forks
from torchtitan_dp.data import formats
from torchtitan_dp.data.files import BROKEN, list_files, locate
from torchtitan_dp.data.prepare import prepared
from torchtitan_dp.data.tokenizer import HFTokenizer

COUNT, WORST = 20, 7  # records, and which is replaced
PLAIN = [
    {
        "who": f"unit {i % 6}",
        "note": f"note {i} ü☃ " * (1 + i % 5),
        "chat": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": f"Because {i}."},
        ],
    }
    for i in range(COUNT)
]
MOST = 2**16  # bytes of a row in these tests


def read(format: str, path: Path) -> list[list[Stored]]:
    """Prepare all records in each way: by their text, and by their chat."""
    ways: list[dict[str, Any]] = [{"unit_field": None if format == "text" else "who"}]
    if format not in ("text", "csv"):
        ways.append({"unit_field": "who", "messages_field": "chat"})
    stores = [store_of(path, path.parent, format, text_field="note", **way) for way in ways]
    assert [len(store) for store in stores] == [COUNT] * len(ways)
    return [stored(store) for store in stores]


# ---------------------------------------------------------------------------------------- text

TEXTS = {
    "empty": b"",
    "huge": b"x" * 2**25,
    "torn": "☃".encode()[:2],
    "not UTF-8": b"\xff\xfe" * 1000,
    "of another format": b"\x1f\x8b" + bytes(range(256)),
    "zeros": bytes(2**20),
}


def text_files(root: Path, worst: object) -> Path:
    data = {f"{i:02}.txt": str(row["note"]).encode() for i, row in enumerate(PLAIN)}
    return write(root, data | ({f"{WORST:02}.txt": worst} if isinstance(worst, bytes) else {}))


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


# ----------------------------------------------------------------------------------------- csv

VALUES = {
    "blank": b"",
    "too few": b'"unit 7"',
    "too many": b"unit 7,note,more",
    "not UTF-8": b"unit 7,\xff",
    "a unit that is not UTF-8": b"\xff,note",
    "torn": "unit 7,☃".encode()[:-1],
    "newlines": b'unit 7,"' + b"\r\n" * 1000 + b'"',
    "quotes": b'unit 7,"' + b'""' * 1000 + b'"',
    "zeros": b"unit 7," + bytes(1000),
    "huge in parts": (b"unit 7" + b",x" * MOST),
    "huge": b"unit 7," + b"x" * (MOST + 1),
}


def in_lines(name: str, head: list[bytes], rows: list[bytes]) -> "Write":
    """A writer of rows, of which the worst takes the place of one, behind a head."""

    def write_lines(root: Path, worst: object) -> Path:
        every = [worst if i == WORST and worst is not None else row for i, row in enumerate(rows)]
        return write(root, {name: b"".join(line + b"\n" for line in [*head, *every])})

    return write_lines


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


def table(worst: object, codes: bool, codes_within: bool | None = None) -> pa.Table:
    """Rows as a table; messages have codes as other columns do, if they are not refused there."""
    codes_within = codes if codes_within is None else codes_within
    rows: list[dict[str, Any]] = [dict(row) for row in PLAIN]
    if isinstance(worst, dict):
        rows[WORST].update(worst)
    turns = [turn for row in rows for turn in row["chat"] or ()]
    fields = [strings([(turn or {}).get(name) for turn in turns], codes_within) for name in MESSAGE]
    chats = pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *(len(row["chat"] or ()) for row in rows)]), pa.int32()),
        pa.StructArray.from_arrays(fields, MESSAGE, mask=pa.array([t is None for t in turns])),
        mask=pa.array([row["chat"] is None for row in rows]),
    )
    texts = {name: strings([row[name] for row in rows], codes) for name in ("who", "note")}
    return pa.table({**texts, "chat": chats})


MESSAGE = ["role", "content"]


def parquet_file(root: Path, worst: object, codes: bool = True, **options: Any) -> Path:
    options = {"dictionary_pagesize_limit": 2**31 - 1, "compression": "zstd", **options}
    return as_parquet(root, table(worst, codes), row_group_size=1000, **options)


def without_arrow_types(root: Path, worst: object) -> Path:
    """As writers other than pyarrow, whose files do not say what 32-bit type a column had."""
    return parquet_file(root, worst, store_schema=False)


def in_plain_pages(root: Path, worst: object) -> Path:
    return parquet_file(root, worst, use_dictionary=False, data_page_size=100, write_batch_size=1)


Write = Callable[[Path, object], Path]
OBJECTS = [json.dumps(row).encode() for row in PLAIN]
PAIRS = [f"{row['who']},{row['note']}".encode() for row in PLAIN]
CASES: dict[str, tuple[str, Write, dict[str, Any]]] = {
    "text": ("text", text_files, TEXTS),
    "jsonl": ("jsonl", in_lines("a.jsonl", [], OBJECTS), LINES),
    "csv": ("csv", in_lines("a.csv", [b"who,note"], PAIRS), VALUES),
    "parquet": ("parquet", parquet_file, ROWS),
    "parquet of other writers": ("parquet", without_arrow_types, ROWS),
    "parquet in plain pages": ("parquet", in_plain_pages, ROWS),
    "arrow": ("arrow", lambda root, worst: as_arrow(root, table(worst, False)), ROWS),
    "hf": ("hf", lambda root, worst: as_hf(root, table(worst, False)), ROWS),
    "hf with codes": ("hf", lambda root, worst: as_hf(root, table(worst, True, False)), ROWS),
}
EACH = [
    pytest.param(case, worst, id=f"{case}-{worst}")
    for case, (_, _, worsts) in CASES.items()
    for worst in worsts
]


@pytest.fixture
def small_limits(monkeypatch):
    """Limits that a small record passes."""
    monkeypatch.setattr(formats, "MOST_ROW_BYTES", MOST)
    monkeypatch.setattr(formats, "MOST_LINE_BYTES", MOST)


def require_others_as_before(before: list[Stored], after: list[Stored]) -> None:
    for i in range(COUNT):
        if i != WORST:
            assert before[i] == after[i]
            assert after[i].reason is None
            assert after[i].ids


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("case", "worst"), EACH)
def test_row68_every_other_record_reads_as_before(case, worst, tmp_path):
    format, write, worsts = CASES[case]
    before = read(format, write(tmp_path / "before", None))
    after = read(format, write(tmp_path / "after", worsts[worst]))
    for one, other in zip(before, after, strict=True):
        require_others_as_before(one, other)
    assert [one[WORST] for one in before] != [one[WORST] for one in after]


def only(words: str) -> HFTokenizer:
    """Make a tokenizer that refuses a text with any other word."""
    vocabulary = {word: number for number, word in enumerate(words.split())}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return HFTokenizer(backend, None, None)


def test_row68_what_the_tokenizer_refuses_touches_no_other_record(tmp_path):
    every = [f"a b {'a ' * (i % 5)}" for i in range(COUNT)]
    before, after = (
        stored(store_of(rows, tmp_path, tokenizer=only("a b")))
        for rows in (every, [*every[:WORST], "a c", *every[WORST + 1 :]])
    )
    require_others_as_before(before, after)
    assert "refused by" in str(after[WORST].reason)


@pytest.mark.parametrize("content", ["raise", "\ufdd0", "{{ 1 // 0 }}"])
def test_row68_what_a_template_refuses_touches_no_other_record(tmp_path, content):
    template = "{% if messages[0].content == 'raise' %}{{ 1 // 0 }}{% endif %}" + TEMPLATE
    chats: list[Row] = [{"chat": row["chat"]} for row in PLAIN]
    worst = [{"role": "user", "content": content}, {"role": "assistant", "content": "no"}]
    before, after = (
        stored(store_of(rows, tmp_path, messages_field="chat", template=template))
        for rows in (chats, [*chats[:WORST], {"chat": worst}, *chats[WORST + 1 :]])
    )
    require_others_as_before(before, after)
    assert ("refused by" in str(after[WORST].reason)) == (content != "{{ 1 // 0 }}")


@pytest.mark.slow
def test_row68_a_row_that_memory_does_not_hold_is_refused(tmp_path):
    """Nine messages of 250 MB in a file of some kilobytes, in a process with 3 GB of memory: no
    row behind it is lost in silence."""
    forks.need()
    root = tmp_path / "bomb"
    worst = {"chat": [{"role": b"user", "content": b"a" * 250_000_000}] * 9}
    parquet_file(root, worst, write_statistics=False, store_schema=False)
    assert (root / "a.parquet").stat().st_size < 20_000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (3 * 10**9, 3 * 10**9))

    program = "from tests.hazards.test_other_records import *\n"
    command = [sys.executable, "-c", f"{program}read('parquet', Path({str(root)!r}))"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode != 0
    assert "exceeds this machine's memory" in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------- values above the limit of a row

PLACES = ['"', '""', ",", "\n", "\r\n", "\r", "\0", "x", "☃", '"y', 'y"', '"y"z', ""]
LONG = 40  # characters, of which a small limit takes 20


def raw_csv(rows: list[str]) -> bytes:
    """Values without quotes of the writer's: of "u, a" and then the value as it is."""
    return "".join(f"unit {i},{text}\n" for i, text in enumerate(rows)).encode()


def values_of(seed: int) -> list[str]:
    """Values with what a parser looks for at their begin, within and at their end; some long."""
    drawn = np.random.default_rng(seed)

    def place() -> str:
        return "".join(drawn.choice(PLACES, 2))

    def value() -> str:
        fill = "x" * int(drawn.integers(0, LONG)) if drawn.random() < 0.5 else ""
        return place() + fill + place() + fill + place()

    return [value() for _ in range(12)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("format", ["text", "jsonl", "csv", "raw csv", "parquet", "arrow", "hf"])
def test_row78_a_value_above_the_limit_divides_a_file_as_one_below_it(
    format, seed, tmp_path, monkeypatch
):
    """Every value above the limit reads as nothing in its own place; all else is as without one."""
    values = values_of(seed)
    rows: list[dict[str, Any]] = [{"who": f"unit {i}", "note": v} for i, v in enumerate(values)]
    rows[3]["note"] = rows[3]["note"] if format in ("text", "csv", "raw csv") else None
    kind = "csv" if format == "raw csv" else format
    if format == "text":
        root = write(tmp_path, {f"{i:02}": v.encode() for i, v in enumerate(values)})
    elif format == "raw csv":
        root = write(tmp_path, {"a.csv": b"who,note\n" + raw_csv(values)})
    else:
        root = WRITERS[format](tmp_path, rows)

    def read_all() -> "list[list[Any] | None] | str":
        facts, names = formats.FORMATS[kind], ["note"] if kind == "text" else ["who", "note"]
        paths = list_files(*locate(str(root), facts.below)).paths
        try:
            every = [row for path in paths for row in facts.rows(path, names)]
        except ValueError as refusal:
            return str(refusal)
        return [None if row is None else [row[name] for name in names] for row in every]

    whole = read_all()
    most = int(np.random.default_rng(seed).integers(10, 2 * LONG))
    monkeypatch.setattr(formats, "MOST_ROW_BYTES", most)
    monkeypatch.setattr(formats, "MOST_LINE_BYTES", 60 + most)

    def limited(place: int, read: "list[Any] | None") -> "list[Any] | None":
        if read is None or kind == "text":
            return None if read is None or len(read[0].encode()) > most else read
        if kind == "jsonl":
            return None if len(json.dumps(rows[place])) + 1 > 60 + most else read
        sizes = [len(one if kind == "csv" else one.encode()) if one else 0 for one in read]
        return [BROKEN if size > most else one for one, size in zip(read, sizes, strict=True)]

    # A quote that never closes is refused either way.
    known = whole if isinstance(whole, str) else [limited(*row) for row in enumerate(whole)]
    assert read_all() == known


# ------------------------------------------------------- attacks by one record, which worked once


def _arrow(path: Path, column: Any) -> Path:
    batch = pa.record_batch({"text": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return path


def test_row68_a_large_message_breaks_no_other_of_its_views(tmp_path):
    """Rows of views share buffers, and so a size."""
    turn = pa.struct([("role", pa.string()), ("content", pa.string_view())])
    texts = ["the first", "x" * (formats.MOST_ROW_BYTES + 1), "the third"]
    chats = [[{"role": "user", "content": text}] for text in texts]
    path = _arrow(tmp_path / "a.arrow", pa.array(chats, type=pa.list_(turn)))
    found = [row and row["text"] for row in formats.FORMATS["arrow"].rows(str(path), ["text"])]
    assert [found[0], found[2]] == [chats[0], chats[2]]


def test_tokens_never_become_records(tmp_path):
    """Where their store lies among the files, which may be refused."""
    (tmp_path / "a.txt").write_text("a text")
    for _ in range(2):
        with contextlib.suppress(ValueError):
            assert len(prepared(source(tmp_path), str(tmp_path / "store"))) == 1


def test_messages_whose_texts_are_codes_are_refused(tmp_path):
    """One text that is not UTF-8 would break all others of its dictionary."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["user", "assistant"]))
    turns = pa.StructArray.from_arrays([codes, codes], ["role", "content"])
    path = _arrow(tmp_path / "a.arrow", pa.ListArray.from_arrays(pa.array([0, 2]), turns))
    with pytest.raises(ValueError, match=r"data\.messages_field = 'text': .*dictionary"):
        formats.FORMATS["arrow"].check(str(path), {"text": "data.messages_field"})


@pytest.mark.usefixtures("small_limits")
def test_row68_a_broken_row_decides_for_no_other_how_its_list_is_cut(tmp_path):
    """A chat that is too large as a whole, and whose first messages are not."""
    count, found = 2 * formats.MOST_ITEMS, []
    for name, worst in (("a.arrow", b"fine"), ("b.arrow", b"\xff")):
        raw = pa.array([b"x" * 200] * count + [worst], pa.binary())
        content = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
        turns = pa.StructArray.from_arrays([pa.array(["user"] * len(raw)), content], list("rc"))
        path = _arrow(tmp_path / name, pa.ListArray.from_arrays([0, count, count + 1], turns))
        found += [next(formats.FORMATS["arrow"].rows(str(path), ["text"]))]
    assert found[0] == found[1] != {"text": BROKEN}
