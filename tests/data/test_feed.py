"""What a step is fed: the loader's microbatches bit by bit, made ahead and once in a cp group."""

import hashlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.data.samples.test_excerpts import UNITS, samples
from torchtitan_dp.data.agreement import require_same_step
from torchtitan_dp.data.samples.samples import SampleStore, TokenCache

from tests.processes import forks
from tests.processes.ranks import on_ranks
from torchtitan_dp.data import background, console, feed
from torchtitan_dp.data.batching import Microbatch, RecordLoader
from torchtitan_dp.data.feed import ALONE, SAMPLES_AHEAD, ContextGroup, Draw, Feed
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.data.units import open_units
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import poisson_draw
from torchtitan_dp.process import Fault

CPU = torch.device("cpu")
T = 16
LADDERS = ((T,), (4, 8, T))
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"unit_sampling": "random"},
    {"long_records": "window"},
    {"unit_sampling": "random", "long_records": "window"},
)
RATES = (0.5, 0.0, 1.0, 0.05, 0.5)  # of the steps' draws, one of which is empty


def store(folder: Path, *, cached: bool = False, **how: Any) -> SampleStore:
    """Twenty units, and one whose records cannot be decoded."""
    units: dict[str, list[str | None]] = {**UNITS, "nobody": [None, None]}
    index = str(folder / "index")
    if not (folder / "a.jsonl").exists():
        samples(folder, units, T)
    records = open_store("jsonl", str(folder), unit_field="who", index_folder=index)
    units_of = open_units(records, "who", index_folder=index)
    cache = TokenCache() if cached else None
    return SampleStore(records, ByteTokenizer(), T, units_of, cache=cache, **how)


def loader(of: SampleStore, ranks: int = 1, rank: int = 0, batch_size: int = 1) -> RecordLoader:
    units = np.arange(len(of.units))[::-1].copy()  # positions are not units
    return RecordLoader(of, units, ranks=ranks, rank=rank, batch_size=batch_size)


def draws(count: int) -> list[Draw]:
    root = RootKey.from_debug_seed(3)
    sampling, window = root.stream("sampling"), root.stream("window")
    return [
        Draw(poisson_draw(sampling.take(step), count, rate), window.take(step))
        for step, rate in enumerate(RATES)
    ]


def fed(one: Feed, steps: list[Draw], ahead: bool = True) -> Iterator[list[Microbatch]]:
    """Each step's microbatches."""
    for draw, following in zip(steps, [*steps[1:], None], strict=True):
        yield list(one.microbatches(draw, following if ahead else None))


def expected(one: RecordLoader, steps: list[Draw], ladder: tuple[int, ...]) -> Iterator[Any]:
    for positions, key in steps:
        lengths = one.lengths(positions, ladder, CPU, key)
        yield list(one.microbatches(positions, lengths, key))


def same(found: list[Microbatch], wanted: list[Microbatch]) -> bool:
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_row19_a_step_is_fed_what_the_loader_makes(
    tmp_path: Path, how: dict[str, Any], ladder: tuple[int, ...], batch_size: int
) -> None:
    """Drawn ahead or not, with token ids cached or not."""
    plain = loader(store(tmp_path, **how), batch_size=batch_size)
    steps = draws(len(plain.units))
    wanted = list(expected(plain, steps, ladder))
    assert plain.samples.undecodable > 0
    for ahead, cached in ((True, False), (False, False), (True, True)):
        of = store(tmp_path, cached=cached, **how)
        one = Feed(loader(of, batch_size=batch_size), ladder, CPU)
        for found, want in zip(fed(one, steps, ahead), wanted, strict=True):
            assert same(found, want)
        assert one.undecodable == plain.samples.undecodable
        one.close()


def noted(of: SampleStore) -> list[int]:
    """Which units' samples are made, from now on."""
    made, excerpt = [], of.excerpt
    of.excerpt = lambda unit, *how: made.append(unit) or excerpt(unit, *how)  # type: ignore
    return made


