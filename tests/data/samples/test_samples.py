"""Samples: shifted labels, cut and padding, and nothing but zeros from a bad record."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from torchtitan_dp.data.records.formats import open_store
from torchtitan_dp.data.samples.excerpts import scan_undecodable
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore
from torchtitan_dp.data.samples.tokenizer import ByteTokenizer

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
