"""Record stores: what is a record, what is not, and an index that is reused but never trusted."""

import builtins
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan_dp.data.records import hashing, jsonl
from torchtitan_dp.data.records import text as text_format
from torchtitan_dp.data.records.store import RecordStore

from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.units import open_units

Open = Callable[..., RecordStore]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def open_(index: Path) -> Open:
    def open_here(format: str, path: Path | str, **options: Any) -> RecordStore:
        return open_store(format, str(path), index_folder=str(index), **options)

    return open_here


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def ids(store: RecordStore) -> list[str]:
    one_by_one = [store.record_id(i) for i in range(len(store))]
    assert list(store.record_ids()) == one_by_one
    return one_by_one


def texts(store: RecordStore) -> list[str | None]:
    return [store.read(i) for i in range(len(store))]


TREE = {
    "b.txt": b"bee",
    "a/x.txt": "ünï ☃".encode(),
    "a/deep/er/y.md": b"why",
    "a.txt": b"",
    ".hidden": b"no",
    ".git/config": b"no",
    "__pycache__/m.txt": b"no",
    "m.pyc": b"no",
}


def test_text_folder_is_recursive_sorted_and_skips_hidden(tmp_path: Path, open_: Open) -> None:
    store = open_("text", write(tmp_path / "d", TREE))
    assert ids(store) == ["a.txt", "a/deep/er/y.md", "a/x.txt", "b.txt"]
    assert texts(store) == ["", "why", "ünï ☃", "bee"]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "a/x.txt", "b.txt"]),
        ("a/**", ["a/deep/er/y.md", "a/x.txt"]),
        ("*/*", ["a/x.txt"]),
        ("**/er/**/*.md", ["a/deep/er/y.md"]),
        ("[b-z].t?t", ["b.txt"]),
    ],
)
def test_text_glob(tmp_path: Path, open_: Open, pattern: str, expected: list[str]) -> None:
    root = write(tmp_path / "d", TREE)
    prefix = "" if pattern != "a/**" else "a/"  # ids are relative to the part without wildcards
    assert [prefix + name for name in ids(open_("text", root / pattern))] == expected


