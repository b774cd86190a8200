"""Row 48: ranks or nodes agree on indices, but hold other records under them.

"Another node" is a second folder with the same names and sizes in it.
"""

import functools
import json
from pathlib import Path

import pytest

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.data.opening import Records
from torchtitan_dp.preflight.check import open_records

LINES = [json.dumps({"who": who, "text": text}) for who, text in zip("aabb", "wxyz", strict=True)]


def jsonl(*orders: str) -> dict[str, bytes]:
    """A file for each order of the four lines; they are equally long."""
    return {
        f"{number}.jsonl": "".join(LINES[int(i)] + "\n" for i in order).encode()
        for number, order in enumerate(orders)
    }


ONE_TWO, TWO_ONE = {"a": b"one", "b": b"two"}, {"a": b"two", "b": b"one"}

# format, unit field, what one node holds, what the other does
SWAPS = {
    "equal-length lines in another order": ("jsonl", None, jsonl("0123"), jsonl("1023")),
    "one unit's lines in another order": ("jsonl", "who", jsonl("0123"), jsonl("1023")),
    "parts of equal size swapped": ("jsonl", None, jsonl("01", "23"), jsonl("23", "01")),
    "a line's text": ("jsonl", None, jsonl("0123"), jsonl("0023")),
    "files of equal size swapped": ("text", None, ONE_TWO, TWO_ONE),
    "a file with other text": ("text", None, ONE_TWO, ONE_TWO | {"b": b"six"}),
    "a unit's files swapped": (
        "text",
        "folder",
        {"u/a": b"one", "u/b": b"two", "v/a": b"x"},
        {"u/a": b"two", "u/b": b"one", "v/a": b"x"},
    ),
}


def lay_out(place: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return str(place)


def opened(format: str, path: str, unit_field: str | None, *overrides: str) -> Records:
    """The records of a configuration."""
    field = [] if unit_field is None else [f"--data.unit_field={unit_field}"]
    return open_records(
        build.config(
            f"--training.dataset={format}", f"--training.dataset_path={path}", *field, *overrides
        )
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("swap", SWAPS)
def test_row48_other_contents_are_another_fingerprint(swap, tmp_path):
    format, field, here, there = SWAPS[swap]
    one, same, other = (
        lay_out(tmp_path / place, files)
        for place, files in (("one", here), ("far/same", here), ("other", there))
    )
    prints = [opened(format, place, field).fingerprint for place in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def start(cache: str, format: str, field: str | None, places: list[str]) -> str:
    """What a rank says that opens the records of its own node."""
    import os

    import torch.distributed as dist

    from torchtitan_dp.distributed.agreement import require_agreement
    from torchtitan_dp.process import Fault

    os.environ["XDG_CACHE_HOME"] = cache
    records = opened(format, places[dist.get_rank()], field)
    try:
        require_agreement({"the records": records.fingerprint})
    except Fault as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("swap", SWAPS)
def test_row48_nodes_with_other_contents_refuse_to_train(swap, tmp_path):
    format, field, here, there = SWAPS[swap]
    one, same, other = (
        lay_out(tmp_path / place, files)
        for place, files in (("one", here), ("same", here), ("other", there))
    )
    cache = str(tmp_path / "cache")
    assert on_ranks(2, start, cache, format, field, [one, same]) == ["agreed", "agreed"]
    for refusal in on_ranks(2, start, cache, format, field, [one, other]):
        assert "ranks disagree on the records (" in refusal
        assert not any(f"{name}" in refusal.split() for name in here)


# data.verify_records = "drawn"

DRAWN = ("--data.verify_records=drawn", "--privacy.noise_multiplier=1")
RECORDS = 12


def node(place: Path, texts: list[str], mode: str) -> str:
    """A node's copy: a file a record, or a line a record; the bytes of "Q" and "Z" differ alone."""
    if mode == "jsonl":
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        return lay_out(place, {"a.jsonl": lines.encode()})
    return lay_out(place, {f"{i:02}": text.encode() for i, text in enumerate(texts)})


def drawn_step(
    cache: str,
    format: str,
    places: list[str],
    degrees: tuple[int, int],
    draw: list[int],
    *more: str,
) -> tuple[str, int]:
    """What a rank says that takes a step's microbatches, and how many it was given.

    Each rank is a machine of its own, whose copy of the data lies at its place.
    """
    import os

    import numpy as np
    import torch
    import torch.distributed as dist

    from torchtitan_dp.data.feed import Draw
    from torchtitan_dp.data.tokenizer import ByteTokenizer
    from torchtitan_dp.process import Fault
    from torchtitan_dp.train_spec import OpenOnce, build_feed, build_loader

    os.environ["XDG_CACHE_HOME"] = cache
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    dp, cp = degrees
    config = build.config(
        f"--training.dataset={format}",
        f"--training.dataset_path={places[dist.get_rank()]}",
        *DRAWN,
        *more,
        degrees=(1, dp, cp),
    )
    loader = build_loader(
        OpenOnce(),
        dp_world_size=dp,
        dp_rank=dist.get_rank() // cp,
        tokenizer=ByteTokenizer(),
        job_config=config,
    )
    dims, _ = build._mesh((1, dp, cp))
    feed = build_feed(loader, config, dims, torch.device("cpu"))
    drawn, given = Draw(np.array(draw, dtype=np.int64), bytes(range(32))), 0
    try:
        for _ in feed.microbatches(drawn):
            given += 1
    except Fault as fault:
        return str(fault), given
    finally:
        feed.close()
    assert feed.undecodable == 0
    return "taken", given


TEXTS = [chr(65 + i) * (i + 1) for i in range(RECORDS)]
SWAPPED = [*TEXTS[:4], "Q" * 5, *TEXTS[5:]]  # record 4 is another one's, equally long
PERMUTED = [TEXTS[i] for i in (0, 1, 2, 3, 4, 5, 6, 8, 7, 9, 10, 11)]


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1)], ids=["cp", "dp"])
@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_row48_the_first_draw_that_meets_another_sample_is_refused(tmp_path, format, degrees):
    """By all ranks, also those that hold the right one; other draws are taken."""
    cache = str(tmp_path / "cache")
    one, other = (
        node(tmp_path / name, texts, format) for name, texts in (("one", TEXTS), ("two", SWAPPED))
    )

    def step(draw: list[int], places: list[str]) -> list[str]:
        return [said for said, _ in on_ranks(2, drawn_step, cache, format, places, degrees, draw)]

    assert step([1, 4, 9], [one, one]) == ["taken"] * 2
    for harmless in ([0, 1, 2, 3, 5], []):
        assert step(harmless, [one, other]) == ["taken"] * 2
    for draw in ([4], [1, 4, 9], list(range(RECORDS))):
        said = step(draw, [one, other])
        assert len(set(said)) == 1
        assert said[0].startswith("error: data.verify_records = 'drawn': ")
        assert not any(word in said[0] for word in ("QQ", "EE", "04", " 4", "one/", "two/"))


