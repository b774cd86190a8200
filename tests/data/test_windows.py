"""Several windows of a drawn unit: which, how many, and what a step is fed of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.samples.test_excerpts import IGNORED, T, ids, rng, samples
from tests.data.test_feed import CPU, HOW, LADDERS, draws, fed, same, store
from tests.processes.ranks import on_ranks
from torchtitan_dp.data.batching import Microbatch, RecordLoader
from torchtitan_dp.data.feed import ContextGroup, Draw, Feed

K = 3
RANDOM = HOW[1:]  # those that choose


def all_of(one: "object", unit: int, seed: int, windows: int = K) -> list[list[int]]:
    return [
        ids(one.sample(unit, None, rng(seed), k, windows))  # type: ignore[attr-defined]
        for k in range(windows)
    ]


def test_records_are_taken_without_replacement(tmp_path: Path) -> None:
    texts = [chr(97 + i) for i in range(6)]
    one, (ann, bob) = samples(tmp_path, {"ann": texts, "bob": ["x", "y"]}, unit_sampling="random")
    counts = np.zeros(6)
    for seed in range(300):
        found = [chr(window[1]) for window in all_of(one, ann, seed)]
        assert len(set(found)) == K
        counts[[texts.index(text) for text in found]] += 1
        shown = [window[1:2] for window in all_of(one, bob, seed)]
        assert sorted(shown) == [[], [ord("x")], [ord("y")]]
        assert shown[2] == []
    assert abs(counts - 150).max() < 5 * np.sqrt(300 * 0.5 * 0.5)


def test_windows_of_a_text_come_from_its_parts(tmp_path: Path) -> None:
    """No two begin alike, and a text that one sample holds has one."""
    text = "".join(chr(33 + i // 90) + chr(33 + i % 90) for i in range(3000))
    one, (ann, bob) = samples(tmp_path, {"ann": [text], "bob": ["b" * 9]}, long_records="window")
    width = (len(text) + T + 1) / K
    for seed in range(100):
        begins = [
            text.encode().find(bytes(x for x in w if x < 256)) for w in all_of(one, ann, seed)
        ]
        assert len(set(begins)) == K
        for k, begin in enumerate(begins):
            # Where it begins is sought from a window's length before the text on.
            assert k * width - T - 3 <= begin + 2 <= (k + 1) * width + 3
        assert [len(window) for window in all_of(one, bob, seed)] == [11, 0, 0]


@pytest.mark.parametrize("how", HOW)
def test_one_window_is_the_sample(tmp_path: Path, how: dict[str, str]) -> None:
    one = store(tmp_path, **how)
    for unit in range(len(one.units)):
        first, only = one.sample(unit, None, rng(unit)), one.sample(unit, None, rng(unit), 0, 1)
        assert all(map(torch.equal, first, only))


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("how", RANDOM)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_row19_a_step_is_fed_what_the_loader_makes(
    tmp_path: Path, how: dict[str, str], ladder: tuple[int, ...], batch_size: int
) -> None:
    of = store(tmp_path, **how)
    loader = RecordLoader(
        of, np.arange(len(of.units)), ranks=2, rank=1, batch_size=batch_size, windows=K
    )
    steps = draws(len(of.units))
    wanted = []
    for positions, key in steps:
        lengths = loader.lengths(positions, ladder, CPU, key)
        assert len(lengths) == len(positions)
        wanted.append(list(loader.microbatches(positions, lengths, key)))
    feed = Feed(loader, ladder, CPU)
    for found, expected in zip(fed(feed, steps), wanted, strict=True):
        assert same(found, expected)
        for microbatch in found:
            assert len(microbatch.valid_B) == batch_size
            assert len(microbatch.tokens_BT) == batch_size * K
            assert torch.equal(microbatch.positions_B >= 0, microbatch.valid_B)
    feed.close()
    everyone = [
        RecordLoader(of, np.arange(len(of.units)), ranks=2, rank=rank, batch_size=batch_size)
        for rank in range(2)
    ]
    draw = steps[0].positions
    dealt = [m.positions_B for one in everyone for m in one.microbatches(draw)]
    found_B = torch.cat(dealt)
    assert sorted(found_B[found_B >= 0].tolist()) == draw.tolist()


def test_a_unit_is_padded_to_its_longest_window(tmp_path: Path) -> None:
    units: dict[str, list[str | None]] = {"ann": ["a", "b" * 7], "bob": ["c", "d", "e"]}
    one, order = samples(tmp_path, units, unit_sampling="random")
    loader = RecordLoader(one, np.array(order), ranks=1, rank=0, batch_size=1, windows=2)
    assert loader.lengths(np.arange(2), (2, 4, 8, 16), CPU, bytes(32)).tolist() == [8, 2]


def test_row17_padding_has_as_many_windows(tmp_path: Path) -> None:
    of = store(tmp_path, unit_sampling="random")
    loader = RecordLoader(of, np.arange(9), ranks=1, rank=0, batch_size=2, windows=K)
    feed = Feed(loader, (4, T), CPU)
    padding = feed.padding(4)
    feed.close()
    assert padding.tokens_BT.shape == (2 * K, 4)
    assert (padding.labels_BT == IGNORED).all()
    assert padding.valid_B.tolist() == [False, False]
    for part in padding.split(1):
        assert [len(window.tokens_BT) for window in part.windows()] == [1] * K


def test_row05_a_units_share_is_of_its_own_windows() -> None:
    """Two units of three windows: one has targets in all, the other in one; and padding."""
    labels_BT = torch.full((9, 2), IGNORED)
    labels_BT[[0, 1, 2, 4], 1] = 7
    microbatch = Microbatch(
        torch.arange(18).view(9, 2),
        labels_BT,
        torch.tensor([True, True, False]),
        torch.tensor([4, 2, -1]),
    )
    windows = microbatch.windows()
    assert len(windows) == 3
    for k, window in enumerate(windows):
        assert window.tokens_BT[:, 0].tolist() == [2 * k, 2 * k + 6, 2 * k + 12]
        assert window.share_B is not None
        assert window.share_B.tolist() == pytest.approx([1 / 3, 1, 1])
        assert window.of_mean(torch.ones(3)).tolist() == pytest.approx([1 / 3, 1, 1])
    first, last = microbatch.split(2)
    assert first.tokens_BT.shape == (6, 2)
    assert [part.positions_B.tolist() for part in (first, last)] == [[4, 2], [-1]]
    assert [len(part.tokens_BT) for part in microbatch.split(None)] == [9]


def made_on_ranks(folder: str) -> bool:
    """Whether both ranks of a context-parallel group are fed what one alone is."""
    of = store(Path(folder), unit_sampling="random")
    loader = RecordLoader(of, np.arange(len(of.units)), ranks=1, rank=0, batch_size=2, windows=K)
    draw = Draw(np.arange(7), bytes(32))
    lengths = loader.lengths(draw.positions, LADDERS[1], CPU, draw.key)
    feed = Feed(loader, LADDERS[1], CPU, ContextGroup.of(torch.distributed.group.WORLD))
    found = list(feed.microbatches(draw))
    feed.close()
    return same(found, list(loader.microbatches(draw.positions, lengths, draw.key)))


def test_row32_a_cp_group_is_fed_the_same_windows(tmp_path: Path) -> None:
    store(tmp_path)  # writes the records
    assert on_ranks(2, made_on_ranks, str(tmp_path)) == [True, True]