def test_text_single_file_and_names_with_wildcards(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a[1]*.txt": b"one", "a1.txt": b"two"})
    store = open_("text", root / "a[1]*.txt")
    assert (ids(store), texts(store)) == (["a[1]*.txt"], ["one"])


def test_text_names_need_not_be_utf8(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {os.fsdecode(b"\xff.txt"): b"x"})
    assert texts(open_("text", root)) == ["x"]


@pytest.mark.parametrize("data", [b"caf\xc3", b"\xff", b"ok \xed\xa0\x80"])
def test_text_that_is_not_utf8_stays_as_undecodable(
    tmp_path: Path, open_: Open, data: bytes
) -> None:
    assert texts(open_("text", write(tmp_path / "d", {"a": data, "b": b"b"}))) == [None, "b"]


def test_text_file_that_disappears_is_undecodable(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a": b"a", "b": b"b"})
    store = open_("text", root)
    (root / "a").unlink()
    assert texts(store) == [None, "b"]


def test_max_bytes_cuts_between_characters(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a": "a☃b".encode()})
    line = json.dumps({"text": "a☃b"}).encode()
    other = write(tmp_path / "j", {"a.jsonl": line})
    for store in (open_("text", root), open_("jsonl", other)):
        cuts = [store.read(0, max_bytes=n) for n in range(7)]
        assert cuts == ["", "a", "a", "a", "a☃", "a☃b", "a☃b"]


def test_max_bytes_reads_no_more_of_a_text_file(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a": b"good" + b"\xff" * 100})
    store = open_("text", root)
    assert (store.read(0, max_bytes=4), store.read(0)) == ("good", None)


def test_links_loop_no_walk_and_repeat_no_file(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a/x.txt": b"x"})
    outside = write(tmp_path / "far", {"f/y.txt": b"y", "z.txt": b"z"})
    for name, target in {
        "a/up": root,
        "a/up2": root / "a",
        "self": root / "self",
        "again.txt": root / "a/x.txt",
        "dangling": root / "nowhere",
        "linked": outside / "f",
        "z.txt": outside / "z.txt",
    }.items():
        (root / name).symlink_to(target)
    expected = ["a/x.txt", "linked/y.txt", "z.txt"]
    assert ids(open_("text", root)) == expected
    assert ids(open_("text", root / "**/*.txt")) == expected


def test_one_real_file_is_one_record_whatever_links_name_it(tmp_path: Path, open_: Open) -> None:
    far = write(tmp_path / "far", {"x.txt": b"x", "f/y.txt": b"y", "z.md": b"z"})
    root = write(tmp_path / "d", {"b/own.txt": b"own", "copy.md": b"own"})
    for name, target in {
        "a.txt": far / "x.txt",
        "b/again.txt": far / "x.txt",
        "c.txt": root / "a.txt",
        "linked": far / "f",
        "y.txt": far / "f/y.txt",
        "m1.txt": far / "z.md",
        "m2.txt": root / "m1.txt",
        "n.txt": root / "copy.md",
    }.items():
        (root / name).symlink_to(target)
    every = ["a.txt", "b/own.txt", "copy.md", "linked/y.txt", "m1.txt"]
    assert ids(open_("text", root)) == every
    # where its own name is not listed, the first link's is
    assert ids(open_("text", root / "n*.txt")) == ["n.txt"]
    os.symlink(root, tmp_path / "also")  # a root that is a link itself
    assert ids(open_("text", tmp_path / "also")) == every


def test_a_file_in_a_linked_folder_goes_by_its_own_name(tmp_path: Path, open_: Open) -> None:
    """By the link's name one folder's files would be in another's unit, and part of one in two."""
    root = write(tmp_path / "d", {"a/own.txt": b"a", "b/f/x.txt": b"x", "b/f/deep/y.txt": b"y"})
    write(root, {".old/z.txt": b"z", "b/w.txt": b"w"})
    (root / "a/vendor").symlink_to(root / "b/f")
    (root / "a/old").symlink_to(root / ".old")  # whose own name is not listed
    (root / "c").symlink_to(root / "a")
    every = ["a/old/z.txt", "a/own.txt", "b/f/deep/y.txt", "b/f/x.txt", "b/w.txt"]
    assert ids(open_("text", root)) == every
    assert ids(open_("text", root / "a/**/*.txt")) == [
        "old/z.txt",
        "own.txt",
        "vendor/deep/y.txt",
        "vendor/x.txt",
    ]
    assert list(open_("text", root, unit_field="folder").unit_names()) == list("aabbb")


def test_one_real_file_is_one_record_whatever_hard_links_name_it(
    tmp_path: Path, open_: Open
) -> None:
    """Two units of one file would be one person drawn as two."""
    root = write(tmp_path / "d", {"b/x.txt": b"x", "c.txt": b"x", "d.jsonl": b'{"text": "t"}'})
    far = write(tmp_path / "far", {"y.txt": b"y"})
    for name, target in {
        "a.txt": root / "b/x.txt",
        "b/z.txt": root / "b/x.txt",
        "e.jsonl": root / "d.jsonl",
        "far.txt": far / "y.txt",
    }.items():
        (root / name).hardlink_to(target)
    (root / "far2.txt").symlink_to(far / "y.txt")
    assert ids(open_("text", root / "**/*.txt")) == ["a.txt", "c.txt", "far.txt"]
    assert ids(open_("text", root / "b")) == ["x.txt"]
    assert ids(open_("jsonl", root)) == ["d.jsonl:1"]


def test_python_stdlib(open_: Open) -> None:
    store = open_("text", "python-stdlib")
    names = ids(store)
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not any("-packages" in name or "__pycache__" in name for name in names)
    assert store.read(names.index("abc.py")) == Path(os.__file__).with_name("abc.py").read_text()


JSONL = {
    "good": (b'{"text": "one", "n": 1}', "one"),
    "unicode": ('{"text": "ünï ☃"}'.encode(), "ünï ☃"),
    "escaped": (b'{"text": "\\ud83d\\ude00\\n"}', "\U0001f600\n"),
    "bom": (b'\xef\xbb\xbf{"text": "marked"}', "marked"),
    "empty text": (b'{"text": ""}', ""),
    "carriage return": (b'{"text": "cr"}\r', "cr"),
    "blank": (b"", None),
    "blank, carriage return": (b"\r", None),
    "not JSON": (b'{"text": "half', None),
    "not UTF-8": (b'{"text": "\xc3"}', None),
    "half a surrogate": (b'{"text": "\\ud800"}', None),
    "no field": (b'{"body": "x"}', None),
    "not a string": (b'{"text": 3}', None),
    "null": (b'{"text": null}', None),
    "not an object": (b'["text"]', None),
    "nested": (b"[" * 200_000, None),
    "huge number": (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", None),
}


@pytest.mark.parametrize("ending", [b"", b"\n"], ids=["no newline at the end", "newline"])
def test_jsonl_every_line_is_a_record(tmp_path: Path, open_: Open, ending: bytes) -> None:
    # The last line is not blank, else it would be the end of the one before.
    data = b"\n".join(line for line, _ in JSONL.values()) + b"\nlast" + ending
    store = open_("jsonl", write(tmp_path / "d", {"a.jsonl": data}) / "a.jsonl")
    assert texts(store) == [text for _, text in JSONL.values()] + [None]
    assert ids(store) == [f"a.jsonl:{n}" for n in range(1, len(JSONL) + 2)]


def test_jsonl_only_newlines_and_empty_files(tmp_path: Path, open_: Open) -> None:
    one = b'{"text": "1"}'
    files = {"a": b"", "b": b"\n\n", "d/d": b"", "e": one, "f": one + b"\n\n", "g": b""}
    root = write(tmp_path / "d", {name + ".jsonl": data for name, data in files.items()})
    write(root, {"other.json": one, ".x.jsonl": one})
    store = open_("jsonl", root)
    assert ids(store) == [f"{x}.jsonl:{n}" for x, n in zip("bbeff", "12112", strict=True)]
    assert texts(store) == [None, None, "1", "1", None]
    assert ids(open_("jsonl", root / "[ef].jsonl")) == ["e.jsonl:1", "f.jsonl:1", "f.jsonl:2"]


@pytest.mark.parametrize("block", [1, 3, 7])
def test_jsonl_lines_across_blocks(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(hashing, "LEAF_BYTES", block)
    lines = [json.dumps({"text": "x" * n}) for n in range(5)]
    root = write(tmp_path / "d", {f"{i}.jsonl": "\n".join(lines).encode() for i in range(2)})
    assert texts(open_("jsonl", root)) == ["x" * n for n in range(5)] * 2


def test_jsonl_other_field(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"body": "b", "text": "t"}'})
    assert texts(open_("jsonl", root, text_field="body")) == ["b"]


def test_index_outside_is_our_mistake_not_a_record(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b"{}\n{}"})
    for format in ("text", "jsonl"):
        store = open_(format, root)
        for index in (-1, len(store)):
            with pytest.raises(IndexError):
                store.read(index)
            with pytest.raises(IndexError):
                store.record_id(index)


# The index


def saved(index: Path) -> list[Path]:
    found = sorted(index.iterdir())
    assert all(path.suffix == ".npy" for path in found), "a temporary file was left"
    return found


def count_opens(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """Names of data files opened from now on."""
    opened: list[str] = []
    real = builtins.open

    def spy(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and str(file).startswith(str(root)):
            opened.append(os.path.basename(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", spy)
    return opened


def test_second_open_reads_no_data(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n' * 3, "b.jsonl": b"x\n"})
    opened = count_opens(monkeypatch, root)
    for format in ("jsonl", "text"):
        opened.clear()
        first = open_(format, root)
        assert sorted(opened) == ["a.jsonl", "b.jsonl"]
        opened.clear()
        second = open_(format, root)
        assert opened == []
        assert texts(first) == texts(second)
        assert first.fingerprint == second.fingerprint


def test_index_is_its_owners_only(tmp_path: Path, open_: Open, index: Path) -> None:
    open_("jsonl", write(tmp_path / "d", {"a.jsonl": b"{}"}))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (index, *saved(index))] == [0o700, 0o600]


def test_default_index_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_store("jsonl", str(write(tmp_path / "d", {"a.jsonl": b"{}"})))
    assert len(saved(tmp_path / "cache/torchtitan_dp/index")) == 1


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize("damage", ["empty", "short", "header", "flip", "longer", "pickle"])
def test_damaged_index_is_rebuilt(
    tmp_path: Path, open_: Open, index: Path, damage: str, format: str
) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n{"text": "22"}\n{"text": "3"}'})
    before = open_(format, root).fingerprint
    (path,) = saved(index)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-24] ^= 1  # of the contents' hash
    path.write_bytes(
        {
            "empty": b"",
            "short": good[:-8],
            "header": b"\x93NUMPY\x01\x00" + b"\xff" * 200,
            "flip": bytes(flipped),
            "longer": good + b"more",
            "pickle": b"\x80\x04N.",
        }[damage]
    )
    after = open_(format, root)
    assert after.fingerprint == before
    if format == "jsonl":
        assert texts(after) == ["1", "22", "3"]
    if damage != "longer":  # numpy does not look beyond the array
        assert path.read_bytes() == good


def test_changed_files_are_indexed_anew(tmp_path: Path, open_: Open, index: Path) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n{"text": "2"}\n'})
    open_("jsonl", root)
    # same size, other content, and a time that differs even on a coarse clock
    write(root, {"a.jsonl": b'{"text": "12345678901234567"}\n'[:28]})
    assert (root / "a.jsonl").stat().st_size == 28
    os.utime(root / "a.jsonl", ns=(1, 1))
    assert len(open_("jsonl", root)) == 1
    write(root, {"b.jsonl": b"x"})
    assert len(open_("jsonl", root)) == 2
    assert len(saved(index)) == 3


def test_size_alone_or_place_alone_is_enough(tmp_path: Path, open_: Open) -> None:
    one, two = b'{"text": "1"}\n', b'{"text": "2222"}\n{"text": "3"}\n'
    same_size = b'{"text": "a"}\n{"text": "bbbb"}\n'
    for place, a, b, expected in (
        ("d", one, two, ["1", "2222", "3"]),
        ("d", two, one, ["2222", "3", "1"]),
        ("e", same_size, one, ["a", "bbbb", "1"]),
    ):
        root = write(tmp_path / place, {"a.jsonl": a, "b.jsonl": b})
        for path in root.iterdir():
            os.utime(path, ns=(1, 1))
        assert texts(open_("jsonl", root)) == expected


def test_failed_build_leaves_nothing(
    tmp_path: Path, open_: Open, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(jsonl, "_write_bounds", fail)
    with pytest.raises(ValueError, match=r"training\.dataset_path.*no space left"):
        open_("jsonl", write(tmp_path / "d", {"a.jsonl": b"{}"}))
    assert saved(index) == []


def test_a_file_rewritten_under_its_old_time_is_indexed_anew(tmp_path: Path, open_: Open) -> None:
    """Archives and image layers give all files one time: who has which lines was then stale."""
    for owners in ("AABB", "ABAB"):
        lines = [json.dumps({"who": owner, "text": owner}).encode() for owner in owners]
        root = write(tmp_path / "d", {"a.jsonl": b"\n".join(lines)})
        os.utime(root / "a.jsonl", ns=(1, 1))
        store = open_("jsonl", root, unit_field="who")
        units = open_units(store, "who", index_folder=str(tmp_path / "index"))
        whose = [{store.read(int(record)) for record in units.records(unit)} for unit in (0, 1)]
        assert sorted(map(sorted, whose)) == [["A"], ["B"]]


# The fingerprint

BASE = {"a.jsonl": b'{"text": "1"}\n', "b/c.jsonl": b'{"text": "2"}\n'}


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_fingerprint_ignores_place_and_time(tmp_path: Path, open_: Open, format: str) -> None:
    one, two = write(tmp_path / "one", BASE), write(tmp_path / "far/two", BASE)
    os.utime(two / "a.jsonl", ns=(1, 1))
    prints = {open_(format, path).fingerprint for path in (one, two, two / "**/*.jsonl")}
    assert len(prints) == 1
    assert len(prints.pop()) == 64


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize(
    "change",
    [
        {"a.jsonl": b'{"text": "10"}\n'},
        {"d.jsonl": b""},
    ],
    ids=["size", "name"],
)
def test_fingerprint_sees(
    tmp_path: Path, open_: Open, format: str, change: dict[str, bytes]
) -> None:
    one, two = write(tmp_path / "one", BASE), write(tmp_path / "two", BASE | change)
    assert open_(format, one).fingerprint != open_(format, two).fingerprint


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_fingerprint_sees_a_renamed_file(tmp_path: Path, open_: Open, format: str) -> None:
    root = write(tmp_path / "d", BASE)
    before = open_(format, root).fingerprint
    (root / "a.jsonl").rename(root / "aa.jsonl")
    assert open_(format, root).fingerprint != before


def test_fingerprint_sees_the_number_of_records(tmp_path: Path, open_: Open) -> None:
    one = write(tmp_path / "one", {"a.jsonl": b"{}\n{}"})
    two = write(tmp_path / "two", {"a.jsonl": b"{}\n\n\n"})
    assert open_("jsonl", one).fingerprint != open_("jsonl", two).fingerprint


def test_fingerprint_sees_the_order_of_lines(tmp_path: Path, open_: Open) -> None:
    """Two nodes with copies in two orders would deal one record to both."""
    lines = [b'{"text": "1"}\n', b'{"text": "22"}\n', b'{"text": "333"}\n']
    one = write(tmp_path / "one", {"a.jsonl": b"".join(lines)})
    two = write(tmp_path / "two", {"a.jsonl": b"".join(lines[::-1])})
    assert open_("jsonl", one).fingerprint != open_("jsonl", two).fingerprint


# The user's mistakes


@pytest.mark.parametrize(
    "format, path, options, message",
    [
        (
            "csv",
            "d",
            {},
            r"training\.dataset = 'csv' is not a known format: use one of 'text', 'js",
        ),
        ("text", "nowhere", {}, r"training\.dataset_path = '.*nowhere' does not exist"),
        ("text", "nowhere/*.txt", {}, r"training\.dataset_path = '.*nowhere/\*.txt' does not"),
        ("jsonl", "python-stdlib", {}, r"training\.dataset_path = '.*' does not exist"),
        ("text", "empty", {}, r"training\.dataset_path = '.*empty' holds no record"),
        ("text", "d/*.none", {}, r"training\.dataset_path = '.*none' holds no record"),
        ("jsonl", "d", {}, r"training\.dataset_path = '.*d' holds no record"),
        ("jsonl", "d/a.txt", {}, r"training\.dataset_path = '.*a\.txt' holds no record"),
        ("jsonl", "d", {"text_field": ""}, r"data\.text_field = ''"),
    ],
)
def test_mistakes_name_key_value_and_remedy(
    tmp_path: Path, open_: Open, format: str, path: str, options: dict[str, str], message: str
) -> None:
    write(tmp_path, {"d/a.txt": b"", "empty/.hidden": b"x"})
    with pytest.raises(ValueError, match=message) as caught:
        open_(format, tmp_path / path, **options)
    assert "\n" not in str(caught.value)


def test_empty_path(open_: Open) -> None:
    with pytest.raises(ValueError, match=r"training\.dataset_path = '' does not exist"):
        open_("text", "")


def test_index_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path, {"file": b"", "d/a.txt": b""})
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        open_store("text", str(tmp_path / "d"), index_folder=str(tmp_path / "file/index"))


def test_folder_that_cannot_be_listed(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    root = write(tmp_path / "d", {"a/x.txt": b""})
    monkeypatch.setattr(os, "scandir", refuse)  # chmod would not stop root
    with pytest.raises(ValueError, match=r"training\.dataset_path = .* cannot be listed"):
        open_("text", root)


def test_a_record_larger_than_memory_is_read_in_part(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse: 100 GiB of zeros on disk take no space, in memory they would."""
    root = write(tmp_path / "data", {"huge.txt": b"begins"})
    os.truncate(root / "huge.txt", 100 * 2**30)
    monkeypatch.setattr(text_format, "text_contents", lambda *_: ("", np.empty(0, np.int64)))
    assert open_("text", root).read(0, max_bytes=8) == "begins\0\0"


def test_decodability_is_told_block_by_block(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_format, "_BLOCK_BYTES", 3)  # cuts characters
    files = {"a": "ünï ☃☃".encode(), "b": b"good, then \xff", "c": "cut ☃".encode()[:-1], "d": b""}
    store = open_("text", write(tmp_path / "data", files))
    found = [store.is_decodable(i) for i in range(4)]
    assert found == [True, False, False, True]
    assert found == [text is not None for text in texts(store)]


def test_a_line_that_memory_does_not_hold_is_undecodable(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested lists take 30 times as much as their text; what a record holds stops no run."""

    def refuse(line: str) -> Any:
        raise MemoryError

    store = open_("jsonl", write(tmp_path / "data", {"a.jsonl": b'{"text": "x"}\n'}))
    monkeypatch.setattr(json, "loads", refuse)
    assert texts(store) == [None]


def test_a_line_too_long_to_parse_is_undecodable(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 20)
    lines = b'{"text": "short"}\n{"text": "' + b"x" * 20 + b'"}\n{"text": "last"}\n'
    store = open_("jsonl", write(tmp_path / "data", {"a.jsonl": lines}))
    assert texts(store) == ["short", None, "last"]
    assert [store.is_decodable(i) for i in range(3)] == [True, False, True]
