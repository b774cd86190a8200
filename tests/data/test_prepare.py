"""The pass that writes a store: it writes one once, and as a whole or not at all."""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chats import chat
from tests.data.stores import WRITERS, Row, as_jsonl, left, source, store_of, stored, texts, write
from tests.processes import forks
from torchtitan_dp.data import prepare
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.prepare import prepared
from torchtitan_dp.data.tokenizer import ByteTokenizer

CHATS = [None, chat("Why?", "☃."), chat("Why?"), [], chat(*"abcd"), chat("", " ")]
ROWS: list[Row] = [
    {"text": f"note {i} ü☃ " * (i % 7), "prompt": f"ask {i}", "who": i % 4, "chat": CHATS[i % 6]}
    for i in range(50)
]


@pytest.mark.parametrize("field", [None, "unit_field", "prompt_field", "messages_field"])
def test_rows_in_any_format_have_the_same_tokens(tmp_path: Path, field: str | None) -> None:
    names = {"unit_field": "who", "prompt_field": "prompt", "messages_field": "chat"}
    how = {} if field is None else {field: names[field]}
    found = {}
    for format in [name for name in WRITERS if (name, field) != ("csv", "messages_field")]:
        store = store_of(WRITERS[format](tmp_path / format, ROWS), tmp_path, format, **how)
        tokens = Path(store.folder, stores.TOKENS).read_bytes()
        units = store.units.hashes.tolist() if field == "unit_field" else []
        found[format] = tokens, units, [one.reason for one in stored(store)]
    tokens, _, reasons = found["jsonl"]
    assert len(tokens) > 1000
    assert 4 < len(reasons) - reasons.count(None) < 46
    assert all(one == found["jsonl"] for one in found.values())


@pytest.mark.parametrize("limits", [(1, 2**14), (100, 2**14), (2**23, 3)])
def test_batches_change_nothing(tmp_path: Path, monkeypatch: Any, limits: tuple[int, int]) -> None:
    rows = [*ROWS, b"", b"no JSON", "last"]
    whole = store_of(rows, tmp_path, prompt_field="prompt")
    stores.delete(whole.folder)
    for name, limit in zip(("_BATCH_CHARACTERS", "_BATCH_TEXTS"), limits, strict=True):
        monkeypatch.setattr(prepare, name, limit)
    parts = store_of(rows, tmp_path, prompt_field="prompt")
    assert (parts.fingerprint, stored(parts)) == (whole.fingerprint, stored(whole))


def test_a_long_text_is_tokenized_in_parts_and_stored_whole(tmp_path: Path) -> None:
    text = "ünï ☃ words " * 300_000
    assert texts(store_of(write(tmp_path / "d", {"a": text.encode()}), tmp_path)) == [text]


class Stops(ByteTokenizer):
    """Calls a function in the middle of the records."""

    def __init__(self, stop: Any) -> None:
        self.stop, self.calls = stop, 0

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        self.calls += 1
        if self.calls == 3:
            self.stop()
        return super().encode_each(texts)