def test_row48_one_person_under_two_indices_is_seen_whoever_is_drawn(tmp_path):
    """Two data-parallel machines: the record at 7 here is that at 8 there, longer by a letter."""
    cache = str(tmp_path / "cache")
    places = [
        node(tmp_path / name, texts, "jsonl") for name, texts in (("one", TEXTS), ("two", PERMUTED))
    ]
    for draw in ([7], [8], [0, 7], [0, 8], [7, 8]):
        for said, _ in on_ranks(2, drawn_step, cache, "jsonl", places, (2, 1), draw):
            assert "different samples" in said, draw


@pytest.mark.parametrize("long_records, expected", [("head", "taken"), ("window", "error")])
def test_row48_samples_are_compared_with_their_windows(tmp_path, long_records, expected):
    """Of eight records only the last letters differ, which no head takes in, but some windows."""
    cache = str(tmp_path / "cache")
    places = [
        node(tmp_path / name, ["x" * (2 * build.T) + letter] * 8, "text")
        for name, letter in (("one", "a"), ("two", "b"))
    ]
    more = (f"--data.long_records={long_records}",)
    draw = list(range(8))
    for said, _ in on_ranks(2, drawn_step, cache, "text", places, (1, 2), draw, *more):
        assert said.startswith(expected)


def test_row48_every_machine_makes_each_drawn_sample_once(tmp_path, monkeypatch):
    """The cost that is promised: nothing is made twice on a machine, and all in one of each."""
    import numpy as np
    import torch

    from torchtitan_dp.data import comparison, feed, sharing
    from torchtitan_dp.data.comparison import Place
    from torchtitan_dp.data.loading import RecordLoader
    from torchtitan_dp.data.records import open_store
    from torchtitan_dp.data.samples import SampleStore
    from torchtitan_dp.data.tokenizer import ByteTokenizer

    monkeypatch.setattr(feed.dist, "all_reduce", lambda *_, **__: None)
    compared: set[int] = set()
    monkeypatch.setattr(
        comparison.Comparison,
        "require_alike",
        lambda self: compared.update(np.flatnonzero(self._words[:, 0]).tolist()),
    )

    store = open_store("text", node(tmp_path / "one", TEXTS, "text"))
    draw = np.array([0, 2, 3, 5, 7, 8, 11])
    for cp, local_ranks in ((1, 4), (2, 4), (4, 4), (2, 3), (1, 1), (8, 4), (1, 8)):
        world = 8 if local_ranks != 3 else 6
        made: dict[int, list[int]] = {}  # of each machine
        held: dict[int, set[int]] = {}
        for rank in range(world):
            samples = SampleStore(store, ByteTokenizer(), 32)
            loader = RecordLoader(
                samples, np.arange(RECORDS), ranks=world // cp, rank=rank // cp, batch_size=1
            )
            here = made.setdefault(rank // local_ranks, [])
            samples.excerpt = (  # type: ignore[method-assign]
                lambda unit, *how, s=samples, here=here: (
                    here.append(unit) or SampleStore.excerpt(s, unit, *how)
                )
            )
            fed = feed.Feed(
                loader,
                (32,),
                torch.device("cpu"),
                sharing.ContextGroup(None, cp, rank % cp),
                place=Place.of(rank, rank % local_ranks, local_ranks),
            )
            compared.clear()
            list(fed.microbatches(feed.Draw(draw)))
            fed.close()
            held.setdefault(rank // local_ranks, set()).update(compared)
        for machine in range(world // local_ranks):
            assert sorted(unit for unit in made[machine] if unit >= 0) == draw.tolist()
            assert held[machine] == set(range(len(draw)))


def alike(known: list[list[list[int]]]) -> bool:
    import numpy as np
    import torch
    import torch.distributed as dist

    from torchtitan_dp.data.comparison import know_alike

    mine = np.array(known[dist.get_rank()], dtype=np.int64).reshape(-1, 2)
    return know_alike(mine, torch.device("cpu"))


HIGH = 2**62


@pytest.mark.parametrize(
    "known, expected",
    [
        ([[], []], True),
        ([[[1, HIGH]], [[1, HIGH]]], True),
        ([[[1, HIGH]], [[0, 0]]], True),
        ([[[0, 0]], [[0, 0]]], True),
        ([[[1, HIGH]], [[1, HIGH - 1]]], False),
        ([[[2, 7], [1, 1]], [[2, 7], [HIGH, 1]]], False),
        ([[[0, 0], [5, 5]], [[9, 9], [5, 6]]], False),
    ],
)
def test_row48_what_one_rank_does_not_know_is_no_difference(known, expected):
    assert on_ranks(2, alike, known) == [expected] * 2


def test_row48_a_refused_step_is_not_begun_and_changes_no_weights(monkeypatch):
    """Gradients of what was compared too late are dropped with the process."""
    from tests.hazards import test_trainer
    from torchtitan_dp.data import comparison

    class Step(test_trainer.Step):
        fault: object = None

        def __init__(self, *args):
            try:
                super().__init__(*args)
            except comparison.Fault as fault:
                self.fault = fault

    compared = functools.partial(test_trainer.feed, comparison.Place(range(1), 0))
    monkeypatch.setattr(test_trainer, "feed", compared)
    for alike in (True, False):
        monkeypatch.setattr(comparison, "know_alike", lambda *_, alike=alike: alike)
        step = Step(monkeypatch)
        assert "sample" in step.did
        assert ("update" in step.did) == alike
        assert any(did.startswith("begin") for did in step.did) == alike
        assert (step.fault is None) == alike
        monkeypatch.undo()
        monkeypatch.setattr(test_trainer, "feed", compared)


def test_row48_only_who_asks_for_it_compares(monkeypatch):
    """By default contents are hashed; without privacy nobody can enter twice."""
    import torch.distributed as dist

    from torchtitan_dp.train_spec import compared

    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compared(build.config()) is None
    assert compared(build.config(*DRAWN, "--privacy.no-enable")) is None
    assert compared(build.config(*DRAWN)) == (range(4, 8), 1)
