"""Windows of long texts: where they begin, how many there are, and what a step is fed of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.drawn import IGNORED, T, Words, ids, rng, sample, samples_of
from torchtitan_dp.data.batching import Microbatch
from torchtitan_dp.data.dataset import Samples

K = 3


def several(samples: Samples, unit: int, seed: int) -> list[list[int]]:
    return [ids(sample(samples, unit, None, rng(seed), k, K)) for k in range(K)]


def test_row57_records_are_taken_without_replacement(tmp_path: Path) -> None:
    texts = [chr(97 + i) for i in range(6)]
    samples, (ann, bob) = samples_of(tmp_path, {"ann": texts, "bob": ["x", "y"]}, one_record=True)
    counts = np.zeros(6)
    for seed in range(300):
        found = [chr(window[1]) for window in several(samples, ann, seed)]
        assert len(set(found)) == K
        counts[[texts.index(text) for text in found]] += 1
        *shown, last = (window[1:2] for window in several(samples, bob, seed))
        assert sorted(shown) == [[ord("x")], [ord("y")]]
        assert last == []
    assert abs(counts - 150).max() < 5 * np.sqrt(300 * 0.5 * 0.5)


def test_row57_windows_of_a_text_come_from_its_parts(tmp_path: Path) -> None:
    """No two begin alike, and a text that one sample holds has one."""
    words = list(range(1, 1001))
    units = {"ann": [" ".join("w" * n for n in words)], "bob": ["b " * 9]}
    samples, (ann, bob) = samples_of(tmp_path, units, tokenizer=Words(), window=True)
    width = (len(words) + T + 1) / K
    for seed in range(100):
        begins = [window[0] - 1 for window in several(samples, ann, seed)]
        assert len(set(begins)) == K
        for k, begin in enumerate(begins):
            # Its place is drawn from a window's length before the text on.
            low, high = (part * width - (T + 1) for part in (k, k + 1))
            assert max(low - 1, 0) <= begin <= max(high, 0)
        assert [len(window) for window in several(samples, bob, seed)] == [9, 0, 0]


def test_row05_a_units_share_is_of_its_own_windows() -> None:
    """Two units of three windows: one has targets in all, the other in one; and padding."""
    labels_BT = torch.full((9, 2), IGNORED)
    labels_BT[[0, 1, 2, 4], 1] = 7
    valid_B, positions_B = torch.tensor([True, True, False]), torch.tensor([4, 2, -1])
    microbatch = Microbatch(torch.arange(18).view(9, 2), labels_BT, valid_B, positions_B)
    windows = microbatch.windows()
    assert len(windows) == 3
    for k, window in enumerate(windows):
        assert window.tokens_BT[:, 0].tolist() == [2 * k, 2 * k + 6, 2 * k + 12]
        assert window.share_B is not None
        assert window.share_B.tolist() == pytest.approx([1 / 3, 1, 1])
        assert window.scale_losses(torch.ones(3)).tolist() == pytest.approx([1 / 3, 1, 1])
    first, last = microbatch.split(2)
    assert first.tokens_BT.shape == (6, 2)
    assert [part.positions_B.tolist() for part in (first, last)] == [[4, 2], [-1]]
    assert [len(part.tokens_BT) for part in microbatch.split(None)] == [9]
