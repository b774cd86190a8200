"""Row 48: ranks or nodes agree on indices, but hold other records under them.

"Another node" is a second folder with the same names and sizes in it.
"""

import json
from pathlib import Path

import pytest

from tests import build
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.preflight.check import open_records

LINES = [json.dumps({"who": who, "text": text}) for who, text in zip("aabb", "wxyz", strict=True)]


def jsonl(*orders: str) -> dict[str, bytes]:
    """A file for each order of the four lines; they are equally long."""
    return {
        f"{number}.jsonl": "".join(LINES[int(i)] + "\n" for i in order).encode()
        for number, order in enumerate(orders)
    }


ONE_TWO, TWO_ONE = {"a": b"one", "b": b"two"}, {"a": b"two", "b": b"one"}

# format, unit field, what one node holds, what the other does
SWAPS = {
    "equal-length lines in another order": ("jsonl", None, jsonl("0123"), jsonl("1023")),
    "one unit's lines in another order": ("jsonl", "who", jsonl("0123"), jsonl("1023")),
    "parts of equal size swapped": ("jsonl", None, jsonl("01", "23"), jsonl("23", "01")),
    "a line's text": ("jsonl", None, jsonl("0123"), jsonl("0023")),
    "files of equal size swapped": ("text", None, ONE_TWO, TWO_ONE),
    "a file with other text": ("text", None, ONE_TWO, ONE_TWO | {"b": b"six"}),
    "a unit's files swapped": (
        "text",
        "folder",
        {"u/a": b"one", "u/b": b"two", "v/a": b"x"},
        {"u/a": b"two", "u/b": b"one", "v/a": b"x"},
    ),
}


def lay_out(place: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return str(place)


def opened(format: str, path: str, unit_field: str | None, *overrides: str) -> Records:
    """The records of a configuration."""
    field = [] if unit_field is None else [f"--data.unit_field={unit_field}"]
    return open_records(
        build.config(
            f"--training.dataset={format}", f"--training.dataset_path={path}", *field, *overrides
        )
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("swap", SWAPS)
def test_row48_other_contents_are_another_fingerprint(swap, tmp_path):
    format, field, here, there = SWAPS[swap]
    one, same, other = (
        lay_out(tmp_path / place, files)
        for place, files in (("one", here), ("far/same", here), ("other", there))
    )
    prints = [opened(format, place, field).fingerprint for place in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
