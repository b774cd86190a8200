"""Hazard 72: prepared tokens of other settings or other files are trained on. Each test compares
with a store that was written elsewhere, from nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.data.chats import MARKED, chat
from tests.data.stores import source, stored, write
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.tokenizer import HFTokenizer


def lines(*letters: str) -> bytes:
    rows = [
        {"text": a, "body": a * 2, "who": a, "group": "one", "messages": chat(a, a)}
        for a in letters
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


FILES = {"a.jsonl": lines("a", "b"), "d/b.jsonl": lines("c", "a")}


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "d", FILES)


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def written(monkeypatch):
    """The stores that were written from now on."""
    real, found = stores.write, []

    def write(folder: str, make: Any) -> None:
        found.append(folder)
        real(folder, make)

    monkeypatch.setattr(stores, "write", write)
    return found


def words(*, reverse: bool = False, eos_id: int | None = None) -> HFTokenizer:
    names = sorted({letter * n for letter in "abc" for n in (1, 2)} | {"?"}, reverse=reverse)
    model = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?")
    return HFTokenizer(tokenizers.Tokenizer(model), None, eos_id)


def fresh(wanted: Source, tmp_path: Path) -> tuple[str, list[Any]]:
    """Prepare elsewhere, and return the fingerprint and all records."""
    store = prepared(wanted, str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "elsewhere")
    return store.fingerprint, stored(store)


SETTINGS: dict[str, dict[str, Any]] = {
    "the field": {"text_field": "body"},
    "a prompt": {"prompt_field": "body"},
    "prompt and answer exchanged": {"text_field": "body", "prompt_field": "text"},
    "the unit's field": {"unit_field": "who"},
    "a prompt that is the unit": {"prompt_field": "who", "unit_field": "who"},
    "another unit's field": {"unit_field": "group"},
    "the format": {"format": "text"},
    "folders as units": {"format": "text", "unit_field": "folder"},
    "another tokenizer": {"tokenizer": words()},
    "its words numbered otherwise": {"tokenizer": words(reverse=True)},
    "its end mark": {"tokenizer": words(eos_id=1)},
    "chats": {"messages_field": "messages"},
    "another template": {"messages_field": "messages", "template": MARKED},
}


@pytest.mark.parametrize("changed", SETTINGS)
def test_row72_other_settings_are_another_store(root, place, tmp_path, written, changed):
    for setting in SETTINGS:  # all beside each other
        prepared(source(root, **{"format": "jsonl", **SETTINGS[setting]}), place)
    prepared(source(root, "jsonl"), place)
    assert len(set(written)) == len(written) == len(SETTINGS) + 1
    wanted = source(root, **{"format": "jsonl", **SETTINGS[changed]})
    found = prepared(wanted, place)
    assert len(written) == len(SETTINGS) + 1
    assert (found.fingerprint, stored(found)) == fresh(wanted, tmp_path)
    assert found.fingerprint != prepared(source(root, "jsonl"), place).fingerprint


def rewrite(path: Path, data: bytes) -> None:
    """Write a file under its old time; the kernel's time of the change is another."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, data: bytes) -> None:
    rewrite_of = path.with_name(".new")
    shutil.copy2(path, rewrite_of)
    rewrite(rewrite_of, data)
    os.replace(rewrite_of, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "same size": lambda root: write(root, {"a.jsonl": lines("a", "x")}),
    "same size and time": lambda root: rewrite(root / "a.jsonl", lines("a", "x")),
    "another inode": lambda root: replace(root / "a.jsonl", lines("a", "x")),
    "lines exchanged": lambda root: rewrite(root / "a.jsonl", lines("b", "a")),
    "files exchanged": lambda root: write(
        root, {"a.jsonl": FILES["d/b.jsonl"], "d/b.jsonl": FILES["a.jsonl"]}
    ),
    "longer": lambda root: write(root, {"a.jsonl": lines("a", "b", "c")}),
    "one more file": lambda root: write(root, {"c.jsonl": b""}),
    "one file less": lambda root: (root / "a.jsonl").unlink(),
    "another name": lambda root: (root / "a.jsonl").rename(root / "z.jsonl"),
}


@pytest.mark.parametrize("unit_field", [None, "who"])
@pytest.mark.parametrize("change", CHANGES)
def test_row72_changed_files_are_prepared_again(root, place, tmp_path, written, change, unit_field):
    wanted = source(root, "jsonl", unit_field=unit_field)
    before = prepared(wanted, place)
    CHANGES[change](root)
    after = prepared(wanted, place)
    assert len(written) == 2
    assert (after.fingerprint, stored(after)) == fresh(wanted, tmp_path)
    assert (after.fingerprint, after.contents) != (before.fingerprint, before.contents)


@pytest.mark.parametrize("name", [stores.TOKENS, stores.ARRAYS, stores.FACTS])
def test_row72_one_byte_that_changed_in_the_store_is_never_read(root, place, written, name):
    wanted = source(root, "jsonl", unit_field="who")
    first = prepared(wanted, place)
    expected, path = stored(first), Path(first.folder, name)
    good = path.read_bytes()
    for at in range(0, len(good), max(len(good) // 40, 1)):
        count = len(written)
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 1
        path.write_bytes(damaged)
        again = prepared(wanted, place)
        assert (again.facts, stored(again)) == (first.facts, expected)
        if name == stores.TOKENS:
            assert len(written) == count + 1
        assert path.read_bytes() == good or name != stores.TOKENS
    assert len(written) > 10


@pytest.mark.parametrize("name", [stores.TOKENS, stores.ARRAYS, stores.FACTS])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_row72_a_store_that_is_not_whole_is_written_again(root, place, written, name, damage):
    wanted = source(root, "jsonl")
    first = prepared(wanted, place)
    expected, path = stored(first), Path(first.folder, name)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[:-4], "longer": data + b"more"}[damage])
    again = prepared(wanted, place)
    assert (again.fingerprint, stored(again)) == (first.fingerprint, expected)
    assert len(written) == 2
