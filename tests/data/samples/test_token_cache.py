"""Token ids that are cached: those that were put, in bounded room."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.samples.test_excerpts import rng
from torchtitan_dp.data.records.formats import open_store
from torchtitan_dp.data.samples.excerpts import Excerpt
from torchtitan_dp.data.samples.samples import SampleStore
from torchtitan_dp.data.samples.token_cache import ENTRY_BYTES, TokenCache
from torchtitan_dp.data.samples.tokenizer import ByteTokenizer

LIMIT = 17


def head(source: int, *, marked: bool = False) -> Excerpt:
    generator = np.random.default_rng(source)
    ids = generator.integers(0, 2**31 - 1, source % LIMIT)
    return Excerpt(ids, 0, generator.random(len(ids)) < 0.5 if marked else None)


def same(one: Excerpt | None, other: Excerpt) -> bool:
    if one is None or one.ids.dtype != np.int64 or one.undecodable != other.undecodable:
        return False
    targets = [None if e.targets is None else e.targets.tolist() for e in (one, other)]
    return one.ids.tolist() == other.ids.tolist() and targets[0] == targets[1]


@pytest.mark.parametrize("marked", [False, True])
def test_what_was_put_comes_back_and_nobody_can_change_it(marked: bool) -> None:
    cache = TokenCache()
    assert cache.get(3) is None
    for source in range(40):
        cache.put(source, mine := head(source, marked=marked))
        mine.ids[:] = 0
    for source in range(40):
        found = cache.get(source)
        assert found is not None
        assert same(found, head(source, marked=marked))
        found.ids[:] = 0
        if found.targets is not None:
            found.targets[:] = False
        assert same(cache.get(source), head(source, marked=marked))
    cache.put(7, head(8))  # again
    assert same(cache.get(7), head(8))


def test_it_keeps_what_was_used_last_in_bounded_room() -> None:
    one = Excerpt(np.arange(10), 0)
    cache = TokenCache(4 * (ENTRY_BYTES + 40))
    for source in range(4):
        cache.put(source, one)
    assert cache.get(0) is not None
    cache.put(2, one)
    cache.put(4, one)
    assert [cache.get(source) is not None for source in range(5)] == [True, False, True, True, True]
    cache.put(5, Excerpt(np.arange(400), 0))  # takes the room of all but one
    assert cache._bytes <= 4 * (ENTRY_BYTES + 40)
    cache.put(6, Excerpt(np.arange(2**16), 0))  # has no room
    assert cache.get(6) is None
    assert cache.get(5) is not None
    for source in range(1000):
        cache.put(source, head(source))
        assert cache._bytes == sum(ENTRY_BYTES + e.ids.nbytes for e in cache._heads.values())
        assert cache._bytes <= 4 * (ENTRY_BYTES + 40)


def test_threads_may_share_it() -> None:
    cache, wrong = TokenCache(20 * ENTRY_BYTES), []

    def use(seed: int) -> None:
        for source in np.random.default_rng(seed).integers(0, 40, 3000).tolist():
            found = cache.get(source)
            if found is None:
                cache.put(source, head(source))
            elif not same(found, head(source)):
                wrong.append(source)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache._bytes == sum(ENTRY_BYTES + e.ids.nbytes for e in cache._heads.values())


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


def made(folder: Path, how: dict[str, Any], cache: TokenCache | None) -> SampleStore:
    store = open_store("text", str(folder / "d"), index_folder=str(folder / "index"))
    return SampleStore(store, Counted(), LIMIT - 1, cache=cache, **how)


@pytest.mark.parametrize("most_bytes", [2**20, 3 * ENTRY_BYTES])
@pytest.mark.parametrize("long_records", ["head", "window"])
def test_samples_are_the_same_and_tokenized_once(
    folder: Path, long_records: str, most_bytes: int
) -> None:
    how = {"long_records": long_records}
    plain, cached = made(folder, how, None), made(folder, how, TokenCache(most_bytes))
    asked = []
    for _ in range(3):
        undecodable, before = cached.undecodable, cached.tokenizer.asked  # type: ignore[attr-defined]
        for unit in range(12):
            for one, other in zip(
                plain.sample(unit, 9, rng(unit)), cached.sample(unit, 9, rng(unit)), strict=True
            ):
                assert one.tolist() == other.tolist()
            assert plain.tokens(unit) == cached.tokens(unit)
        assert cached.undecodable - undecodable == 1
        asked.append(cached.tokenizer.asked - before)  # type: ignore[attr-defined]
    whole = 11 if most_bytes == 2**20 else 0
    assert asked[0] - whole == asked[1] == asked[2]
    if long_records == "head":
        assert (asked[1] == 0) == (most_bytes == 2**20)


def test_what_cannot_be_read_just_now_is_not_kept_as_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(folder, {}, TokenCache())
    with monkeypatch.context() as patched:
        patched.setattr(one.records, "read", lambda *_, **__: None)
        assert one.tokens(7) == 0
    assert one.tokens(7) == made(folder, {}, None).tokens(7) > 0


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
        return SampleStore(store, ByteTokenizer(), LIMIT - 1, cache=TokenCache())

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
    assert first_bytes(one) == [65, 66]
