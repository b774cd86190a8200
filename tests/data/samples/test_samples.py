"""Samples: shifted labels, cut and padding, nothing but zeros from a bad record; cached ids."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torchtitan_dp.data.samples.excerpts import Excerpt, scan_undecodable
from torchtitan_dp.data.samples.samples import ENTRY_BYTES, IGNORE_INDEX, SampleStore, TokenCache

from tests.data.samples.test_excerpts import rng
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.tokenizer import ByteTokenizer

BOS, EOS, IGNORED = 256, 257, IGNORE_INDEX


class Texts:
    """A store in memory that remembers how much was asked for."""

    fingerprint = ""
    most_row_bytes = None

    def __init__(self, *texts: str | None) -> None:
        self.texts = texts
        self.asked: list[int | None] = []

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, index: int, max_bytes: int | None = None) -> str | None:
        self.asked.append(max_bytes)
        text = self.texts[index]
        return None if text is None else text.encode()[:max_bytes].decode("utf-8", "ignore")

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return np.array([len((self.texts[int(i)] or "").encode()) for i in indices])

    def is_decodable(self, index: int) -> bool:
        return self.texts[index] is not None

    def record_id(self, index: int) -> str:
        return str(index)

    def record_ids(self) -> Iterator[str]:
        return map(str, range(len(self)))


class Words:
    """Words of any length as tokens, without marks; remembers the longest text it was given."""

    bos_id: int | None = None
    eos_id: int | None = None
    bytes_per_token = 8

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str) -> np.ndarray:
        self.longest = max(self.longest, len(text))
        return np.array([len(word) for word in text.split()], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 1 << 20


def sample(text: str | None, seq_len: int, tokenizer: Any = None) -> tuple[list[int], list[int]]:
    store = SampleStore(Texts(text), tokenizer or ByteTokenizer(), seq_len)
    tokens_T, labels_T = store.sample(0)
    assert tokens_T.dtype == labels_T.dtype == torch.int64
    assert tokens_T.shape == labels_T.shape == (seq_len,)
    return tokens_T.tolist(), labels_T.tolist()


def test_labels_are_the_next_tokens_and_padding_is_ignored() -> None:
    tokens, labels = sample("abc", 6)
    assert tokens == [BOS, 97, 98, 99, EOS, EOS]
    assert labels == [97, 98, 99, EOS, IGNORED, IGNORED]


@pytest.mark.parametrize(
    "seq_len, tokens, labels",
    [
        (5, [BOS, 97, 98, 99, EOS], [97, 98, 99, EOS, IGNORED]),
        (4, [BOS, 97, 98, 99], [97, 98, 99, EOS]),
        (3, [BOS, 97, 98], [97, 98, 99]),
        (1, [BOS], [97]),
    ],
)
def test_cut(seq_len: int, tokens: list[int], labels: list[int]) -> None:
    assert sample("abc", seq_len) == (tokens, labels)


def test_ignored_labels_are_those_of_cross_entropy() -> None:
    _, labels_T = SampleStore(Texts("ab"), ByteTokenizer(), 5).sample(0)
    logits = torch.randn(5, 258)
    losses = cross_entropy(logits, labels_T, reduction="none")
    assert (losses != 0).tolist() == [True, True, True, False, False]


def test_without_marks() -> None:
    assert sample("a bb ccc", 3, Words()) == ([1, 2, 0], [2, 3, IGNORED])
    assert sample("a", 2, Words()) == ([0, 0], [IGNORED, IGNORED])  # nothing to predict


@pytest.mark.parametrize("text", [None, ""])
def test_bad_or_empty_record_is_all_ignored(text: str | None) -> None:
    assert sample(text, 3) == ([EOS] * 3, [IGNORED] * 3)


def test_text_without_tokens_is_all_ignored() -> None:
    class Marked(Words):
        bos_id = 7
        eos_id = 9

    assert sample(" \n ", 2, Marked()) == ([9, 9], [IGNORED, IGNORED])


def test_padding_index_reads_nothing() -> None:
    texts = Texts("abc")
    store = SampleStore(texts, ByteTokenizer(), 4)
    assert store.sample(-1)[1].tolist() == [IGNORED] * 4
    assert texts.asked == []
    assert store.undecodable == 0


def test_undecodable_records_are_counted_empty_ones_are_not() -> None:
    store = SampleStore(Texts("a", None, "", None), ByteTokenizer(), 4)
    store.batch([0, 1, 2, -1, 3, 1])
    assert store.undecodable == 3
    assert scan_undecodable(store.records.is_decodable, np.array([0, 1, 2])) == 1
    assert scan_undecodable(store.records.is_decodable, range(4)) == 2


def test_batch() -> None:
    store = SampleStore(Texts("abc", None, "d"), ByteTokenizer(), 4)
    tokens_BT, labels_BT = store.batch(np.array([2, -1, 0, 1]))
    assert tokens_BT.dtype == labels_BT.dtype == torch.int64
    for row, index in enumerate([2, -1, 0, 1]):
        tokens_T, labels_T = store.sample(index)
        assert torch.equal(tokens_BT[row], tokens_T)
        assert torch.equal(labels_BT[row], labels_T)
    assert [x.shape for x in store.batch([])] == [(0, 4), (0, 4)]


def test_neighbours_in_a_batch_change_nothing() -> None:
    one = SampleStore(Texts("abc", "x"), ByteTokenizer(), 4).batch([0, 1])
    two = SampleStore(Texts("abc", "yyyyyyyyy"), ByteTokenizer(), 4).batch([0, 1])
    for before, after in zip(one, two, strict=True):
        assert torch.equal(before[0], after[0])


@pytest.mark.parametrize("shift", range(4))
def test_prefix_gives_the_same_sample_as_the_whole(shift: int) -> None:
    text = "x" * shift + "☃" * 1000  # the cut falls on every byte of a character
    for seq_len in range(1, 40):
        ids = [BOS, *text.encode(), EOS][: seq_len + 1]
        assert sample(text, seq_len) == (ids[:-1], ids[1:])


@pytest.mark.parametrize("length", range(90, 115))
def test_end_mark_is_there_exactly_if_the_text_fits(length: int) -> None:
    tokens, labels = sample("x" * length, 100)
    assert tokens.count(EOS) == max(0, 99 - length)
    assert labels.count(EOS) == (length <= 99)


def test_huge_text_file_is_read_in_part(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.write(b"abc")
        file.truncate(1 << 40)  # sparse: reading it whole could not end well
    unread = "torchtitan_dp.data.records.text.text_contents"
    monkeypatch.setattr(unread, lambda *_: ("", np.empty(0, np.int64)))
    folder = str(tmp_path / "index")
    records = open_store("text", str(path), index_folder=folder)
    tokens_T, _ = SampleStore(records, ByteTokenizer(), 5).sample(0)
    assert tokens_T.tolist() == [BOS, 97, 98, 99, 0]


def test_huge_record_is_tokenized_in_part() -> None:
    tokenizer = Words()
    assert sample("four " * 1_000_000, 10, tokenizer) == ([4] * 10, [4] * 10)
    assert tokenizer.longest < 2000


def test_long_tokens_make_it_read_further() -> None:
    words = [500 + i for i in range(200)]
    text = " ".join("w" * n for n in words)
    assert sample(text, 100, Words()) == (words[:100], words[1:101])
    assert sample(text, 300, Words())[0] == words[:-1] + [0] * 101


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
