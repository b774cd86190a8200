"""Samples: shifted labels, cut and padding; all of a unit's records, or one of them."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.drawn import HOW, IGNORED, UNITS, T, Words, ids, marked, rng, sample, samples_of
from tests.data.stores import store_of
from torchtitan_dp.data.dataset import Samples


def made(root: Path, text: str, seq_len: int, tokenizer: Any = None) -> tuple[Any, Any]:
    store = store_of([{"text": text}], root, tokenizer=tokenizer)
    tokens_T, labels_T = sample(Samples(store, seq_len, pad_id=9), 0)
    assert tokens_T.dtype == labels_T.dtype == torch.int64
    return tokens_T.tolist(), labels_T.tolist()


def test_row06_labels_are_the_next_tokens_and_padding_is_ignored(tmp_path: Path) -> None:
    bos, *rest = marked("abc")
    tokens, labels = [bos, *b"abc", 9, 9], [*rest, IGNORED, IGNORED]
    for seq_len in (6, 4, 3, 1):
        assert made(tmp_path, "abc", seq_len) == (tokens[:seq_len], labels[:seq_len])


def test_one_record_is_each_equally_often_whole_and_alone(tmp_path: Path) -> None:
    texts = ["a", "bb", "", "dddd"]
    samples, (ann, bob) = samples_of(tmp_path, {"ann": texts, "bob": ["b"]}, one_record=True)
    taken = Counter(tuple(ids(sample(samples, ann, rng=rng(seed)))) for seed in range(800))
    assert set(taken) == {tuple(marked(text)) if text else () for text in texts}
    assert all(abs(count - 200) < 5 * np.sqrt(150) for count in taken.values())
    assert ids(sample(samples, bob, rng=rng(3))) == marked("b")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tokenizer", [None, Words()], ids=["marks", "none"])
def test_counts_are_those_of_samples(tmp_path: Path, how: Any, tokenizer: Words | None) -> None:
    """`tokens` and `has_target` do not read the samples that they describe."""
    odd: Any = {"one word": ["x"], "blank": ["", "x", None], "long": ["ab " * 40, "c"]}
    samples, _ = samples_of(tmp_path, {**UNITS, **odd}, tokenizer=tokenizer, **how)
    every = np.arange(len(samples.units))
    learned = samples.has_target(every)
    for unit in every.tolist():
        counts = []
        for seed in range(30):
            counts.append(max(len(ids(sample(samples, unit, rng=rng(seed)))) - 1, 0))
            assert samples.tokens(unit, rng(seed)) == counts[-1]
        assert learned[unit] == (max(counts) > 0)


@pytest.mark.parametrize("how", HOW)
def test_row03_another_units_records_change_no_sample(tmp_path: Path, how: dict[str, Any]) -> None:
    one, names = samples_of(tmp_path, UNITS, **how)
    other, _ = samples_of(tmp_path, UNITS | {"user 3": ["other"] * 50}, **how)
    before, after = ([ids(sample(s, u, rng=rng(7))) for u in names] for s in (one, other))
    equal = [a == b for a, b in zip(before, after, strict=True)]
    assert equal == [name != "user 3" for name in UNITS]


@pytest.mark.parametrize("how", HOW, ids=["concat", "random", "window", "random window"])
@pytest.mark.parametrize(
    "texts", [["x" * 10] * 3000, [""] * 3000, ["x" * 10**6]], ids=["many", "empty", "long"]
)
def test_row47_no_more_ids_are_read_than_a_sample_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], texts: list[str]
) -> None:
    samples, (ann,) = samples_of(tmp_path, {"ann": texts}, **how)
    read, real = list[int](), os.pread

    def pread(handle: int, size: int, at: int) -> bytes:
        read.append(size)
        return real(handle, size, at)

    monkeypatch.setattr(os, "pread", pread)
    samples.tokens(ann, rng())
    assert read == []
    sample(samples, ann, rng=rng())
    assert sum(read) <= 2 * (T + 1)  # ids of two bytes
    assert len(read) <= T + 1
