"""What files hold, as one hash: read once, by one process, and anew when it changed."""

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchtitan_dp.data.records import hashing, jsonl
from torchtitan_dp.data.records import index as kept
from torchtitan_dp.data.records import text as text_format
from torchtitan_dp.data.records.files import list_files, locate
from torchtitan_dp.data.records.store import RecordStore

from torchtitan_dp.data import console
from torchtitan_dp.data.formats import open_store

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
        (root / os.fsdecode(name)).parent.mkdir(parents=True, exist_ok=True)
        (root / os.fsdecode(name)).write_bytes(data)
    return root


def texts(store: RecordStore) -> list[str | None]:
    return [store.read(i) for i in range(len(store))]


def listed(root: Path) -> Any:
    return list_files(*locate(str(root)))


FILES = {"a": b"", "b": b"0123456789", "c": b"x" * 7, "d/e": b"\n\xff\n"}


@pytest.mark.parametrize("leaf", [1, 4, 10, 2**21])
def test_the_digest_is_that_of_the_leaves_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf: int
) -> None:
    """Against a loop that shares no code: what another release must get for the same files."""
    monkeypatch.setattr(hashing, "LEAF_BYTES", leaf)
    root = hashlib.blake2b(digest_size=32, person=b"contents")
    for data in FILES.values():
        for begin in range(0, max(len(data), 1), leaf):
            part = data[begin : begin + leaf]
            root.update(hashlib.blake2b(part, digest_size=32, person=b"leaf").digest())
    found = hashing.read_contents(listed(write(tmp_path / "d", FILES)))
    assert found == (root.digest(), [])


def test_another_size_of_leaf_or_number_of_threads_is_no_other_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of cores differs between nodes; the size of a leaf is fixed for all."""
    assert hashing.LEAF_BYTES == 2 * 2**20
    files = listed(write(tmp_path / "d", {str(i): b"%d" % i * 1000 for i in range(300)}))
    monkeypatch.setattr(hashing, "LEAF_BYTES", 1500)
    found = []
    for cores in (1, 2, 7, 100):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        found.append(hashing.read_contents(files))
    assert found == [found[0]] * 4


@pytest.mark.parametrize("unit_field", [None, "who"])
def test_order_within_a_file_is_told(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, unit_field: str | None
) -> None:
    """Whole leaves that change places, too."""
    monkeypatch.setattr(hashing, "LEAF_BYTES", 25)
    lines = [b'{"who": "a", "text": "%d"}\n'[:24] + b'"}\n'[-2:] for _ in range(4)]
    lines = [b'{"who":"a","text":"%d"}  \n' % i for i in range(4)]
    assert {len(line) for line in lines} == {25}
    prints = set()
    for number, order in enumerate(([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0], [0, 0, 2, 3])):
        root = write(tmp_path / str(number), {"a.jsonl": b"".join(lines[i] for i in order)})
        store = open_("jsonl", root, unit_field=unit_field)
        assert texts(store) == [str(i) for i in order]
        prints.add(store.fingerprint)
    assert len(prints) == 4


def test_evil_names(tmp_path: Path, open_: Open) -> None:
    names = [b"new\nline", b"\xff", b"..a", b"a b", b"-rf", "ünï".encode(), b"c" * 255]
    prints = []
    for place, swapped in (("one", 0), ("two", 0), ("three", 1)):
        files = {os.fsdecode(name): b"%d" % i for i, name in enumerate(names)}
        if swapped:
            files[os.fsdecode(names[0])], files[os.fsdecode(names[1])] = b"1", b"0"
        prints.append(open_("text", write(tmp_path / place, files)).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_what_links_lead_to_is_hashed(tmp_path: Path, open_: Open) -> None:
    prints = []
    for place, data in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        write(tmp_path / place, {"away/real": data, "d/own": b"x"})
        (tmp_path / place / "d/link").symlink_to(tmp_path / place / "away/real")
        prints.append(open_("text", tmp_path / place / "d").fingerprint)
    assert prints[0] == prints[1] != prints[2]


# What cannot be read


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Opening that file fails from now on; the tests may run as root, who may read all."""
    real = open

    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.basename(str(file)) == name:
            raise OSError(code, os.strerror(code), file)
        return real(file, *args, **kwargs)

    for module in (hashing, text_format):
        monkeypatch.setattr(module, "open", opening, raising=False)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.EIO, errno.ELOOP])