def on_mesh(folder: str, degrees: tuple[int, int, int]) -> list[Any]:
    """A hash of what this rank was fed, and how many samples it made, for each way."""
    from tests import build

    dims, _ = build._mesh(degrees)
    cp = dims.get_optional_mesh("cp")
    group = ContextGroup.over(cp)
    ranks, rank = degrees[0] * degrees[1], dist.get_rank() // degrees[2]
    found: list[Any] = []
    real, threads = dist.all_reduce, set()

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return real(*arguments, **options)

    dist.all_reduce = all_reduce
    try:
        for how in HOW:
            for batch_size in (1, 2):
                of = store(Path(folder), cached=batch_size == 2, **how)
                one = loader(of, ranks, rank, batch_size)
                steps = draws(len(one.units))
                wanted = list(
                    expected(
                        loader(store(Path(folder), **how), ranks, rank, batch_size),
                        steps,
                        LADDERS[1],
                    )
                )
                made = noted(of)
                it = Feed(one, LADDERS[1], CPU, group)
                hashed = hashlib.sha256()
                for microbatches, want in zip(fed(it, steps), wanted, strict=True):
                    assert same(microbatches, want)
                    for tensor in (t for m in microbatches for t in m):
                        hashed.update(tensor.numpy().tobytes())
                it.close()
                slots = sum(len(m.valid_B) for want in wanted for m in want)
                found.append((hashed.hexdigest(), len(made), slots))
    finally:
        dist.all_reduce = real
    assert threads == {threading.main_thread()}
    return found


