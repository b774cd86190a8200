"""The pass that writes a store: it writes one once, and as a whole or not at all."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chats import chat
from tests.data.stores import WRITERS, Row, as_jsonl, store_of, stored, texts, write
from torchtitan_dp.data import prepare
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.tokenizer import ByteTokenizer

CHATS = [None, chat("Why?", "☃."), chat("Why?"), [], chat(*"abcd"), chat("", " ")]
ROWS: list[Row] = [
    {"text": f"note {i} ü☃ " * (i % 7), "prompt": f"ask {i}", "who": i % 4, "chat": CHATS[i % 6]}
    for i in range(50)
]


def left(place: Path) -> list[str]:
    """List what is in the folder of all stores, but for their locks."""
    return sorted(path.name for path in place.iterdir() if path.suffix != ".lock")


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
    shutil.rmtree(whole.folder)
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