def change_file(path: Path, change: str) -> None:
    data = path.read_bytes()
    if change in ("is deleted", "is replaced"):
        path.unlink()
    if change != "is deleted":
        path.write_bytes({"grows": data + b"\n", "shrinks": data[:21]}.get(change, data[::-1]))
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("name", ["a.jsonl", "first.jsonl"])
@pytest.mark.parametrize(
    "change", ["grows", "shrinks", "is rewritten", "is replaced", "is deleted"]
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: Any, change: str, name: str
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_TEXTS", 5)
    root = as_jsonl(tmp_path / "d", ROWS)
    write(root, {"first.jsonl": (root / "a.jsonl").read_bytes()})
    os.utime(root / name, ns=(1, 1))
    stop = Stops(lambda: change_file(root / name, change))
    with pytest.raises(ValueError, match=rf"^training\.dataset_path.*{name}.*: .*\Z"):
        store_of(root, tmp_path, "jsonl", tokenizer=stop)
    assert left(tmp_path / "store") == []


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    root, place = as_jsonl(tmp_path / "d", ROWS), tmp_path / "store"
    key = Path(store_of(root, tmp_path, "jsonl").folder).name
    stores.delete(str(place / key))
    other = "0" * 32
    half = f".{key}/tokens", f".{other}/tokens", f"{key}.lock"
    write(place, dict.fromkeys(half, b"half"))
    store_of(root, tmp_path, "jsonl")
    assert left(place) == sorted([f".{other}", key])


def open_store(connection: Connection, root: str, place: str, log: str) -> None:
    """Prepare in a process of its own, which notes each pass in a file."""
    real = stores.write

    def writing(*args: Any) -> None:
        with open(log, "a") as file:
            file.write("begin\n")
        real(*args)

    said: list[str] = []
    stores.write, stores.say, stores.WAIT_S = writing, said.append, 0.0  # type: ignore
    connection.send("started")
    store = prepared(source(root, "jsonl"), place)
    connection.send((store.fingerprint, texts(store), said))


@pytest.mark.slow
def test_of_several_processes_one_writes_and_each_that_waits_writes_a_line(tmp_path: Path) -> None:
    root, place, log = as_jsonl(tmp_path / "d", ["a", "b"]), tmp_path / "store", tmp_path / "log"
    folder = Path(store_of(root, tmp_path, "jsonl").folder)
    stores.delete(str(folder))
    arguments = str(root), str(place), str(log)
    with stores.writing_lock(str(folder)):  # until all of them wait for it
        processes = [forks.Process(open_store, *arguments) for _ in range(3)]
        assert [one.connection.recv() for one in processes] == ["started"] * 3
        time.sleep(0.3)
        assert not folder.exists()
    found = [one.connection.recv() for one in processes]
    assert [one.wait(60) for one in processes] == [0] * 3
    assert [read for _, read, _ in found] == [["a", "b"]] * 3
    assert len({fingerprint for fingerprint, *_ in found}) == 1
    assert log.read_text() == "begin\n"
    for *_, (line,) in found:
        assert line.startswith("waiting for another process")
    assert left(place) == [folder.name]


LINES = [f"line {i} " * (i % 9) for i in range(20)]


def killed_at(connection: Connection, root: str, place: str, number: int) -> None:
    """Prepare, and die at the `number`-th file operation below a place."""
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _OPERATIONS and any(str(arg).startswith(place) for arg in args[:2]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    connection.send("started")
    sys.addaudithook(watch)
    prepared(source(root, "jsonl"), place)


_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


@pytest.mark.slow
@pytest.mark.parametrize("is_stale", [False, True], ids=["written", "replaced"])
def test_a_kill_at_any_file_operation_leaves_no_half_store(tmp_path: Path, is_stale: bool) -> None:
    """Nor at any other time: between two of them only a file that the next start removes grows."""
    place = tmp_path / "store"
    root = as_jsonl(tmp_path / "d", LINES)
    expected = store_of(root, tmp_path, "jsonl")
    key = Path(expected.folder).name
    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        stores.delete(expected.folder)
        if is_stale:
            as_jsonl(root, LINES[::-1])
            store_of(root, tmp_path, "jsonl")
            as_jsonl(root, LINES)
        process = forks.Process(killed_at, str(root), str(place), number)
        process.connection.recv()
        code = process.wait(60)
        assert store_of(root, tmp_path, "jsonl").fingerprint == expected.fingerprint
        assert left(place) in ([key], sorted([key, f"{key}.lock"]))
    assert code == 0
    assert number > 12


def test_progress_has_sizes_alone(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(prepare, "_BATCH_TEXTS", 1)
    root = write(tmp_path / "d", {f"secret{i}.jsonl": b'{"text": "hidden"}\n' for i in range(4)})
    monkeypatch.setattr(prepare, "_PROGRESS_S", 0.0)
    prepared(source(root, "jsonl"), str(tmp_path / "store"))
    out, err = capfd.readouterr()
    first, *lines = err.splitlines()
    assert (out, len(lines)) == ("", 4)
    assert f"tokenizing 0.0 MB of {root} into {tmp_path / 'store'}" in first
    assert lines[-1] == "not private: tokenizing file 4 of 4, its record 1"
    assert all(line.startswith("not private: ") for line in (first, *lines))
    assert not re.search("secret|hidden", err)
