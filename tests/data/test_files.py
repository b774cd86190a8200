"""The files of a path: each once, under its own name, in the order of their names' bytes."""

import os
from pathlib import Path

import pytest

from tests.data.stores import write
from torchtitan_dp.data.files import Files, list_files, locate, together
from torchtitan_dp.data.formats import FORMATS

TREE = {"b.txt": b"bee", "a/x.txt": b"x", "a/deep/er/y.md": b"why", "a.txt": b""}
TREE |= dict.fromkeys([".hidden", ".git/config", "__pycache__/m.txt", "m.pyc"], b"no")


def listed(path: object, format: str = "text") -> Files:
    return list_files(*locate(str(path), FORMATS[format].below))


def link(root: Path, links: dict[str, Path], *, hard: bool = False) -> None:
    for name, target in links.items():
        make = (root / name).hardlink_to if hard else (root / name).symlink_to
        make(target)


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("", ["a.txt", "a/deep/er/y.md", "a/x.txt", "b.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "a/x.txt", "b.txt"]),
        ("a/**", ["deep/er/y.md", "x.txt"]),  # below the part without wildcards
        ("*/*", ["a/x.txt"]),
        ("**/er/**/*.md", ["a/deep/er/y.md"]),
        ("[b-z].t?t", ["b.txt"]),
        ("[1]*.txt", ["[1]*.txt"]),  # a file's own name
    ],
)
def test_folders_and_globs(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    root = write(tmp_path / "d", TREE | ({pattern: b"1"} if "1" in pattern else {}))
    files = listed(root / pattern)
    assert files.names == expected
    assert [os.path.getsize(path) for path in files.paths] == files.sizes


LINES = ["a.jsonl", "b/c.jsonl.gz", "b/d.jsonl.zst", "e.jsonl.bz2", "f.gz", ".x.jsonl", "g.json"]


@pytest.mark.parametrize(
    "format, names, taken",
    [
        ("jsonl", LINES, LINES[:3]),
        ("csv", ["a.csv", "b/a.csv", "a.csv.gz", "a.CSV"], ["a.csv", "b/a.csv"]),
        ("parquet", ["a.parquet", "b/a.parquet", "c.arrow"], ["a.parquet", "b/a.parquet"]),
        ("arrow", ["a.arrow", "b/a.feather", "c.parquet"], ["a.arrow", "b/a.feather"]),
        ("hf", ["data-0.arrow", "cache-1.arrow", "x/data-0.arrow"], ["data-0.arrow"]),
    ],
)
def test_of_a_folder_the_files_of_a_format_are_taken(
    tmp_path: Path, format: str, names: list[str], taken: list[str]
) -> None:
    root = write(tmp_path, dict.fromkeys(names, b"x"))
    assert listed(root, format).names == taken
    for name in names:  # a file that is named is read, with any ending
        assert listed(root / name, format).names == [os.path.basename(name)]


def test_names_are_sorted_by_their_bytes(tmp_path: Path) -> None:
    names = [b"\xff", b"a b", b"-rf", b"A", "ünï".encode(), b"new\nline", b"..a", b"c" * 255]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    found = [os.fsencode(name) for name in listed(tmp_path).names]
    assert found == sorted(name for name in names if not name.startswith(b"."))


def test_links_loop_no_walk_and_repeat_no_file(tmp_path: Path) -> None:
    far = write(tmp_path / "far", {"x.txt": b"x", "f/y.txt": b"y"})
    root = write(tmp_path / "d", {"a/own.txt": b"own", "b/more.txt": b"own"})
    link(root, {"a/up": root, "self": root / "self", "dangling": root / "nowhere"})
    link(root, {"again.txt": root / "a/own.txt", "linked": far / "f", "y.txt": far / "f/y.txt"})
    link(root, {"m1.txt": far / "x.txt", "m2.txt": root / "m1.txt"})
    every = ["a/own.txt", "b/more.txt", "linked/y.txt", "m1.txt", "m2.txt", "y.txt"]
    assert listed(root).names == listed(root / "**/*.txt").names == every
    assert listed(root / "m2*").names == ["m2.txt"]  # its own name is not listed
    link(tmp_path, {"also": root})
    assert listed(tmp_path / "also").names == every


def test_a_file_in_a_linked_folder_goes_by_its_own_name(tmp_path: Path) -> None:
    """By the link's name one folder's files would be in another's unit, and part of one in two."""
    root = write(tmp_path, {"a/own.txt": b"a", "b/f/x.txt": b"x", ".old/z.txt": b"z"})
    link(root, {"a/vendor": root / "b/f", "a/old": root / ".old", "c": root / "a"})
    assert listed(root).names == ["a/old/z.txt", "a/own.txt", "b/f/x.txt"]
    assert listed(root / "a/**").names == ["old/z.txt", "own.txt", "vendor/x.txt"]


@pytest.mark.parametrize("hard", [False, True])
def test_files_that_are_kept_once_by_their_contents_have_all_of_their_names(
    tmp_path: Path, hard: bool
) -> None:
    """As the hub's cache, and tools that save space, keep equal ones: with one of them changed, or
    emptied, the others are there as before."""
    blobs = write(tmp_path / "blobs", {"1": b"x", "2": b"other"})
    root = write(tmp_path / "d", {"c.txt": b"x"})
    (root / "a").mkdir()
    link(root, {"a/x.txt": blobs / "1", "b.txt": blobs / "1", "e.txt": blobs / "2"}, hard=hard)
    every = ["a/x.txt", "b.txt", "c.txt", "e.txt"]
    assert listed(root).names == every
    paths = [locate(str(root / path)) for path in ("a", "*.txt", "b.txt")]
    assert sorted(list_files(*together(paths)).names) == every


def test_installed_packages_are_records_without_their_empty_files() -> None:
    files = listed("python-packages")
    assert {name.partition("/")[0] for name in files.names} == {
        *("transformers", "huggingface_hub", "datasets")
    }
    assert min(files.sizes) >= 300
    assert max(files.sizes) <= 32_768
    assert len(files.names) > 1000


def test_several_paths_are_one_data_set_and_each_file_is_in_it_once(tmp_path: Path) -> None:
    root = write(
        tmp_path / "d", {"a/x.jsonl": b"1", "a/y.jsonl": b"2", "a/z.txt": b"", "b/x.jsonl": b"3"}
    )
    link(root, {"c": root / "a"})
    link(root, {"b/y.jsonl": root / "a/y.jsonl"})
    paths = ["a", "a/*.jsonl", "b", "c"]
    below = FORMATS["jsonl"].below
    found = list_files(*together([locate(str(root / path), below) for path in paths]))
    assert [path.replace(found.root, "") for path in found.paths] == [
        *("/a/x.jsonl", "/a/y.jsonl", "/b/x.jsonl")
    ]
    assert found.root == str(root)
    assert found.passed == ("a/z.txt",)
    assert together([locate(str(root / "a"), below)]) == locate(str(root / "a"), below)