def test_an_unreadable_text_file_stops_nothing_and_is_one_constant(
    tmp_path: Path, open_: Open, code: int
) -> None:
    """Whatever it holds; but a rank that could read it has another fingerprint."""
    read_all = [
        open_("text", write(tmp_path / place, {"a": b"1", "b": data})).fingerprint
        for place, data in (("one", b"2"), ("other", b"3"))
    ]
    with pytest.MonkeyPatch.context() as patched:
        refuse(patched, "b", code)
        for place in ("one", "other"):
            os.utime(tmp_path / place / "b", ns=(1, 1))
        blind = [open_("text", tmp_path / place) for place in ("one", "other")]
        assert [texts(store) for store in blind] == [["1", None]] * 2
    assert blind[0].fingerprint == blind[1].fingerprint
    assert blind[0].fingerprint not in read_all
    # the open store is what its fingerprint says; the next one finds that it can be read again
    assert texts(blind[0]) == ["1", None]
    assert not blind[0].is_decodable(1)
    again = open_("text", tmp_path / "one")
    assert texts(again) == ["1", "2"]
    assert again.fingerprint == read_all[0]


def test_an_unreadable_empty_file_is_told_too(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a": b"1", "b": b""})
    before = open_("text", root).fingerprint
    with pytest.MonkeyPatch.context() as patched:
        refuse(patched, "b", errno.EACCES)
        os.utime(root / "b", ns=(1, 1))
        assert open_("text", root).fingerprint != before


@pytest.mark.parametrize("format, code", [("text", errno.EMFILE), ("jsonl", errno.EACCES)])
def test_what_says_nothing_of_a_record_is_refused(
    tmp_path: Path, open_: Open, index: Path, format: str, code: int
) -> None:
    """This process has no handle left; or all lines of a file, whose number is not known."""
    root = write(tmp_path / "d", {"a.jsonl": b"{}"})
    with pytest.MonkeyPatch.context() as patched:
        refuse(patched, "a.jsonl", code)
        with pytest.raises(ValueError, match=r"training\.dataset_path"):
            open_(format, root)
    assert list(index.iterdir()) == []


# What changes meanwhile


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize("change", ["grows", "shrinks", "is rewritten", "is replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path,
    open_: Open,
    index: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    change: str,
) -> None:
    monkeypatch.setattr(hashing, "LEAF_BYTES", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    data = b'{"text": "1"}\n{"text": "2"}\n'
    root = write(tmp_path / "d", {"a.jsonl": data})
    scan, opened = hashing._stamp, []

    def stamp(handle: int) -> tuple[int, ...]:
        opened.append(handle)
        if len(opened) == 3:  # the first leaf has been read
            path = root / "a.jsonl"
            if change == "grows":
                path.write_bytes(data + b"\n")
            elif change == "shrinks":
                os.truncate(path, 21)
            elif change == "is rewritten":
                path.write_bytes(data[::-1])
                os.utime(path, ns=(1, 1))
            else:
                (root / "b").write_bytes(data[::-1])
                os.replace(root / "b", path)
                return (len(data), 1, 1, 1)
        return scan(handle)

    monkeypatch.setattr(hashing, "_stamp", stamp)
    with pytest.raises(ValueError, match=r"training\.dataset_path: .*a\.jsonl' changed or shrank"):
        open_(format, root)
    assert list(index.iterdir()) == []


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize("size", [0, 13, 40])
def test_a_file_that_changed_since_it_was_listed_is_refused(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, format: str, size: int
) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n{"text": "2"}  '})
    read = hashing.read_contents

    def change_and_read(*args: Any, **kwargs: Any) -> Any:
        os.truncate(root / "a.jsonl", size)
        return read(*args, **kwargs)

    for module in (jsonl, text_format):
        monkeypatch.setattr(module, "read_contents", change_and_read)
    with pytest.raises(ValueError, match=r"training\.dataset_path: .*a\.jsonl' changed or shrank"):
        open_(format, root)


def test_a_line_cut_off_after_it_was_indexed_is_undecodable(tmp_path: Path, open_: Open) -> None:
    root = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n{"text": "2"}  '})
    store = open_("jsonl", root)
    os.truncate(root / "a.jsonl", 27)  # what is left of line 2 is JSON still, but not the record
    assert texts(store) == ["1", None]


# What is kept


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_contents_changed_under_the_old_size_and_time_are_hashed_anew(
    tmp_path: Path, open_: Open, format: str
) -> None:
    prints = []
    for text in ("1", "2", "1"):
        root = write(tmp_path / "d", {"a.jsonl": json.dumps({"text": text}).encode()})
        os.utime(root / "a.jsonl", ns=(1, 1))
        prints.append(open_(format, root).fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_what_is_kept_of_texts_is_its_owners_only(tmp_path: Path, open_: Open, index: Path) -> None:
    open_("text", write(tmp_path / "d", {"a": b"1"}))
    (path,) = index.iterdir()
    assert [stat.S_IMODE(p.stat().st_mode) for p in (index, path)] == [0o700, 0o600]


# Several processes, and those who wait

OPENING = """
import sys, time
from torchtitan_dp.data.records import formats, hashing, index, jsonl, text
read = hashing.read_contents
def reading(*args, **kwargs):
    with open(sys.argv[3], "a") as log:
        log.write("begin\\n")
    time.sleep(float(sys.argv[4]))
    return read(*args, **kwargs)
jsonl.read_contents = text.read_contents = reading
index._FIRST_LINE_S = 0
print(formats.open_store(sys.argv[1], sys.argv[2], index_folder=sys.argv[5]).fingerprint)
"""


def start(format: str, root: Path, log: Path, sleep: float, index: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OPENING, format, str(root), str(log), str(sleep), str(index)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_of_several_processes_one_reads(tmp_path: Path, index: Path, format: str) -> None:
    root, log = write(tmp_path / "d", {"secret.jsonl": b'{"text": "1"}\n'}), tmp_path / "log"
    processes = [start(format, root, log, 3, index) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in processes]
    assert log.read_text() == "begin\n", said
    assert len({out for out, _ in said}) == 1
    assert len(said[0][0]) == 65
    waited = [err for _, err in said if err]
    assert len(waited) <= 2  # they start within three seconds of each other, or find it done
    for err in waited:
        assert err.startswith("not private: waiting for another process")
        assert err.count("\n") == 1
        assert "secret" not in err
        assert str(root) not in err
    assert [path.suffix for path in index.iterdir()] == [".npy"]


def test_a_reader_that_dies_frees_the_others(tmp_path: Path, index: Path) -> None:
    root, log = write(tmp_path / "d", {"a.jsonl": b'{"text": "1"}\n'}), tmp_path / "log"
    doomed = start("jsonl", root, log, 600, index)
    deadline = time.monotonic() + 100
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    heir = start("jsonl", root, log, 0, index)
    assert heir.stderr is not None
    assert "waiting" in heir.stderr.readline()
    doomed.send_signal(signal.SIGKILL)
    out, _ = heir.communicate(timeout=100)
    doomed.communicate()
    assert log.read_text() == "begin\n" * 2
    assert out.strip() == open_store("jsonl", str(root), index_folder=str(index)).fingerprint
    assert not list(index.glob("*.lock"))


def test_without_locks_everybody_reads(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems of clusters have none."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(kept.fcntl, "flock", no_locks)
    root = write(tmp_path / "d", {"a": b"1"})
    assert texts(open_("text", root)) == ["1"]


def test_progress_tells_sizes_alone(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    root = write(tmp_path / "d", {f"secret{i}": b"hidden" * 100 for i in range(8)})
    open_("text", root)
    assert capfd.readouterr() == ("", "")  # done within five seconds
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(console, "INTERVAL_S", 0.0)
    open_("jsonl", write(tmp_path / "e", {f"secret{i}.jsonl": b"hidden\n" for i in range(4)}))
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.partition("%")[0].split()[-1] for line in lines[:-1]] == ["25", "50", "75", "100"]
    assert "all of 0.00 GB" in lines[-1]
    for line in lines:
        assert line.startswith("not private: reading training.dataset_path: ")
        assert "GB/s" in line
        assert "secret" not in line
        assert "hidden" not in line