@pytest.mark.thorough_cases("(1, 1, 4)", "(1, 2, 2)")
@pytest.mark.parametrize(
    "degrees", [(1, 1, 2), (1, 2, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str
)
def test_row32_a_cp_group_is_fed_alike_and_each_sample_made_once(
    tmp_path: Path, degrees: tuple[int, int, int]
) -> None:
    """On every mesh what the loader makes; shared out evenly; no collective in a thread."""
    cp = degrees[2]
    store(tmp_path)
    found = on_ranks(int(np.prod(degrees)), on_mesh, str(tmp_path), degrees)
    for first in range(0, len(found), cp):
        for ways in zip(*found[first : first + cp], strict=True):
            assert len({hashed for hashed, _, _ in ways}) == 1
            made, slots = [count for _, count, _ in ways], ways[0][2]
            assert sum(made) == slots
            assert max(made) - min(made) <= len(RATES)  # one a step


# Ahead, and how far.


class Slow:
    """A thread's work that waits to be let go on, and counts."""

    def __init__(self, of: SampleStore) -> None:
        self.made: list[int] = []
        self.counted: list[int] = []
        self.go = threading.Semaphore(0)
        excerpt, tokens = of.excerpt, of.tokens

        def made(unit: int, *how: Any) -> Any:
            self.go.acquire()
            self.made.append(unit)
            return excerpt(unit, *how)

        def counted(source: int) -> int:
            self.counted.append(source)
            return tokens(source)

        of.excerpt, of.tokens = made, counted  # type: ignore[method-assign]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_samples_are_made_while_the_one_before_is_computed_and_few_at_once(tmp_path: Path) -> None:
    of = store(tmp_path)
    slow = Slow(of)
    slow.go.release(1000)
    one = Feed(loader(of), (T,), CPU)
    for number, _ in enumerate(one.microbatches(Draw(np.arange(20)))):
        most = min(number + 1 + SAMPLES_AHEAD, 20)
        until(lambda most=most: len(slow.made) == most)
        time.sleep(0.01)
        assert len(slow.made) == most
    one.close()


def test_the_next_step_is_counted_and_begun_while_this_one_is_computed(tmp_path: Path) -> None:
    of = store(tmp_path)
    slow = Slow(of)
    slow.go.release(1000)
    one = Feed(loader(of), LADDERS[1], CPU)
    this, following = Draw(np.arange(4)), Draw(np.arange(4, 12))
    steps = one.microbatches(this, following)
    next(steps)
    until(lambda: len(slow.counted) == 12)  # both draws, before this step's second microbatch
    made = [*steps]
    assert len(made) == 3
    until(lambda: len(slow.made) == 4 + SAMPLES_AHEAD)  # before anybody asks for the next step
    assert sorted(slow.counted) == sorted(
        int(of.chosen(int(u), None, 1)[0]) for u in one.loader.units[:12]
    )
    assert len(list(one.microbatches(following))) == 8
    assert len(slow.counted) == 12  # each once
    one.close()


def test_samples_do_not_wait_for_what_the_next_step_counts(tmp_path: Path) -> None:
    of = store(tmp_path)
    begun, go, tokens = threading.Event(), threading.Event(), of.tokens
    known = int(of.chosen(int(loader(of).units[0]), None, 1)[0])

    def counted(source: int) -> int:
        if source != known:
            begun.set()
            assert go.wait(30)
        return tokens(source)

    of.tokens = counted  # type: ignore[method-assign]
    one = Feed(loader(of), LADDERS[1], CPU)
    steps = one.microbatches(Draw(np.arange(1)), Draw(np.arange(1, 9)))
    samples = one._begin_rows(feed._Step(Draw(np.arange(1))), 0, loader(of).deal(np.arange(1))[0])
    one._counts.submit(lambda: counted(known + 1))
    assert begun.wait(30)
    assert samples[0].undecodable.result(30) == 0
    go.set()
    assert len(list(steps)) == 1
    one.close()


def test_a_closed_feed_forgets_what_was_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "END_S", 0.1)
    of = store(tmp_path)
    slow = Slow(of)
    one = Feed(loader(of), (T,), CPU)
    rows = [one._make(position, bytes(32), np.empty((2, T), np.int32), 0) for position in range(3)]
    until(lambda: one._samples._jobs.qsize() == 2)
    one.close()
    one.close()
    slow.go.release(3)
    assert rows[0].result(30) == 0
    one._samples._thread.join(30)
    assert len(slow.made) == 1
    assert not any(row.done() for row in rows[1:])


HANGING = """
import sys, threading
from torchtitan_dp.data import background
background.END_S = 0.1
thread = background.Background("samples")
thread.submit(threading.Event().wait)
thread.close()
sys.exit("error: the disk hangs")
"""


def test_a_process_ends_though_its_thread_hangs() -> None:
    forks.need()
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "error: the disk hangs\n")


def test_a_draw_that_was_not_prepared_is_fed_all_the_same(tmp_path: Path) -> None:
    """A step may be fed another draw than the one that was told, which is then forgotten."""
    of = store(tmp_path)
    one = Feed(loader(of), LADDERS[1], CPU)
    told, other = Draw(np.array([1, 2])), Draw(np.array([3]))
    list(one.microbatches(Draw(np.array([5])), told))
    (found,) = one.microbatches(other, None)
    (want,) = loader(of).microbatches(other.positions, np.array([found.labels_BT.shape[1]]))
    assert same([found], [want])
    one.close()


# What fails.


class Broken(Exception):
    pass


