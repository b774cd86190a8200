"""Units: which records are one unit's, found once, whole, and by nothing but the unit's name."""

import builtins
import hashlib
import json
import os
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan_dp.data.records.store import RecordStore

from torchtitan_dp.data import units as units_module
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.units import Units, open_units, split


def opened(path: Path, format: str, unit_field: str | None) -> tuple[RecordStore, Units]:
    folder = str(path.parent / "index")
    store = open_store(format, str(path), unit_field=unit_field, index_folder=folder)
    return store, open_units(store, unit_field, index_folder=folder)


def write_lines(root: Path, **files: list[Any]) -> Path:
    """jsonl files; bytes are a line as they are, a tuple (unit, text), else the unit alone."""
    root.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = []
        for row in rows:
            unit, text = row if isinstance(row, tuple) else (row, "text")
            line = {"who": unit, "text": text}
            lines.append(row if isinstance(row, bytes) else json.dumps(line).encode())
        (root / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    return root


def groups(store: RecordStore, units: Units) -> set[tuple[str, ...]]:
    """The ids of each unit's records; every record is in exactly one, in rising order."""
    rows = [units.records(unit) for unit in range(len(units))]
    assert sorted(np.concatenate(rows)) == list(range(len(store)))
    for unit, row in enumerate(rows):
        assert list(row) == sorted(row)
        assert [units.record(place) for place in units.places(unit)] == list(row)
    return {tuple(store.record_id(int(record)) for record in row) for row in rows}


def digest(name: str, **options: Any) -> int:
    """The hash that the split and the order are by, computed here once more."""
    data = hashlib.blake2b(name.encode(), digest_size=16, **options).digest()
    return int.from_bytes(data[:8], "little")


def hashes(units: Units) -> list[int]:
    return [int(one) for chunk in units.hashes() for one in chunk]


def test_records_of_one_name_are_a_unit_wherever_they_lie(tmp_path: Path) -> None:
    root = write_lines(tmp_path / "d", a=["ann", "bob", "ann"], b=["ünï", "ann", "Ann"])
    assert groups(*opened(root, "jsonl", "who")) == {
        ("a.jsonl:1", "a.jsonl:3", "b.jsonl:2"),
        ("a.jsonl:2",),
        ("b.jsonl:1",),
        ("b.jsonl:3",),
    }


def test_a_number_and_its_digits_are_one_unit(tmp_path: Path) -> None:
    """Else who appears as both would count twice; to merge two units breaks no promise."""
    root = write_lines(tmp_path / "d", a=[7, "7", "07", -7, 10**30, str(10**30)])
    lines = ({1, 2}, {3}, {4}, {5, 6})
    expected = {tuple(f"a.jsonl:{n}" for n in sorted(group)) for group in lines}
    assert groups(*opened(root, "jsonl", "who")) == expected


UNREADABLE = [
    b"",
    b"not JSON",
    b'{"who": "\xff", "text": "x"}',
    b'{"who": "\\ud800", "text": "x"}',
    b'{"text": "x"}',
    b'["who"]',
    b"[" * 100_000,
    None,
    "",
    True,
    1.0,
    ["ann"],
    {"id": "ann"},
]


def test_a_record_whose_unit_cannot_be_read_is_alone_and_silent(tmp_path: Path) -> None:
    root = write_lines(tmp_path / "d", a=[*UNREADABLE, "ann", "a.jsonl:1", "a.jsonl:2"])
    store, units = opened(root, "jsonl", "who")
    count = len(UNREADABLE) + 3
    assert groups(store, units) == {(f"a.jsonl:{n}",) for n in range(1, count + 1)}
    readable = [store.read(i) is not None for i in range(count)]
    assert readable == [False] * len(UNREADABLE) + [True] * 3


def test_identity_is_by_the_name_or_else_the_place_alone(tmp_path: Path) -> None:
    root = write_lines(tmp_path / "d", a=["ann", None, "ann", 5], b=[b"?"])
    _, units = opened(root, "jsonl", "who")
    named = [digest(name, person=b"unit") for name in ("ann", "5")]
    alone = [digest(name) for name in ("a.jsonl:2", "b.jsonl:1")]
    assert hashes(units) == sorted(named + alone)


def test_a_line_that_has_become_anothers_reads_as_nothing(tmp_path: Path) -> None:
    """A file that is sorted in place while a run has it open: the units are those of its start."""
    rows = [("A", "A0"), ("B", "B1"), ("A", "A2"), ("B", "B3"), (None, "n44")]
    root = write_lines(tmp_path / "data", a=rows)
    store, units = opened(root, "jsonl", "who")

    def read() -> set[frozenset[str | None]]:
        every = [units.records(unit).tolist() for unit in range(len(units))]
        return {frozenset(store.read(record) for record in unit) for unit in every}

    assert read() == {frozenset({"A0", "A2"}), frozenset({"B1", "B3"}), frozenset({None})}
    write_lines(root, a=[rows[i] for i in (0, 2, 1, 3, 4)])
    assert read() == {frozenset({"A0", None}), frozenset({"B3", None}), frozenset({None})}
    write_lines(root, a=[*rows[:4], ("nul", "n4")])  # as long as before, now with a name
    assert read() == {frozenset({"A0", "A2"}), frozenset({"B1", "B3"}), frozenset({None})}


def test_unit_without_a_text_stays_a_record_of_its_unit(tmp_path: Path) -> None:
    root = write_lines(tmp_path / "d", a=[("ann", None), ("ann", "x"), ("bob", 3)])
    store, units = opened(root, "jsonl", "who")
    assert groups(store, units) == {("a.jsonl:1", "a.jsonl:2"), ("a.jsonl:3",)}
    assert [store.read(i) for i in range(3)] == [None, "x", None]


FOLDERS = {"p1/a": b"1", "p1/deep/b": b"2", "p2/a": b"", "p2.txt": b"3", "p0": b"\xff", "p": b"4"}


def write_files(root: Path) -> Path:
    for name, data in FOLDERS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_folders_are_units_and_files_beside_them_too(tmp_path: Path) -> None:
    root = write_files(tmp_path / "d")
    store, units = opened(root, "text", "folder")
    expected = {("p1/a", "p1/deep/b"), ("p2/a",), ("p2.txt",), ("p0",), ("p",)}
    assert groups(store, units) == expected
    loose = [name for name in store.record_ids() if "/" not in name]
    assert units.unnamed == len(loose) == 3
    assert groups(*opened(root / "p[12]/**", "text", "folder")) == {
        ("p1/a", "p1/deep/b"),
        ("p2/a",),
    }


def test_without_a_field_each_record_is_a_unit(tmp_path: Path) -> None:
    root = write_files(tmp_path / "d")
    store, units = opened(root, "text", None)
    assert groups(store, units) == {(name,) for name in FOLDERS}
    assert units.fingerprint == ""


@pytest.mark.parametrize(
    "format, unit_field, message",
    [
        ("text", "user", r"data\.unit_field = 'user': text files have no fields; use 'folder'"),
        ("text", "folder", r"data\.unit_field = 'folder': none of the 2 records"),
        ("jsonl", "", r"data\.unit_field = '': name the JSON field"),
        ("jsonl", "whom", r"data\.unit_field = 'whom': none of the 3 records"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    unit_field: str,
    message: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = write_lines(tmp_path / "d", a=["ann", "bob"], b=["eve"])
    with pytest.raises(ValueError, match=message) as caught:
        Records.open(format, str(root), unit_field=unit_field)
    assert "\n" not in str(caught.value)


# The split


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_unit_is_held_out_by_its_name(tmp_path: Path, fraction: float) -> None:
    names = [f"user {i}" for i in range(200)]
    sides = []
    for place, order in (("d", names * 3), ("e", [*names[::-1], "more", *names])):
        store, units = opened(write_lines(tmp_path / place / "d", a=order), "jsonl", "who")
        train, heldout = split(units, fraction)
        who = [
            {json.loads(line)["who"] for line in _lines(store, tmp_path / place / "d", units, side)}
            for side in (train, heldout)
        ]
        assert not who[0] & who[1]
        assert who[0] | who[1] == set(order)
        sides.append(who[1] & set(names))
    assert sides[0] == sides[1]
    threshold = fraction * 2**64
    assert sides[0] == {name for name in names if digest(name, person=b"unit") < threshold}


def _lines(store: RecordStore, root: Path, units: Units, side: np.ndarray) -> Iterator[str]:
    lines = (root / "a.jsonl").read_text().split("\n")
    for unit in side:
        for record in units.records(int(unit)):
            yield lines[int(record)]


# The index


def test_second_open_reads_no_data_and_keeps_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_lines(tmp_path / "d", a=["ann", "bob", "ann"], b=["ann"])
    before = groups(*opened(root, "jsonl", "who"))
    read: list[str] = []
    real = builtins.open

    def spy(file: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", spy)
    assert groups(*opened(root, "jsonl", "who")) == before
    assert not any(name.startswith(str(root)) for name in read)
    monkeypatch.undo()
    for path in (tmp_path / "index").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"ann" not in path.read_bytes()
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700


def test_index_is_of_field_format_and_files(tmp_path: Path) -> None:
    root = tmp_path / "d"
    root.mkdir()
    (root / "x").mkdir()
    (root / "x/a.jsonl").write_bytes(b'{"folder": 1, "b": 1}\n{"folder": 2, "b": 1}')
    assert len(groups(*opened(root, "jsonl", "folder"))) == 2
    assert len(groups(*opened(root, "jsonl", "b"))) == 1
    assert len(groups(*opened(root, "text", "folder"))) == 1
    (root / "x/a.jsonl").write_bytes(b'{"folder": 2, "b": 1}\n{"folder": 2, "b": 1}')
    os.utime(root / "x/a.jsonl", ns=(1, 1))
    assert len(groups(*opened(root, "jsonl", "folder"))) == 1


@pytest.mark.parametrize("damage", ["empty", "short", "flip"])
def test_damaged_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    root = write_lines(tmp_path / "d", a=["ann", "bob", "ann"])
    expected = groups(*opened(root, "jsonl", "who"))
    (path,) = (tmp_path / "index").glob("units*")
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-40] ^= 1
    path.write_bytes({"empty": b"", "short": good[:-8], "flip": bytes(flipped)}[damage])
    assert groups(*opened(root, "jsonl", "who")) == expected
    assert path.read_bytes() == good


def test_fingerprint_sees_who_has_what_and_not_where_it_lies(tmp_path: Path) -> None:
    """Names may be exchanged without a change of any size: contents alone, or the units, tell."""
    prints = []
    for place, names in (("d", "ab"), ("e", "ab"), ("f", "ba"), ("g", "aa")):
        root = write_lines(tmp_path / place / "d", a=[*names, "c"])
        store, units = opened(root, "jsonl", "who")
        prints.append((store.fingerprint, units.fingerprint))
    assert prints[0] == prints[1]
    assert [len(set(kind)) for kind in zip(*prints, strict=True)] == [3, 3]


class Many:
    """A store of nothing but names, without files."""

    place_hash = fingerprint = ""

    def __init__(self, names: list[str | None]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def record_id(self, index: int) -> str:
        return f"place {index}"

    def confirm_units(self, is_of: object) -> None:
        pass

    def unit_names(self, count: object = None) -> Iterator[str | None]:
        return iter(self.names)


def test_many_records_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    names = [None if x % 50 == 0 else str(x) for x in rng.integers(1000, size=20_000).tolist()]
    whole = open_units(Many(names), "x", index_folder=str(tmp_path / "whole"))  # type: ignore
    monkeypatch.setattr(units_module, "CHUNK", 77)
    units = open_units(Many(names), "x", index_folder=str(tmp_path / "chunks"))  # type: ignore
    assert units.fingerprint == whole.fingerprint
    expected: dict[str, list[int]] = {}
    for record, name in enumerate(names):
        expected.setdefault(f"place {record}" if name is None else name, []).append(record)
    found = [units.records(unit).tolist() for unit in range(len(units))]
    assert sorted(found) == sorted(expected.values())


def test_grouping_takes_some_bytes_a_record_and_keeps_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "CHUNK", 1000)
    names: list[str | None] = [str(i % 30_000) for i in range(100_000)]
    # Before, so that imports and caches of the first use do not count: 1 MB.
    open_units(Many(names), "x", index_folder=str(tmp_path / "first"))  # type: ignore
    tracemalloc.start()
    units = open_units(Many(names), "x", index_folder=str(tmp_path / "index"))  # type: ignore
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(units) == 30_000
    assert peak < 75 * len(names)
