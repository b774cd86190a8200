"""Token ids that are kept: whole or not at all, private, and never other ones."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_excerpts import rng
from tests.data.test_tokenizer import save_tokenizer
from tests.processes.ranks import on_ranks
from torchtitan_dp.data import token_cache
from torchtitan_dp.data.opening import Records
from torchtitan_dp.data.records import open_store
from torchtitan_dp.data.samples import SampleStore
from torchtitan_dp.data.token_cache import TokenCache
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer

SOURCES, LIMIT = 40, 17
TABLE = 16 * SOURCES


def opened(folder: Path, **terms: Any) -> TokenCache:
    options = {"sources": SOURCES, "limit": LIMIT, "vocab_size": 258, "most_bytes": 2**20}
    return TokenCache(str(folder), ("terms",), **{**options, **terms})


def ids(source: int, least: int = 0) -> np.ndarray:
    return np.random.default_rng(source).integers(0, 258, least + source % LIMIT)


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    one = opened(tmp_path)
    for source in range(0, SOURCES, 2):
        one.put(source, ids(source))
    return one


def held(one: TokenCache) -> list[int]:
    """Which sources are kept; each as it was put."""
    found = []
    for source in range(SOURCES):
        if (kept := one.get(source)) is not None:
            assert kept.dtype == np.int64
            assert kept.tolist() == ids(source).tolist()
            found.append(source)
    return found


def test_what_was_put_is_there_for_everybody(cache: TokenCache, tmp_path: Path) -> None:
    assert held(cache) == held(opened(tmp_path)) == list(range(0, SOURCES, 2))
    other = opened(tmp_path)
    other.put(1, ids(1))
    assert held(cache) == sorted([1, *range(0, SOURCES, 2)])  # at once


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_ids_are_kept_as_they_are(tmp_path: Path, vocab_size: int) -> None:
    one = opened(tmp_path, vocab_size=vocab_size)
    for source, values in enumerate([[0, vocab_size - 1, 7], [], [vocab_size - 1]]):
        one.put(source, np.array(values, dtype=np.int64))
        kept = one.get(source)
        assert kept is not None
        assert kept.tolist() == values
    for wrong in ([-1], [2**32], [0] * (LIMIT + 1)):
        one.put(5, np.array(wrong, dtype=np.int64))
        assert one.get(5) is None


def test_it_is_its_owners_alone(cache: TokenCache) -> None:
    assert stat.S_IMODE(os.stat(cache.path).st_mode) == 0o600
    mask = os.umask(0)
    try:
        other = opened(Path(cache.path).parent, limit=3)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(other.path).st_mode) == 0o600


def test_any_damaged_bit_is_seen_and_the_entry_made_again(
    cache: TokenCache, tmp_path: Path
) -> None:
    """Every byte of the file, one after the other."""
    whole = Path(cache.path).read_bytes()
    every = held(cache)
    lost: list[int] = []
    for place in range(0, len(whole)):
        bad = bytearray(whole)
        bad[place] ^= 1 << place % 8
        Path(cache.path).write_bytes(bad)
        missing = sorted(set(every) - set(held(cache)))  # what is there is as it was put
        assert len(missing) <= 1
        if missing:
            cache.put(missing[0], ids(missing[0]))
            assert held(cache) == every
        lost.extend(missing)
    assert set(lost) == set(every)


@pytest.mark.parametrize("size", [0, 1, 15, 16, TABLE - 8, TABLE, TABLE + 5, -1])
def test_a_file_that_was_cut_short_is_filled_again(cache: TokenCache, size: int) -> None:
    every, length = held(cache), os.stat(cache.path).st_size
    os.truncate(cache.path, size if size >= 0 else length - 1)
    assert set(held(cache)) < set(every)
    for source in every:
        cache.put(source, ids(source))
    assert held(cache) == every


class Killed(BaseException):
    pass


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_in_the_middle_leaves_nothing_wrong(
    cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Half of a head without its entry, or a whole one with half of its entry."""
    real, calls = os.pwrite, []

    def dying(file: int, data: Any, place: int) -> int:
        calls.append(place)
        if len(calls) > writes:
            real(file, bytes(data)[: len(data) // 2], place)
            raise Killed
        return real(file, data, place)

    every = held(cache)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", dying)
        with pytest.raises(Killed):
            cache.put(15, ids(15))
    again = opened(tmp_path)
    assert held(again) == every
    again.put(15, ids(15))
    assert held(again) == sorted([15, *every])


def test_an_entry_before_its_ids_is_none(cache: TokenCache) -> None:
    """As a machine that loses power may leave it."""
    begin = os.stat(cache.path).st_size
    entry = token_cache._ENTRY.pack(begin, 3, token_cache._checksum(5, begin, 3, b"abcdef"))
    with open(cache.path, "r+b") as file:
        file.seek(5 * 16)
        file.write(entry)
    assert cache.get(5) is None
    os.truncate(cache.path, begin + 6)  # zeros
    assert cache.get(5) is None


def test_a_full_disk_stops_nothing(
    cache: TokenCache, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    every = held(cache)
    monkeypatch.setattr(os, "pwrite", full)
    for source in (1, 3, 5):
        cache.put(source, ids(source))
    assert held(cache) == every
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("not private: data.token_cache: cannot be written (")


def test_it_does_not_outgrow_its_bound(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = opened(tmp_path, most_bytes=TABLE + 100)
    for source in range(SOURCES):
        one.put(source, ids(source))
    assert os.stat(one.path).st_size <= TABLE + 100
    assert 0 < len(held(one)) < SOURCES
    assert capfd.readouterr().err.count("has reached its bound") == 1
    nothing = opened(tmp_path, most_bytes=10, sources=SOURCES + 1)
    nothing.put(0, ids(3))
    assert nothing.get(0) is None


def test_caches_opened_long_ago_give_way(tmp_path: Path) -> None:
    """And who has one of them open goes on with it."""
    paths = []
    for limit in range(17, 21):
        one = opened(tmp_path, limit=limit)
        one.put(0, ids(16))
        os.utime(one.path, (limit, limit))
        paths.append(one.path)
    (tmp_path / "hashed-lines-1-x.npy").write_bytes(b"index")
    size = os.stat(paths[0]).st_size
    new = opened(tmp_path, limit=30, most_bytes=2 * (2 * size + 3))
    assert [os.path.exists(path) for path in paths] == [False, False, True, True]
    assert os.path.exists(new.path)
    assert os.path.exists(tmp_path / "hashed-lines-1-x.npy")
    one.put(1, ids(1))
    assert one.get(0) is not None
    assert one.get(1) is not None


def test_who_cannot_have_the_lock_goes_on_without(
    cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who holds it may be stopped: nobody waits for long."""
    monkeypatch.setattr(token_cache, "_LOCK_S", 0.05)
    with open(cache.path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.put(1, ids(1))
        assert cache.get(1) is None
        assert cache.get(2) is not None
    cache.put(1, ids(1))
    assert cache.get(1) is not None


def crowd(folder: str) -> list[int]:
    """All ranks write all sources, each in another order."""
    import torch.distributed as dist

    one = opened(Path(folder))
    for source in np.random.default_rng(dist.get_rank()).permutation(SOURCES).tolist():
        one.put(source, ids(source))
        assert one.get(source) is not None
    one.close()
    return [os.stat(one.path).st_size]


def test_several_processes_may_write_it(tmp_path: Path) -> None:
    on_ranks(4, crowd, str(tmp_path))
    one = opened(tmp_path)
    assert held(one) == list(range(SOURCES))
    once = sum(2 * len(ids(source)) for source in range(SOURCES))
    assert os.stat(one.path).st_size == TABLE + once  # nobody made what another had


# As samples use it.


class Counted(ByteTokenizer):
    """Remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def encode(self, text: str) -> np.ndarray:
        self.asked += 1
        return super().encode(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    for i in range(12):
        (tmp_path / f"d/{i:02}").write_bytes(b"" if i == 3 else bytes([65 + i]) * (3 * i + 1))
    (tmp_path / "d/05").write_bytes(b"\xff")
    (tmp_path / "d/u").mkdir()
    (tmp_path / "d/u/12").write_bytes(b"mine")
    return tmp_path


def made(folder: Path, how: dict[str, Any], cached: bool) -> SampleStore:
    store = open_store("text", str(folder / "d"), index_folder=str(folder / "index"))
    cache = opened(folder, sources=len(store)) if cached else None
    return SampleStore(store, Counted(), LIMIT - 1, cache=cache, **how)


@pytest.mark.parametrize("long_records", ["head", "window"])
def test_samples_are_the_same_and_tokenized_once(folder: Path, long_records: str) -> None:
    how = {"long_records": long_records}
    plain, first = made(folder, how, False), made(folder, how, True)
    for again in (first, first, made(folder, how, True)):
        asked = again.tokenizer.asked  # type: ignore[attr-defined]
        undecodable = again.undecodable
        for unit in range(12):
            for one, other in zip(
                plain.sample(unit, 9, rng(unit)), again.sample(unit, 9, rng(unit)), strict=True
            ):
                assert one.tolist() == other.tolist()
            assert plain.tokens(unit) == again.tokens(unit)
        assert again.undecodable - undecodable == 1
        asked = again.tokenizer.asked - asked  # type: ignore[attr-defined]
        whole = 11 if again is first and undecodable == 0 else 0
        windows = 0 if long_records == "head" else asked - whole
        assert asked == whole + windows
        assert windows <= 2 * 6  # of the longer ones alone


def test_what_cannot_be_read_just_now_is_not_kept_as_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(folder, {}, True)
    with monkeypatch.context() as patched:
        patched.setattr(one.records, "read", lambda *_, **__: None)
        assert one.tokens(7) == 0
    assert one.tokens(7) == made(folder, {}, False).tokens(7) > 0


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize("where", ["root", "below"])
def test_row43_what_is_read_of_exchanged_files_is_not_kept(
    tmp_path: Path, format: str, where: str
) -> None:
    """Put back, they are the files that were listed; one person must not stand for two units."""
    for version, texts in (("v1", "AB"), ("v2", "BA")):
        (tmp_path / version).mkdir()
        for name, text in zip("ab", texts, strict=True):
            content = text * 4 if format == "text" else f'{{"text": "{text * 4}"}}\n'
            (tmp_path / version / f"{name}.jsonl").write_text(content)
    (tmp_path / "index").mkdir(0o700)
    link = tmp_path / ("current" if where == "root" else "root/current")
    link.parent.mkdir(exist_ok=True)

    def samples() -> SampleStore:
        path = link if where == "root" else link.parent
        store = open_store(format, str(path), index_folder=str(tmp_path / "index"))
        cache = opened(tmp_path / "index", sources=len(store))
        return SampleStore(store, ByteTokenizer(), LIMIT - 1, cache=cache)

    def point_to(version: str) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / version)

    def first_bytes(one: SampleStore) -> list[int]:
        return [int(one.sample(unit)[0][1]) for unit in range(2)]

    point_to("v1")
    one = samples()
    point_to("v2")
    first_bytes(one)  # of which nothing may be kept
    point_to("v1")
    assert first_bytes(samples()) == [65, 66]


def test_a_folder_or_a_file_that_is_open_to_others_is_not_used(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    os.chmod(cache.path, 0o666)
    assert stat.S_IMODE(os.stat(opened(tmp_path).path).st_mode) == 0o600
    os.chmod(tmp_path, 0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        opened(tmp_path)


def path_of(folder: Path, **changes: Any) -> str:
    """Of the cache of a configuration."""
    options: dict[str, Any] = {
        "path": str(folder / "d"),
        "text_field": "text",
        "unit_field": None,
        "tokenizer": ByteTokenizer(),
        "seq_len": 8,
        "unit_sampling": "concat",
        **changes,
    }
    records = Records.open(
        "text", options["path"], text_field=options["text_field"], unit_field=options["unit_field"]
    )
    cache = records.token_cache(
        options["tokenizer"],
        seq_len=options["seq_len"],
        unit_sampling=options["unit_sampling"],
        most_gib=1.0,
    )
    assert cache is not None
    return cache.path


def test_other_terms_are_another_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    assert path_of(folder) == path_of(folder)
    (folder / "b").mkdir()
    marked = save_tokenizer(folder / "b", tokenizer_config={"bos_token": "<s>"})
    (folder / "a").mkdir()
    save_tokenizer(folder / "a")
    paths = [
        path_of(folder),
        path_of(folder, seq_len=16),
        path_of(folder, unit_sampling="random"),
        path_of(folder, unit_field="folder"),
        path_of(folder, text_field="other"),
        path_of(folder, tokenizer=load_tokenizer(str(folder / "a"))),
        path_of(folder, tokenizer=load_tokenizer(marked)),  # as large a vocabulary
    ]
    (folder / "d/07").write_bytes(b"?" * 22)  # as long as before
    paths.append(path_of(folder))
    assert len(set(paths)) == len(paths)
    root = Path(paths[0]).parent
    assert root == folder / "cache/torchtitan_dp/index"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_tokenizer_is_known_by_all_that_it_does(folder: Path) -> None:
    (folder / "a").mkdir()
    save_tokenizer(folder / "a")
    one, same = (load_tokenizer(str(folder / "a")) for _ in range(2))
    assert one.fingerprint == same.fingerprint != ByteTokenizer.fingerprint
    text = (folder / "a/tokenizer.json").read_text()
    (folder / "a/tokenizer.json").write_text(text.replace('"added"', '"adder"'))
    assert load_tokenizer(str(folder / "a")).fingerprint != one.fingerprint
    (folder / "a/tokenizer.json").write_text(text)
    (folder / "a/tokenizer_config.json").write_text('{"eos_token": "added"}')
    assert load_tokenizer(str(folder / "a")).fingerprint != one.fingerprint


def test_nothing_is_kept_where_it_is_turned_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import build
    from torchtitan_dp.preflight.check import open_records
    from torchtitan_dp.train_spec import build_samples

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    place = f"--training.dataset_path={folder / 'd'}"
    for options, kept in ((["--data.no-token_cache"], 0), ([], 1)):
        config = build.config(place, *options)
        samples = build_samples(open_records(config), ByteTokenizer(), config)
        samples.sample(1)
        assert len(list((folder / "cache/torchtitan_dp/index").glob("tokens-*"))) == kept


def test_a_cache_that_cannot_be_made_stops_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    records = Records.open("text", str(folder / "d"))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr("torchtitan_dp.data.opening.TokenCache", refuse)
    how = {"seq_len": 8, "unit_sampling": "concat", "most_gib": 1.0}
    assert records.token_cache(ByteTokenizer(), **how) is None
    assert "data.token_cache: it cannot be made (no)" in capfd.readouterr().err
