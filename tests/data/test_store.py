"""A store on disk: what is read of it, who may read it, and that it is there as a whole or not."""

import itertools
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.drawn import Words
from tests.data.stores import Row, as_jsonl, left, store_of, stored, texts, write
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.tokenizer import ByteTokenizer

ROWS: list[Row] = ["first", "", b"no JSON", "☃ last"]


def test_any_part_of_a_record_is_read(tmp_path: Path) -> None:
    store = store_of(ROWS, tmp_path)
    first, last = ([256, *text.encode(), 257] for text in ("first", "☃ last"))
    assert [list(one.ids) for one in stored(store)] == [first, [], [], last]
    assert store.lengths().tolist() == [7, 0, 0, 10] == [store.length(i) for i in range(4)]
    for record, start, count in itertools.product(range(4), range(12), range(12)):
        found, whole = store.ids(record, start, count), (first, [], [], last)[record]
        assert found.dtype == np.int64
        assert found.tolist() == whole[start : start + count]


@pytest.mark.parametrize("size, width", [(2**15, 2), (2**15 + 1, 4), (2**17, 4)])
def test_the_largest_id_is_stored(tmp_path: Path, monkeypatch: Any, size: int, width: int) -> None:
    """As a target, and as none."""
    monkeypatch.setattr(Words, "get_vocab_size", lambda _: size)
    row = {"text": "w" * (size - 1) + " a", "prompt": "a " + "w" * (size - 1)}
    store = store_of([row], tmp_path, prompt_field="prompt", tokenizer=Words())
    assert stored(store)[0].ids == (~0, ~1, ~(size - 1), size - 1, 1)
    assert stored(store)[0].first == 2
    assert os.path.getsize(os.path.join(store.folder, stores.TOKENS)) == 5 * width


@pytest.mark.parametrize("end", ["replaced", "deleted"])
def test_an_open_store_keeps_its_tokens(tmp_path: Path, end: str) -> None:
    """A run that reads a store goes on with what it was started with."""
    root = as_jsonl(tmp_path / "d", ["one", "two"])
    store = store_of(root, tmp_path, "jsonl")
    if end == "deleted":
        stores.delete(store.folder)
        assert not os.path.exists(store.folder)
    else:
        as_jsonl(root, ["owt", "eno"])
        again = store_of(root, tmp_path, "jsonl")
        assert again.folder == store.folder
        assert texts(again) == ["owt", "eno"]
    assert texts(store) == ["one", "two"]


def modes(place: Path) -> list[str]:
    every = [place, *place.rglob("*")]
    return sorted(f"{stat.S_IMODE(path.stat().st_mode):o} {path.is_dir()}" for path in every)


def test_all_of_it_is_its_owners_only_at_all_times(tmp_path: Path) -> None:
    place, found = tmp_path / "store", list[str]()

    class Spy(ByteTokenizer):
        def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
            found.extend(modes(place))
            return super().encode_each(texts)

    umask = os.umask(0)
    try:
        store_of(ROWS, tmp_path, tokenizer=Spy())
    finally:
        os.umask(umask)
    assert found == ["600 False"] * 2 + ["700 True"] * 2  # a lock, and half a store
    assert modes(place) == ["600 False"] * 5 + ["700 True"] * 2  # the lock stays


def test_names_sizes_and_removal(tmp_path: Path) -> None:
    place = tmp_path / "store"
    one, two = (store_of([text], tmp_path) for text in ("a" * 1000, "b"))
    names = sorted(Path(store.folder).name for store in (one, two))
    (place / f".{names[0]}").mkdir()
    write(place, {f"{names[0]}.lock": b"", "mine.txt": b"", "mine/tokens": b""})
    assert stores.names(str(place)) == sorted([*names, f".{names[0]}"])
    for name in stores.names(str(place)):
        stores.delete(str(place / name))
    assert left(place) == ["mine", "mine.txt"]


def test_facts_have_no_text_and_no_name_of_a_unit(tmp_path: Path) -> None:
    rows: list[Row] = [{"text": "hidden", "who": "somebody"}, {"text": 3, "who": None}]
    store = store_of(rows, tmp_path, unit_field="who")
    assert store.facts["records"] == 2
    for name in (stores.FACTS, stores.ARRAYS):
        assert not re.search(b"hidden|somebody", Path(store.folder, name).read_bytes())
