"""Length buckets: less padding, the same samples, the same clipped sum."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore

from tests.processes.ranks import on_ranks
from tests.processes.runs import CONFIG
from torchtitan_dp.config import JobConfig, derived
from torchtitan_dp.config.derived import MOST_LENGTHS, ladder, ring_is_aligned
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data import batching
from torchtitan_dp.data.batching import Microbatch, RecordLoader, padded_lengths
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import poisson_draw

T = 32
CPU = torch.device("cpu")
LADDER = (2, 4, 8, 16, 32)
# Characters of records 0, 1, ...; one more token with its marks, T at most. The first is empty,
# the second undecodable.
CHARACTERS = [0, -1, 1, 2, 3, 4, 5, 7, 8, 11, 14, 15, 16, 17, 20, 25, 30, 31, 32, 100]
TOKENS = [0 if n < 1 else min(n + 1, T) for n in CHARACTERS]


def configured(*overrides: str, seq_len: int = T, cp: int = 1) -> JobConfig:
    basics = ["--privacy.noise_multiplier=1", "--privacy.delta=1e-5"]
    sizes = [f"--training.seq_len={seq_len}", f"--parallelism.context_parallel_degree={cp}"]
    return load_config([*basics, *sizes, "--training.global_batch_size=4", *overrides], cp)


def write(folder: Path) -> None:
    for i, characters in enumerate(CHARACTERS):
        text = bytes(48 + (i + j) % 36 for j in range(characters)) if characters >= 0 else b"\xff"
        (folder / f"{i:03}.txt").write_bytes(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


class Bytes(ByteTokenizer):
    """Text that reads "01..." as ids 0, 1, ..., below the 37 of the small model."""

    bos_id, eos_id = 36, None

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text) - 48


def loader(
    folder: Any, ranks: int = 1, rank: int = 0, batch_size: int = 1, tokenizer: Any = None
) -> RecordLoader:
    store = open_store("text", str(folder), index_folder=str(folder) + "-index")
    samples = SampleStore(store, tokenizer or ByteTokenizer(), T)
    units = np.arange(len(store))[::-1].copy()  # positions are not records
    return RecordLoader(samples, units, ranks=ranks, rank=rank, batch_size=batch_size)


def microbatches(one: RecordLoader, draw: np.ndarray) -> list[Microbatch]:
    return list(one.microbatches(draw, one.lengths(draw, LADDER, CPU)))


def test_ladder() -> None:
    assert ladder(configured()) == LADDER
    assert ladder(configured(cp=2)) == (4, 8, 16, 32)
    assert ladder(configured(seq_len=36)) == (2, 4, 8, 16, 32, 36)
    assert ladder(configured(seq_len=36, cp=3)) == (6, 12, 24, 36)
    assert ladder(configured(seq_len=2)) == (2,)
    assert ladder(configured("--data.no-length_buckets")) == (T,)


def test_rungs_on_an_accelerator_fill_the_tiles_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring's parts have 128 tokens at least; without a ring, and on CPU, nothing changes."""
    on_cpu = ladder(configured(seq_len=1024, cp=2))
    alone = ladder(configured(seq_len=1024))
    monkeypatch.setattr(derived, "has_accelerator", lambda: True)
    for seq_len, cp in [(1024, 2), (1000, 2), (131072, 8), (64, 2), (96, 3)]:
        rungs = ladder(configured(seq_len=seq_len, cp=cp))
        assert rungs[-1] == seq_len
        assert all(length % (256 * cp) == 0 for length in rungs[:-1])
        assert ring_is_aligned(configured(seq_len=seq_len, cp=cp)) == (seq_len % (256 * cp) == 0)
    assert ladder(configured(seq_len=2048, cp=2)) == (512, 1024, 2048)
    assert on_cpu == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert ladder(configured(seq_len=1024)) == alone


def test_the_default_command_on_two_gpus_takes_no_unaligned_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both of a rank's parts fill whole tiles of attention, at every length of the ladder."""
    monkeypatch.setattr(derived, "has_accelerator", lambda: True)
    config = load_config(["--job.config_file", str(CONFIG)], 2)
    cp = config.parallelism.context_parallel_degree
    assert (cp, config.training.mixed_precision_param) == (2, "float32")
    assert ring_is_aligned(config)


@pytest.mark.parametrize("seq_len", [8192, 8320, 131072])
def test_ladder_is_short_enough_to_compile(seq_len: int) -> None:
    for cp in (1, 2, 4):
        lengths = ladder(configured(seq_len=seq_len, cp=cp))
        assert len(lengths) == MOST_LENGTHS <= torch._dynamo.config.recompile_limit
        assert lengths[-1] == seq_len
        assert all(length % (2 * cp) == 0 for length in lengths)
        assert all(a < b <= 2 * a for a, b in itertools.pairwise(lengths))


