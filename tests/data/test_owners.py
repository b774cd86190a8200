"""Records of several owners: whose unit they are in, and that it is one person's alone (row 83)."""

import itertools
import math
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests import build
from tests.data.drawn import dealt
from tests.data.stores import WRITERS, records_of, source, store_of, texts
from tests.processes.ranks import on_ranks
from torchtitan_dp.config.derived import privacy_unit
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.data.owners import Owners, owners_of
from torchtitan_dp.data.prepare import prepared
from torchtitan_dp.data.store import Store, group, unit_hash
from torchtitan_dp.release.card import guarantee
from torchtitan_dp.train.processor import SampleStatistics
from torchtitan_dp.train.trainer import DPTrainer

BOTH = ["from", "to"]


def letters(*owners: Any, key: str = "who") -> list[dict[str, Any]]:
    return [{key: names, "text": f"letter {i} {names}"} for i, names in enumerate(owners)]


def units(store: Store) -> set[tuple[int, ...]]:
    return {tuple(row) for row in records_of(store.units)}


def test_row83_the_rule_by_hand(tmp_path: Path) -> None:
    """The largest set of owners first; then what shares nobody with it."""
    rows = letters(
        *[["ann", "bob"]] * 3, *[["bob", "cyd"]] * 2, ["cyd"], ["ann"], ["dan", 7], ["7"]
    )
    store = store_of(rows, tmp_path, unit_field=["who"])
    seven = {(7,), (8,)} & units(store)  # of equal ones the least hash
    assert units(store) == {(0, 1, 2), (5,)} | seven
    assert len(seven) == 1
    assert store.facts["owners"] == {
        **{"left_out": 4, "people": 5, "in_units": 5 if (7,) in seven else 4},
        **{"common": [], "joined": 0},
    }
    assert unit_hash("cyd")[:8] in store.units.hashes.astype("<u8").tobytes()  # as without a list


@pytest.mark.parametrize("format", sorted(WRITERS))
def test_row83_nobody_is_in_two_units_and_all_of_a_units_records_have_the_same_owners(
    tmp_path: Path, format: str
) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        people = [f"p{rng.randrange(rng.choice((4, 12, 60)))}" for _ in range(120)]
        pairs = [people[i : i + 2] for i in range(0, 120, 2)]
        rows = [{"from": a, "to": b, "text": f"{i}"} for i, (a, b) in enumerate(pairs)]
        root = WRITERS[format](tmp_path / f"{seed}", rows)
        store = store_of(root, tmp_path, format, unit_field=BOTH)
        found = units(store)
        sets = [{frozenset(pairs[i]) for i in unit} for unit in found]
        assert all(len(one) == 1 for one in sets)
        kept = [next(iter(one)) for one in sets]
        assert all(not a & b for a, b in itertools.combinations(kept, 2))
        # Nothing is left out that could stay.
        free = set(people) - set().union(*kept)
        assert not any(set(pair) <= free for pair in pairs)
        assert store.facts["owners"]["left_out"] == len(rows) - sum(map(len, found))


def test_row83_units_follow_from_names_alone(tmp_path: Path) -> None:
    """Neighbours whose texts differ, one of them torn or gone, have the same units."""
    rows = letters(*[[f"p{i % 7}", f"p{(i * i) % 5}"] for i in range(40)])
    emptied = [
        {"who": row["who"], "text": text}
        for row, text in zip(rows, [None, "", "x", "y"] * 10, strict=True)
    ]
    one, other = (store_of(r, tmp_path, unit_field=["who"]) for r in (rows, emptied))
    assert one.units.members.tolist() == other.units.members.tolist()
    assert one.units.hashes.tolist() == other.units.hashes.tolist()
    shuffled = [*range(40)]
    random.Random(0).shuffle(shuffled)
    moved = store_of([rows[i] for i in shuffled], tmp_path, unit_field=["who"])
    assert {tuple(sorted(shuffled[i] for i in unit)) for unit in units(moved)} == units(one)


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"from": "ann", "to": ["bob", "ann", 7]}, "ann bob ann 7"),
        ({"from": None, "to": "bob"}, "bob"),
        ({"to": "bob"}, "bob"),
        ({"from": "", "to": ["bob", None, ""]}, "bob"),
        ({"from": None, "to": []}, ""),
        ({"from": "ann", "to": {"name": "bob"}}, None),  # somebody, who cannot be named
        ({"from": "ann", "to": ["bob", True]}, None),
        ({"from": "ann", "to": ["bob", ["cyd"]]}, None),
        ({"from": "ann", "to": "\udcff"}, None),  # bytes that are no UTF-8
        ({"from": "ann", "to": b""}, None),  # a value that a reader could not decode
        ({"from": "ann", "to": [f"p{i}" for i in range(256)]}, None),  # perhaps cut there
    ],
)
def test_row83_whoever_cannot_be_read_is_not_forgotten(fields: Any, names: str | None) -> None:
    found = owners_of(fields, BOTH)
    assert (found and " ".join(itertools.chain(*found.values()))) == names


