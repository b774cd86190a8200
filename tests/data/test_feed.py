"""What a step is fed: the loader's microbatches bit by bit, and one agreement on each step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.data.drawn import HOW, UNITS, T, dealt, draws, loader, same, samples_of
from tests.processes.ranks import on_ranks
from torchtitan_dp.base.process import Fault
from torchtitan_dp.data.batching import Draw, Feed, require_same_step
from torchtitan_dp.data.dataset import Samples

CPU = torch.device("cpu")


def samples(root: str | Path, **how: Any) -> Samples:
    """Prepare twenty units, and one whose records cannot be decoded."""
    return samples_of(Path(root), UNITS, **how)[0]


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_row19_a_step_is_fed_what_the_loader_makes(
    tmp_path: Path, windows: int, batch_size: int
) -> None:
    one = loader(samples(tmp_path, **HOW[3]), batch_size=batch_size, windows=windows)
    steps = draws(len(UNITS))
    for ahead in (True, False):
        it = Feed(one, (T,), CPU)
        for draw, following in zip(steps, [*steps[1:], None], strict=True):
            assert same(list(it.microbatches(draw, following if ahead else None)), dealt(one, draw))


def test_a_step_makes_one_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three numbers, before its last microbatch, and before the first draw's first one."""
    seen: list[str] = []

    def noted(mine: torch.Tensor, op: Any) -> None:
        seen.append(f"{len(mine)} {mine.dtype}")
        assert op == dist.ReduceOp.MAX

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("another collective")

    names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "gath"))]
    for name in (*names, "barrier", "send", "recv", "isend", "irecv", "scatter"):
        monkeypatch.setattr(dist, name, noted if name == "all_reduce" else refused)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    one, steps = Feed(loader(samples(tmp_path)), (4, 8, T), CPU), draws(len(UNITS))
    for draw, following in zip(steps, [*steps[1:], None], strict=True):
        for made in one.microbatches(draw, following):
            seen.append(f"microbatch of {len(made.valid_B)}")
    agreement, microbatch = "3 torch.int64", "microbatch of 1"
    expected = [agreement]
    for draw in steps:
        given = [microbatch] * len(draw.positions)
        expected += [*given[:-1], agreement, *given[-1:]]
    assert seen == expected


def ended(root: str, mine: list[list[list[int]]], broken: int | None = None) -> tuple[str, int]:
    """Return how this rank's steps end, and how many microbatches came before: `mine` is what each
    rank draws, step by step; rank `broken` cannot read its third microbatch."""
    rank, given, ids = dist.get_rank(), 0, Samples.ids

    def read(self: Samples, unit: int, *terms: Any) -> np.ndarray:
        if rank == broken and unit >= 0 and given == 2:
            raise OSError(5, "the disk\nis gone")
        return ids(self, unit, *terms)

    it = Feed(loader(samples(root), 2, rank), (T,), CPU)
    steps = [Draw(np.array(drawn, dtype=np.int64)) for drawn in mine[rank]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "ids", read)
        try:
            for draw, following in zip(steps, [*steps[1:], None], strict=True):
                for _ in it.microbatches(draw, following):
                    given += 1
        except Fault as fault:
            return str(fault), given
    return "fed", given


def test_row19_a_failing_read_ends_the_step_on_all_ranks_in_one_line(tmp_path: Path) -> None:
    """None of them hangs: both have padding until the agreement before the update."""
    samples(tmp_path)
    drawn = [[*range(12)], [*range(12, 21)]]
    (first, *counts), (line, count) = on_ranks(2, ended, str(tmp_path), [drawn] * 2, 1)
    assert counts == [count] == [5]  # of six: the agreement comes in the place of the last
    assert first.startswith("error: a sample could not be read on another rank")
    assert line.startswith("error: a sample could not be read (not private: OSError: [Errno 5]")
    assert line.endswith("the disk is gone)")
    assert "\n" not in first + line


def test_row19_a_failing_read_is_padding_until_the_last_microbatch(tmp_path: Path) -> None:
    """A store that was cut off is a failing disk's."""
    of = samples(tmp_path)
    open(f"{of.store.folder}/tokens", "wb").close()
    steps = Feed(loader(of), (T,), CPU).microbatches(Draw(np.arange(1, 4)))
    for _ in range(2):
        microbatch = next(steps)
        assert not microbatch.tokens_BT.any()
        assert not microbatch.valid_B.any()
    with pytest.raises(Fault, match=r"lacks \d+ bytes"):
        next(steps)


OTHERS = {
    "first": [[0, 1, 2, 3, 4, 6], [7, 8]],  # the first draw, as many units
    "next": [[0, 1, 2, 3, 4, 5], [7, 9]],  # before this step's last microbatch
    "empty": [[0, 1, 2, 3, 4, 5], []],
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_row61_ranks_that_draw_different_units_all_refuse_the_step(
    tmp_path: Path, others: list[list[int]]
) -> None:
    """In one line without the draw."""
    samples(tmp_path)
    drawn = [[0, 1, 2, 3, 4, 5], [7, 8]]
    ends = on_ranks(2, ended, str(tmp_path), [drawn, others])
    (line,) = {line for line, _ in ends}
    assert line.startswith("error: the ranks drew different units from one key")
    assert not any(character.isdigit() for character in line)
    (given,) = {count for _, count in ends}
    assert (given == 0) == (others[0] != drawn[0])


def refusals(drawn: list[list[int]]) -> list[bool]:
    """Return when this rank refuses."""
    found = []
    for pair in drawn:
        try:
            require_same_step(None, pair[dist.get_rank()], CPU)
            found.append(False)
        except Fault:
            found.append(True)
    return found


def test_row61_fingerprints_are_compared_exactly() -> None:
    high = 2**62 - 1  # high and high - 1 are equal in fp64; 0: the other one expects no step
    pairs = [[5, 5], [high, high], [high, high - 1], [high - 1, high], [0, 1]]
    assert on_ranks(2, refusals, pairs) == [[False, False, True, True, True]] * 2