def refused(folder: str, kind: str) -> tuple[str, int]:
    """How a step ends on this rank when one sample of rank 1 fails, and how many came before."""
    from tests import build

    dims, _ = build._mesh((1, 2, 2))
    of = store(Path(folder))
    it = Feed(
        loader(of, 2, dist.get_rank() // 2),
        LADDERS[1],
        CPU,
        ContextGroup.of(dims.get_mesh("cp").get_group()),
    )
    steps = [Draw(np.arange(7)), Draw(np.arange(7, 21))]
    given, calls = 0, 0
    real = getattr(of, kind)

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 3:
            raise Broken("the disk\nis gone")
        return real(*arguments)

    setattr(of, kind, broken)
    try:
        for draw, following in zip(steps, [steps[1], None], strict=True):
            for _ in it.microbatches(draw, following):
                given += 1
    except Fault as fault:
        return str(fault), given
    finally:
        it.close()
    return "fed", given


@pytest.mark.parametrize("kind", ["excerpt", "tokens"])
def test_what_a_thread_raises_ends_the_step_on_all_ranks_in_one_line(
    tmp_path: Path, kind: str
) -> None:
    """Nobody hangs: the others go on to the step's end, and are told there."""
    store(tmp_path)
    ends = on_ranks(4, refused, str(tmp_path), kind)
    assert len({given for _, given in ends}) == 1
    assert ends[0][1] > 0
    for rank, (said, _) in enumerate(ends):
        if rank == 1:
            assert said.startswith(
                "error: a sample could not be made (not private: Broken: the disk is gone ("
            )
            assert "test_feed.py, line" in said
        else:
            assert said.startswith("error: a sample could not be made on another rank")
        assert "\n" not in said


def test_a_failure_is_told_in_the_place_of_the_last_microbatch(tmp_path: Path) -> None:
    of = store(tmp_path)
    of.excerpt = lambda unit, *how: [][1]  # type: ignore
    one = Feed(loader(of), (T,), CPU)
    steps = one.microbatches(Draw(np.arange(3)))
    assert all(not m.tokens_BT.any() for _, m in zip(range(2), steps, strict=False))
    with pytest.raises(Fault, match="IndexError: list index out of range"):
        next(steps)
    one.close()


def test_nothing_failed_is_no_fault() -> None:
    require_same_step(None, 7, CPU)
    with pytest.raises(Fault, match=r"could not be made \(not private: ValueError: x"):
        require_same_step(ValueError("x"), 7, CPU)


def fed_apart(folder: str, ladder: tuple[int, ...], mine: list[list[list[int]]]) -> tuple[str, int]:
    """How this rank's steps end when ranks draw otherwise, and how many microbatches came before.

    Args:
        mine: what each rank draws, step by step.
    """
    rank, given = dist.get_rank(), 0
    it = Feed(loader(store(Path(folder)), 2, rank), ladder, CPU)
    steps = [Draw(np.array(drawn, dtype=np.int64)) for drawn in mine[rank]]
    try:
        for draw, following in zip(steps, [*steps[1:], None], strict=True):
            for _ in it.microbatches(draw, following):
                given += 1
    except Fault as fault:
        return str(fault), given
    finally:
        it.close()
    return "fed", given


@pytest.mark.parametrize(
    "others",
    [
        [[0, 1, 2, 3, 4, 6], [7, 8]],  # the first draw, as many units
        [[0, 1, 2, 3, 4, 5], [7, 9]],  # the next one, before this step's last microbatch
        [[0, 1, 2, 3, 4, 5], [7]],
        [[0, 1, 2, 3, 4, 5], []],
    ],
    ids=["first", "next", "shorter", "empty"],
)
@pytest.mark.parametrize("ladder", LADDERS, ids=["whole", "buckets"])
def test_row61_ranks_that_draw_different_units_all_refuse_the_step(
    tmp_path: Path, ladder: tuple[int, ...], others: list[list[int]]
) -> None:
    """In one line without the draw, before its lengths and samples are sent."""
    store(tmp_path)
    drawn = [[0, 1, 2, 3, 4, 5], [7, 8]]
    ends = on_ranks(2, fed_apart, str(tmp_path), ladder, [drawn, others])
    said = {line for line, _ in ends}
    assert len(said) == 1
    assert next(iter(said)).startswith("error: the ranks drew different units from one key")
    assert not any(character.isdigit() for line in said for character in line)
    given = {count for _, count in ends}
    assert len(given) == 1
    assert (given == {0}) == (others[0] != drawn[0])


def test_row61_a_draw_has_a_fingerprint_under_its_key() -> None:
    one = Draw(np.arange(9), bytes(range(32)))
    assert one.fingerprint() == Draw(np.arange(9), bytes(range(32))).fingerprint()
    others = [
        Draw(np.arange(8), one.key),
        Draw(np.array([0, 1, 2, 3, 4, 5, 6, 7, 9]), one.key),
        Draw(np.arange(9)),
        Draw(np.empty(0, np.int64), one.key),
    ]
    assert len({draw.fingerprint() for draw in (one, *others)}) == 5
    found = [Draw(np.array([i]), one.key).fingerprint() for i in range(2000)]
    assert len(set(found)) == 2000
    assert 2**61 < max(found) < 2**62
    assert min(found) >= 0


def apart(drawn: list[int]) -> bool:
    """Whether this rank refuses when each rank has its number of `drawn`."""
    try:
        require_same_step(None, drawn[dist.get_rank()], CPU)
    except Fault:
        return True
    return False


@pytest.mark.parametrize(
    "drawn, expected",
    [
        ([5, 5], False),
        ([2**62 - 1, 2**62 - 1], False),
        ([2**62 - 1, 2**62 - 2], True),  # equal in fp64
        ([2**62 - 2, 2**62 - 1], True),
        ([0, 1], True),  # one expects no step
    ],
)
def test_row61_fingerprints_are_compared_exactly(drawn: list[int], expected: bool) -> None:
    assert on_ranks(2, apart, drawn) == [expected] * 2


def test_padding_is_that_of_a_draw_that_leaves_a_rank_nothing(tmp_path: Path) -> None:
    one = Feed(loader(store(tmp_path), ranks=2, rank=1, batch_size=3), (T,), CPU, ALONE)
    (left,) = one.microbatches(Draw(np.array([4])))
    assert not left.valid_B.any()
    assert same([one.padding(T)], [left])
    assert one.undecodable == 0
    one.close()


def test_validation_takes_the_first_microbatches_alike_on_all_ranks(tmp_path: Path) -> None:
    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp.validate import HeldOutValidator

    for rank, (steps, count) in itertools.product((0, 1), ((2, 2), (0, 0), (-1, 4), (99, 4))):
        one = loader(store(tmp_path), ranks=2, rank=rank, batch_size=3)
        config: Any = SimpleNamespace(
            validation=SimpleNamespace(steps=steps), training=SimpleNamespace(seq_len=8)
        )
        nothing: Any = None
        positions = HeldOutValidator(one, config, nothing, nothing, nothing)._positions()
        it = Feed(one, (T,), CPU)
        found = list(it.microbatches(Draw(positions)))
        assert len(found) == count
        assert same(found, list(one.microbatches(np.arange(21)))[:count])
        it.close()


def test_a_long_first_draw_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(console, "INTERVAL_S", 0.0)
    one = Feed(loader(store(tmp_path), batch_size=4), LADDERS[1], CPU)
    capfd.readouterr()
    list(one.microbatches(Draw(np.arange(8))))
    first, second, last = capfd.readouterr().err.splitlines()
    assert first.startswith("not private: tokenizing what was drawn: 50% of 8 samples, ")
    assert second.startswith("not private: tokenizing what was drawn: 100% of 8 samples, ")
    assert last.startswith("not private: tokenizing what was drawn: all of 8 samples, ")
    one.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_samples_reach_a_device_without_a_wait(tmp_path: Path) -> None:
    """In pinned memory, by copies that no stream waits for; the values are the loader's."""
    device = torch.device("cuda")
    of = store(tmp_path)
    one, plain = Feed(loader(of), LADDERS[1], device), loader(of)
    assert one._empty(T).is_pinned()
    steps = draws(len(plain.units))
    wanted = list(expected(plain, steps, LADDERS[1]))
    for found, want in zip(fed(one, steps), wanted, strict=True):
        assert same([Microbatch(*(t.cpu() for t in m)) for m in found], want)
    assert one.undecodable == plain.samples.undecodable
    draw = Draw(np.arange(12))
    list(one.microbatches(draw))  # all lengths are known now
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, _ in enumerate(one.microbatches(draw)):
            if number == 10:  # before the verdict, which is waited for
                break
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one.close()