@pytest.mark.parametrize("who", ["unit_field", "not_owners"])
def test_row83_a_name_that_no_record_has_is_refused(tmp_path: Path, who: str) -> None:
    """Of a misspelled field nobody would be protected, in silence."""
    rows = [{"from": f"p{i}", "to": f"q{i}", "text": "x"} for i in range(9)]
    how: dict[str, Any] = {"unit_field": BOTH, who: [*BOTH, "z"] if who == "unit_field" else ["z"]}
    with pytest.raises(ValueError, match=rf"data\.{who} = 'z': no record names anybody so"):
        store_of(rows, tmp_path, **how)


def test_row83_an_illegible_text_moves_nobody_elses_unit(tmp_path: Path) -> None:
    """A byte that is no UTF-8, a name twice: neighbours in one person's texts have equal units."""
    lines = [
        b'{"from": "p%d", "to": "p%d", "text": "%s"}' % (i % 7, i % 5, b"x") for i in range(40)
    ]
    others = [
        line.replace(b'"x"', b'"\xff"' if i % 14 == 0 else b'"a", "text": "b"')
        if i % 7 == 0
        else line
        for i, line in enumerate(lines)
    ]
    one, other = (store_of(rows, tmp_path, unit_field=BOTH) for rows in (lines, others))
    assert one.units.members.tolist() == other.units.members.tolist()
    assert [reason > 0 for reason in other.reasons] == [i % 7 == 0 for i in range(40)]


def test_owners_whose_names_are_joined_are_reported(tmp_path: Path) -> None:
    store = store_of(letters(["ann, bob"], ["cyd;dan"], ["eve"]), tmp_path, unit_field=["who"])
    assert store.facts["owners"]["joined"] == 2


def test_row83_a_record_without_a_readable_owner_is_alone_and_silent(tmp_path: Path) -> None:
    store = store_of(letters(["ann"], ["ann", 1.5], None, ["ann"]), tmp_path, unit_field=["who"])
    assert units(store) == {(0, 3), (1,), (2,)}
    assert [text is None for text in texts(store)] == [False, True, True, False]
    assert store.facts["unnamed"] == 2


def test_owners_of_many_records_and_of_several_spellings_are_reported(tmp_path: Path) -> None:
    pairs = [["Dr. X", f"p{i}"] for i in range(30)] + [["P0 ", "q"]]
    store = store_of(letters(*pairs), tmp_path, unit_field=["who"])
    assert store.facts["owners"]["common"] == [["Dr. X", 30 / 31]]
    assert store.facts["owners"]["left_out"] == 29
    assert store.facts["alike"] == [2, 1]
    without = store_of(letters(*pairs), tmp_path, unit_field=["who"], not_owners=["Dr. X"])
    assert without.facts["owners"]["left_out"] == 0
    assert len(without.units) == 31
    assert without.folder != store.folder


