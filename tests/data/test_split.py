"""The held-out split: by unit, disjoint, and dependent on nothing but the unit's id."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.processes import forks
from torchtitan_dp.data import units as units_module
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.units import RecordUnits, split


class Names:
    """A store of identities alone."""

    fingerprint = ""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        raise AssertionError("the split must not look at a record")

    def record_id(self, index: int) -> str:
        return self.names[index]

    def record_ids(self) -> Iterator[str]:
        return iter(self.names)


NAMES = [f"folder/{i}.txt" for i in range(20_000)]


def heldout(names: list[str], fraction: float) -> set[str]:
    return {names[i] for i in split(RecordUnits(Names(names)), fraction)[1]}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_disjoint_complete_and_of_the_right_share(fraction: float) -> None:
    train, held = split(RecordUnits(Names(NAMES)), fraction)
    assert train.dtype == held.dtype == np.int64
    assert sorted([*train, *held]) == list(range(len(NAMES)))
    deviation = np.sqrt(len(NAMES) * fraction * (1 - fraction))
    assert abs(len(held) - fraction * len(NAMES)) < 5 * deviation
    # spread over the whole, not a run at one end
    assert abs(np.sum(held < len(NAMES) // 2) - len(held) / 2) < 5 * np.sqrt(len(held))


def test_depends_on_the_id_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = heldout(NAMES, 0.1)
    assert heldout(NAMES[::-1], 0.1) == held
    assert heldout(NAMES[:7000], 0.1) == held & set(NAMES[:7000])
    assert held < heldout(NAMES, 0.2)
    monkeypatch.setattr(units_module, "CHUNK", 7)
    assert heldout(NAMES, 0.1) == held


def test_stays_as_it_is_from_release_to_release() -> None:
    # a change of the hash would put held-out records of old runs into training
    train, held = split(RecordUnits(Names(["a", "b", "c", "d", "e", "f", "g", "h"])), 0.5)
    # `printf a | b2sum -l 64`, read as a little-endian number, below 2^63 or not
    assert (train.tolist(), held.tolist()) == ([5, 6], [0, 1, 2, 3, 4, 7])


def test_zero_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(units_module, "record_hash")
    train, held = split(RecordUnits(Names(NAMES)), 0)
    assert train.tolist() == list(range(len(NAMES)))
    assert len(held) == 0


def test_real_store_with_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a", "b", "c", "\udcff", "é"):
        (tmp_path / "d" / name).write_bytes(b"")
    store = open_store("text", str(tmp_path / "d"), index_folder=str(tmp_path / "index"))
    train, held = split(RecordUnits(store), 0.4)
    assert sorted([*train, *held]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_fraction_outside(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"data\.heldout_fraction"):
        split(RecordUnits(Names(NAMES)), fraction)


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(ValueError, match=r"data\.heldout_fraction = 0\.99.* leaves no record"):
        split(RecordUnits(Names(["a", "b"])), 0.99)


SIDES = """
import json, os, sys
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.units import split
from torchtitan_dp.data.units import open_units

root, index = sys.argv[1:]
found = [sys.getfilesystemencoding()]
for format, field in (("text", None), ("text", "folder"), ("jsonl", None)):
    store = open_store(format, root, unit_field=field, index_folder=index)
    units = open_units(store, field, index_folder=index)
    sides = [[os.fsencode(store.record_id(int(record))).hex() for unit in side
        for record in units.records(int(unit))] for side in split(units, 0.5)]
    hashes = [one for chunk in units.hashes() for one in chunk.tolist()]
    found.append([store.fingerprint, units.fingerprint, hashes, sides])
print(json.dumps(found))
"""
BYTES = (
    b"\xc3\xa9",
    b"\xe9",
    b"\xff",
    b"\x80",
    b"\xef\xbf\xbd",
    b"\xf0\x9f\x98\x80",
    b"a",
    b"\xc3",
)


def in_locale(root: Path, index: Path, **settings: str) -> list[object]:
    """The file system's encoding there, then what was found."""
    forks.need()
    index.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", SIDES, str(root), str(index)],
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(told.stdout)


def test_a_unit_is_on_the_same_side_whatever_the_locale(tmp_path: Path) -> None:
    """A name is its bytes: another node's locale must not swap trained and held-out units."""
    root = os.fsencode(tmp_path) + b"/d"
    for name in BYTES:
        for path in (name + b".jsonl", b"u" + name + b"/" + name, b"u" + name + b"/" + name * 2):
            os.makedirs(os.path.dirname(root + b"/" + path), exist_ok=True)
            with open(root + b"/" + path, "wb") as file:
                file.write(b"{}")
    utf8 = in_locale(tmp_path / "d", tmp_path / "utf8", PYTHONUTF8="1")
    ascii = in_locale(tmp_path / "d", tmp_path / "ascii", LC_ALL="C")
    assert (utf8[0], ascii[0]) == ("utf-8", "ascii")
    assert ascii[1:] == utf8[1:]
    if shutil.which("localedef") is None:
        pytest.skip("no localedef: ASCII alone was tried")
    made = subprocess.run(
        ["localedef", "-c", "-i", "POSIX", "-f", "ISO-8859-1", str(tmp_path / "latin")],
        capture_output=True,
    )
    latin = in_locale(tmp_path / "d", tmp_path / "latin1", LC_ALL="latin", LOCPATH=str(tmp_path))
    if latin[0] == "ascii":
        pytest.skip(f"localedef made no locale: {made.stderr!r}")
    assert latin[0] == "iso8859-1"
    assert latin[1:] == utf8[1:]
