"""Units: which records are one unit's, by nothing but its name, and which units are held out."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.stores import Row, as_jsonl, records_of, source, store_of, texts, write
from torchtitan_dp.data.prepare import prepared
from torchtitan_dp.data.store import Store, folder_of, record_hash, singles, split, unit_hash


def named(*names: Any) -> list[Row]:
    """Make a row of each unit; bytes are a line as they are."""
    return [name if isinstance(name, bytes) else {"who": name, "text": "x"} for name in names]


def members(store: Store) -> set[tuple[int, ...]]:
    """List each unit's records; every record is in exactly one, in rising order."""
    rows = records_of(store.units)
    assert sorted(record for row in rows for record in row) == list(range(len(store)))
    assert all(row == sorted(row) for row in rows)
    assert store.units.hashes.tolist() == sorted(store.units.hashes.tolist())
    return {tuple(row) for row in rows}


def digest(name: bytes, size: int = 16, **options: Any) -> int:
    """Compute the hash that the split and the order are by once more."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=size, **options).digest()[:8], "little")


def test_records_of_one_name_are_a_unit_wherever_they_lie(tmp_path: Path) -> None:
    """A number is its digits: else who appears as both would count twice."""
    root = as_jsonl(tmp_path / "d/a", named("ann", "bob", "ann", 7, "7", "07", -7))
    as_jsonl(root.parent / "b", named("ünï", "ann", "Ann", 10**30, str(10**30)))
    store = store_of(root.parent, tmp_path, "jsonl", unit_field="who")
    assert members(store) == {(0, 2, 8), (1,), (3, 4), (5,), (6,), (7,), (9,), (10, 11)}
    assert store.facts["unnamed"] == 0


UNREADABLE = [
    *(b"", b"not JSON", b'{"who": "\xff", "text": "x"}', b'{"who": "\\ud800", "text": "x"}'),
    *(b'{"text": "x"}', b'["who"]', b"[" * 100_000),
    *(None, "", True, 1.0, ["ann"], {"id": "ann"}),
]  # fmt: skip


def test_a_record_whose_unit_cannot_be_read_is_alone_and_silent(tmp_path: Path) -> None:
    rows = named(*UNREADABLE, "ann", "a.jsonl:1", "a.jsonl:2")
    store = store_of(rows, tmp_path, unit_field="who")
    assert members(store) == {(n,) for n in range(len(rows))}
    assert texts(store) == [None] * len(UNREADABLE) + ["x"] * 3
    assert store.facts["unnamed"] == len(UNREADABLE)


def test_hashes_are_of_the_name_or_else_the_place_alone(tmp_path: Path) -> None:
    """From release to release: another hash would put held-out records into training."""
    rows = named("ann", None, "ann", 5)
    store = store_of(rows, tmp_path, unit_field="who")
    expected = [digest(name, person=b"unit") for name in (b"ann", b"5")]
    assert store.units.hashes.tolist() == sorted([*expected, digest(b"a.jsonl:2")])
    alone = store_of(rows, tmp_path)
    places = [digest(f"a.jsonl:{row}".encode(), size=8) for row in range(1, 5)]
    assert alone.units.hashes.tolist() == places
    assert alone.units.members.tolist() == [0, 1, 2, 3]
    files = store_of(write(tmp_path / "d", {"a": b"", "b/c": b""}), tmp_path)
    assert files.units.hashes.tolist() == [digest(b"a", size=8), digest(b"b/c", size=8)]


SPELLINGS = ["17", "17.0", " 17", "017", "José", "Jose\u0301", "JOSÉ\u200b", "ﬁn", "FIN", "0"]
SPELLINGS += ["17.5"]


def test_names_that_may_be_one_are_counted_and_not_merged(tmp_path: Path) -> None:
    rows = named(*SPELLINGS, None, b"torn", "José", 17)
    store = store_of(rows, tmp_path, unit_field="who")
    assert len(store.units) == len(SPELLINGS) + 2
    assert store.facts["alike"] == [9, 3]
    for plain in (named("a", "b", None, None), named(*range(9))):
        assert store_of(plain, tmp_path, unit_field="who").facts["alike"] == [0, 0]
    assert store_of(rows, tmp_path).facts["alike"] == [0, 0]


FOLDERS = {"p": b"4", "p0": b"\xff", "p1/a": b"1", "p1/deep/b": b"2", "p2.txt": b"3", "p2/a": b""}


def test_folders_are_units_and_files_beside_them_are_silent(tmp_path: Path) -> None:
    root = write(tmp_path / "d", FOLDERS)
    store = store_of(root, tmp_path, unit_field="folder")
    assert members(store) == {(0,), (1,), (2, 3), (4,), (5,)}
    assert texts(store) == [None, None, "1", "2", None, ""]
    assert store.facts["unnamed"] == 3
    assert members(store_of(root / "p[12]/**", tmp_path, unit_field="folder")) == {(0, 1), (2,)}
    assert texts(store_of(root, tmp_path)) == ["4", None, "1", "2", "3", ""]


NAMES = [f"folder/{i}.txt" for i in range(20_000)]


def heldout(names: Sequence[str], fraction: float) -> set[str]:
    data = b"".join(record_hash(name) for name in names)
    hashes = singles(np.frombuffer(data, "<u8").reshape(-1, 2)).hashes
    return {names[i] for i in split(hashes, fraction)[1]}


def test_a_side_depends_on_the_name_alone() -> None:
    held = heldout(NAMES, 0.1)
    assert heldout(NAMES[::-1], 0.1) == held
    assert heldout(NAMES[:7000], 0.1) == held & set(NAMES[:7000])
    assert held < heldout(NAMES, 0.2)
    assert held == {name for name in NAMES if digest(name.encode()) < 0.1 * 2**64}


def test_a_name_is_its_bytes_whatever_the_locale() -> None:
    """Another node's locale must not swap trained and held-out units."""
    for name in (b"\xc3\xa9", b"\xe9", b"\xff/a", "😀".encode()):
        known = name.decode("utf-8", "surrogateescape"), os.fsdecode(name)
        assert {record_hash(n) for n in known} == {hashlib.blake2b(name, digest_size=16).digest()}
        assert {folder_of(one) for one in known} == {"\udcff" if b"/" in name else None}
    assert unit_hash("\udcff") == hashlib.blake2b(b"\xff", digest_size=16, person=b"unit").digest()


def test_a_person_in_two_data_sets_is_one_unit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        as_jsonl(tmp_path / name, named("ann", name))
    both = [str(tmp_path / name) for name in ("one", "two/a.jsonl")]
    store = prepared(source(both, "jsonl", unit_field="who"), str(tmp_path / "store"))
    assert members(store) == {(0, 2), (1,), (3,)}
    with pytest.raises(ValueError, match="of several paths it is unclear"):
        source(both, unit_field="folder").check()