def test_a_list_of_owners_needs_a_list_of_fields(tmp_path: Path) -> None:
    root = WRITERS["parquet"](tmp_path / "a", letters(["ann"], ["bob"]))
    with pytest.raises(
        ValueError, match=r"of lists of owners, name the field in a list: \['owners'"
    ):
        store_of(root, tmp_path, "parquet", unit_field="who")
    with pytest.raises(ValueError, match="text files have no fields"):
        source(tmp_path, "text", unit_field=["folder"]).check()


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["--data.unit_field=a,a"], "name each field of owners once"),
        (["--data.unit_field=a,b", "--privacy.sample_rate=0.1"], "who owns what must be public"),
        (["--data.unit_field=a", "--data.not_owners=x"], "data.not_owners = .*: only a list"),
    ],
)
def test_settings_that_protect_no_owner_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build.config("--training.dataset=jsonl", *overrides)


def test_the_unit_in_words() -> None:
    config = build.config(
        "--training.dataset=jsonl", "--data.unit_field=from,to", "--data.not_owners=x"
    )
    unit = privacy_unit(config)
    begins = "unit of owners by data.unit_field 'from', 'to' without 1 data.not_owners ("
    assert unit.startswith(begins)
    config.data.not_owners = ["y"]  # whom another run leaves out: they do not compose
    assert privacy_unit(config).startswith(begins)
    assert privacy_unit(config) != unit
    content: Any = {
        "privacy_unit": unit,
        "meaning": {"members_detected": [], "posterior_from_half": 0.5, "posterior_but_for": 1e-3},
        "epsilon": 1.0,
        "delta": 1e-3,
    }
    words = guarantee(content, config)
    assert words["person"] == "person"
    assert "`from` or `to`" in words["kind_of_unit"]
    assert words["not_owners"] == 1


# The sum of clipped gradients, of the trainer's own `accumulate` without noise.

C = 0.5
SETS = "ann bob, ann bob, bob cyd, cyd dan, dan, eve, eve ann, fay, fay gus"
ROWS = letters(*(names.split() for names in SETS.split(", ")))


def summed(degrees: Any, format: str, without: str | None) -> torch.Tensor:
    """The sum over all units, with nothing left of what a person owns."""
    rows = [row | {"text": ""} if without in row["who"] else row for row in ROWS]
    built = build.build(degrees, args=build.llama(vocab_size=258), max_grad_norm=C)
    with tempfile.TemporaryDirectory() as place:
        root = WRITERS[format](Path(place) / "rows", rows)
        store = prepared(source(root, format, unit_field=["who"]), str(Path(place) / "store"))
        loader = RecordLoader(
            Samples(store, build.T),
            np.arange(len(store.units)),
            ranks=degrees[0] * degrees[1],
            rank=torch.distributed.get_rank() // degrees[2],
            batch_size=built.batch_size,
        )
        trainer: Any = type("Trainer", (), {})()
        trainer.device, trainer.gradients = torch.device("cpu"), built.gradients
        trainer.sample_losses = built.losses
        for microbatch in dealt(loader, Draw(np.arange(len(store.units)), bytes(32))):
            DPTrainer.accumulate(trainer, microbatch, SampleStatistics())
    whole = built.total()
    return torch.cat([whole[name].flatten() for name in sorted(whole)])


def moves(degrees: Any, format: str) -> list[float]:
    people = sorted({name for row in ROWS for name in row["who"]})
    every = summed(degrees, format, None)
    return [float((every - summed(degrees, format, one)).norm()) for one in people]


def with_the_fault() -> list[float]:
    with mock.patch.object(Owners, "units", lambda _, hashes_R2: group(hashes_R2)):
        return moves((1, 1, 1), "jsonl")


@pytest.mark.parametrize(
    "degrees, format",
    [((1, 1, 1), "jsonl"), ((1, 1, 1), "parquet"), ((1, 1, 2), "jsonl"), ((1, 2, 1), "parquet")],
)
def test_row83_no_person_moves_the_sum_by_more_than_C(degrees: Any, format: str) -> None:
    for moved in on_ranks(math.prod(degrees), moves, degrees, format):
        assert max(moved) <= C * (1 + 1e-5)
        assert max(moved) > 0.99 * C  # some are clipped: two of a person's would be more


def test_row83_a_person_in_two_units_moves_the_sum_by_more() -> None:
    """The figures above would show it."""
    (moved,) = on_ranks(1, with_the_fault)
    assert max(moved) > 1.5 * C