def test_padded_length_is_the_smallest_that_holds_the_tokens(folder: Path) -> None:
    one = loader(folder)
    draw = np.arange(len(TOKENS))
    lengths = one.lengths(draw, LADDER, CPU)
    for length, unit in zip(lengths, one.units, strict=True):
        tokens = one.samples.tokens(int(unit))
        assert tokens == min(TOKENS[unit], T)
        assert length == min(rung for rung in LADDER if rung >= tokens)
    assert lengths[one.units == 0] == lengths[one.units == 1] == LADDER[0]  # without tokens


@pytest.mark.parametrize("ranks, batch_size", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_drawn_is_processed_at_a_length_of_its_own(
    folder: Path, ranks: int, batch_size: int
) -> None:
    """100 draws: each record once, cut behind its last token, whatever else was drawn; all ranks
    run the same shapes in the same order, the longest first."""
    keys = RootKey.from_debug_seed(0).stream("sampling")
    loaders = [loader(folder, ranks, rank, batch_size) for rank in range(ranks)]
    padded_to = padded_lengths(np.array(TOKENS), LADDER)
    for step in range(100):
        draw = poisson_draw(keys.take(step), len(TOKENS), (0.02, 0.3, 1.0)[step % 3])
        drawn = [microbatches(one, draw) for one in loaders]
        shapes = [[m.labels_BT.shape for m in of_rank] for of_rank in drawn]
        assert all(shape == shapes[0] for shape in shapes)
        assert all(shape[0] == batch_size for shape in shapes[0])
        assert [s[1] for s in shapes[0]] == sorted((s[1] for s in shapes[0]), reverse=True)

        seen = []
        for microbatch in (m for of_rank in drawn for m in of_rank):
            for tokens_T, labels_T, valid, _ in zip(*microbatch, strict=True):
                assert valid or (labels_T == IGNORE_INDEX).all()
                if valid:
                    seen.append((len(tokens_T), tokens_T.tolist(), labels_T.tolist()))
        expected = []
        for unit in loaders[0].units[draw]:
            length = int(padded_to[unit])
            tokens_T, labels_T = loaders[0].samples.sample(int(unit))
            assert (labels_T[length:] == IGNORE_INDEX).all()
            expected.append((length, tokens_T[:length].tolist(), labels_T[:length].tolist()))
        assert sorted(seen) == sorted(expected)


def test_without_lengths_samples_are_seq_len_long_in_the_order_of_the_draw(folder: Path) -> None:
    one = loader(folder)
    draw = np.array([3, 9, 4])
    for rows in (one.microbatches(draw), one.microbatches(draw, one.lengths(draw, (T,), CPU))):
        for microbatch, position in zip(rows, draw, strict=True):
            tokens_T, labels_T = one.samples.sample(int(one.units[position]))
            assert torch.equal(microbatch.tokens_BT[0], tokens_T)
            assert torch.equal(microbatch.labels_BT[0], labels_T)


def test_records_are_counted_once_and_only_when_drawn(folder: Path) -> None:
    one, asked = loader(folder), []
    tokens = one.samples.tokens
    one.samples.tokens = lambda index: asked.append(index) or tokens(index)  # type: ignore
    for draw in ([], [2, 5], [2, 5, 7], [5]):
        one.lengths(np.array(draw, dtype=np.int64), LADDER, CPU)
    assert asked == one.units[[2, 5, 7]].tolist()
    one.lengths(np.arange(9), (T,), CPU)  # one length: nothing to find out
    assert len(asked) == 3
    assert one.samples.undecodable == 0  # counts samples, not looks at a record


def lengths_where_a_rank_cannot_read(folder: str) -> tuple[list[int], list[int]]:
    one = loader(folder, ranks=2, rank=torch.distributed.get_rank())
    if torch.distributed.get_rank() == 1:
        one.samples.records.read = lambda *_, **__: None  # type: ignore
    draw = np.arange(len(TOKENS))
    lengths = one.lengths(draw, LADDER, CPU)
    shapes = [m.labels_BT.shape[1] for m in one.microbatches(draw, lengths)]
    return lengths.tolist(), shapes


def test_ranks_agree_even_where_one_cannot_read(folder: Path) -> None:
    """Else a record could be dealt out twice, or cp ranks wait for ever."""
    first, second = on_ranks(2, lengths_where_a_rank_cannot_read, str(folder))
    assert first == second


def sums(folder: str, degrees: tuple[int, int, int], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The relative error of the clipped sum with buckets; norms and shapes by way of padding."""
    from tests import build

    built = build.build(degrees, *overrides, max_grad_norm=0.5)
    rank = torch.distributed.get_rank() // degrees[2]
    ranks = degrees[0] * degrees[1]
    one = loader(folder, ranks, rank, built.batch_size, tokenizer=Bytes())
    rungs = ladder(build.config(*overrides, degrees=degrees))
    assert len(rungs) > 3
    draw = np.arange(len(TOKENS))[::-1].copy()
    wholes, norms, shapes = [], [], []
    for lengths in (None, one.lengths(draw, rungs, CPU)):
        norms.append([])
        for microbatch in one.microbatches(draw, lengths):
            shapes.append(microbatch.labels_BT.shape[1])
            for part in microbatch.split(built.gradients.batch_size):
                loss_B = built.losses(part.tokens_BT, part.labels_BT)
                clip = built.gradients.accumulate_clipped(loss_B, part.valid_B)
                norms[-1].extend(clip.norm_B[part.valid_B].tolist())
        total = built.gradients.clipped_sum.take()
        wholes.append({name: built.whole(name, flat).clone() for name, flat in total.items()})
        built.gradients.clipped_sum.reset()
    padded, bucketed = wholes
    error = build.relative_error(bucketed, padded)
    return {"error": error, "norms": norms, "shapes": set(shapes), "rungs": set(rungs)}


MESHES: list[tuple[tuple[int, int, int], tuple[str, ...]]] = [
    ((1, 1, 1), ()),
    ((1, 1, 1), ("--training.local_batch_size=2",)),
    ((1, 1, 2), ("--parallelism.context_parallel_load_balancer=headtail",)),
    ((1, 1, 2), ("--parallelism.context_parallel_load_balancer=None",)),
    ((1, 1, 2), ("--training.local_batch_size=2",)),
    # Several lengths through compiled blocks and the ring: recompiled, then with dynamic shapes.
    ((1, 1, 2), ("--compile.enable", "--compile.backend=aot_eager")),
    # The same of regions, of which a checkpointed block's recomputation must find those it ran.
    (
        (1, 1, 2),
        (
            *("--compile.enable", "--compile.backend=aot_eager"),
            *("--training.local_batch_size=2", "--activation_checkpoint.mode=full"),
        ),
    ),
    ((1, 2, 2), ()),
    ((1, 2, 2), ("--training.local_batch_size=2",)),
]


@pytest.mark.thorough_cases("degrees3-*", "degrees4-*", "degrees5-*", "degrees6-*", "degrees8-*")
@pytest.mark.parametrize("degrees, overrides", MESHES)
def test_clipped_sum_is_the_same(
    folder: Path, degrees: tuple[int, int, int], overrides: tuple[str, ...]
) -> None:
    results = on_ranks(int(np.prod(degrees)), sums, str(folder), degrees, overrides)
    for result in results:
        assert result["error"] < 1e-5
        assert result["shapes"] == result["rungs"]
    padded, bucketed = (
        sorted(n for result in results[:: degrees[2]] for n in result["norms"][way])
        for way in (0, 1)
    )
    assert padded == pytest.approx(bucketed, rel=1e-5)
    assert padded[:2] == bucketed[:2] == [0, 0]  # the two records without tokens
    assert padded[2] > 0


@pytest.mark.parametrize("at_once", [1, 3])
def test_row47_nobody_waits_for_more_than_a_few_samples_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Rank 1 of 3: how many records it has tokenized before each all-reduce."""
    one, asked, sent = loader(folder), [], []
    tokens = one.samples.tokens
    one.samples.tokens = lambda index: asked.append(index) or tokens(index)  # type: ignore
    for name, value in (("is_initialized", True), ("get_world_size", 3), ("get_rank", 1)):
        monkeypatch.setattr(batching.dist, name, lambda value=value: value)

    def all_reduce(found: torch.Tensor) -> None:
        sent.append((len(found), len(asked)))
        asked.clear()

    monkeypatch.setattr(batching.dist, "all_reduce", all_reduce)
    batching.TokenCounts(one.samples, at_once).of(np.arange(20), CPU)
    assert [size for size, _ in sent] == [3 * at_once] * (20 // (3 * at_once)) + [2]
    assert all(counted <= at_once for _, counted in sent)
    assert sum(counted for _, counted in sent) == 7  # records 1, 4, ..., 19
