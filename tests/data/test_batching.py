"""Microbatches of a draw: dealt to ranks, padded to lengths of their own, with the same sum."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.drawn import HOW, UNITS, dealt, draws, ids, loader, sample, samples_of
from tests.data.stores import store_of, write
from tests.processes.ranks import on_ranks
from torchtitan_dp.config.derived import ladder
from torchtitan_dp.data.batching import Draw
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer

T = 32
LADDER = (2, 4, 8, 16, 32)
# Of records 0, 1, …, each with as many tokens, T at most. The second is undecodable.
CHARACTERS = [0, -1, 1, 2, 3, 4, 5, 7, 8, 11, 14, 15, 16, 17, 20, 25, 30, 31, 32, 100]


class Small(ByteTokenizer):
    """Text that reads "01..." as ids 0, 1, ..., below the 37 of the small model."""

    bos_id, eos_id = 36, None
    identity = "small"

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text) - 48


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    for i, characters in enumerate(CHARACTERS):
        text = bytes(48 + (i + j) % 36 for j in range(characters)) if characters >= 0 else b"\xff"
        write(tmp_path / "d", {f"{i:03}": text})
    return opened(tmp_path)


def opened(root: Path) -> Samples:
    return Samples(store_of(root / "d", root, tokenizer=Small()), T)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks, batch_size, windows", [(1, 1, 1), (1, 2, 3), (2, 1, 3), (3, 2, 1)])
def test_row19_what_is_drawn_is_processed_at_a_length_of_its_own(
    tmp_path: Path, how: dict[str, Any], ranks: int, batch_size: int, windows: int
) -> None:
    """Each unit is dealt once. All its windows are cut behind the last token of the longest, in any
    draw and on any mesh; all ranks have the same shapes in the same order, the longest first."""
    samples, _ = samples_of(tmp_path, UNITS, T, **how)
    terms = {"batch_size": batch_size, "windows": windows if how else 1}
    loaders = [loader(samples, ranks, rank, **terms) for rank in range(ranks)]
    for draw in draws(len(UNITS), [0.02, 0.3, 1.0] * 4):
        drawn = [dealt(one, draw, LADDER) for one in loaders]
        shapes = [[m.labels_BT.shape for m in of_rank] for of_rank in drawn]
        assert all(shape == shapes[0] for shape in shapes)
        assert [s[1] for s in shapes[0]] == sorted((s[1] for s in shapes[0]), reverse=True)
        seen = {}
        for m in (m for of_rank in drawn for m in of_rank):
            assert torch.equal(m.valid_B, m.positions_B >= 0)
            assert (len(m.valid_B), len(m.windows())) == tuple(terms.values())
            rows = zip(m.tokens_BT, m.labels_BT, strict=True)
            found = [(len(row[0]), ids(row)) for row in rows]
            for slot, position in enumerate(m.positions_B.tolist()):
                of_slot = found[slot * terms["windows"] :][: terms["windows"]]
                assert position not in seen
                if position >= 0:
                    seen[position] = of_slot
                else:
                    assert not any(window for _, window in of_slot)
        assert sorted(seen) == draw.positions.tolist()
        for position, of_slot in seen.items():
            unit, count = int(loaders[0].units[position]), terms["windows"]
            choice = [loaders[0].rng(draw.key, position) for _ in range(count)]
            made = [ids(sample(samples, unit, None, choice[k], k, count)) for k in range(count)]
            tokens = max(max(len(window) - 1, 0) for window in made)
            length = min(rung for rung in LADDER if rung >= tokens)
            assert of_slot == [(length, window) for window in made]


def test_row61_a_draw_has_a_fingerprint_under_its_key() -> None:
    key = bytes(range(32))
    drawn = [np.arange(9), np.arange(8), np.array([*range(8), 9]), np.empty(0, np.int64)]
    found = {Draw(one, of).fingerprint() for one in drawn for of in (key, bytes(32))}
    found |= {Draw(np.array([i]), key).fingerprint() for i in range(2000)}
    assert Draw(np.arange(9), bytes(range(32))).fingerprint() in found
    assert len(found) == 2008
    assert 2**61 < max(found) < 2**62
    assert min(found) >= 0


def sums(root: str, degrees: tuple[int, int, int], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Compute the relative error of the clipped sum with buckets; norms and shapes of both ways."""
    from tests import build

    built = build.build(degrees, *overrides, max_grad_norm=0.5)
    rank, ranks = torch.distributed.get_rank() // degrees[2], degrees[0] * degrees[1]
    one = loader(opened(Path(root)), ranks, rank, batch_size=built.batch_size)
    rungs = ladder(build.config(*overrides, degrees=degrees))
    assert len(rungs) > 3
    draw = Draw(np.arange(len(CHARACTERS))[::-1].copy())
    wholes, shapes = [], []
    norms: list[list[float]] = []
    for lengths in (None, rungs):
        norms.append([])
        for microbatch in dealt(one, draw, lengths):
            shapes.append(microbatch.labels_BT.shape[1])
            for part in microbatch.split(built.gradients.batch_size):
                loss_B = built.losses(part.tokens_BT, part.labels_BT)
                clip = built.gradients.accumulate_clipped(loss_B, part.valid_B)
                norms[-1].extend(clip.norm_B[part.valid_B].tolist())
        wholes.append(built.total())
    error = build.relative_error(*wholes[::-1])
    return {"error": error, "norms": norms, "shapes": set(shapes), "rungs": set(rungs)}


TWO = "--training.local_batch_size=2"
COMPILED = "--compile.enable", "--compile.backend=aot_eager"
MESHES: list[tuple[tuple[int, int, int], tuple[str, ...]]] = [
    ((1, 1, 1), ()),
    ((1, 1, 2), ("--parallelism.context_parallel_load_balancer=headtail",)),
    ((1, 2, 2), (TWO,)),
    # Several lengths through compiled blocks and the ring: recompiled, then with dynamic shapes.
    # A checkpointed block's recomputation must find those it ran.
    ((1, 1, 2), (*COMPILED, TWO, "--activation_checkpoint.mode=full")),
]


@pytest.mark.thorough_cases("degrees2-*", "degrees3-*")
@pytest.mark.parametrize("degrees, overrides", MESHES)
def test_clipped_sum_is_the_same(
    samples: Samples, tmp_path: Path, degrees: tuple[int, int, int], overrides: tuple[str, ...]
) -> None:
    results = on_ranks(int(np.prod(degrees)), sums, str(tmp_path), degrees, overrides)
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
