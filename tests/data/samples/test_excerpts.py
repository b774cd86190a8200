"""What a unit's sample is made of: all its records, one of them, a window; no more is read."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan_dp.data.samples.excerpts import Excerpts
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore

from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.formats import open_store
from torchtitan_dp.data.samples import excerpts
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.data.units import open_units
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import choices

BOS, EOS, IGNORED = 256, 257, IGNORE_INDEX
T = 16
CPU = torch.device("cpu")
LADDER = (2, 4, 8, 16)


class Words(ByteTokenizer):
    """A word is a token, its number of letters; no marks. "\\n\\n" is 0."""

    bos_id = eos_id = None  # type: ignore
    bytes_per_token = 8

    def encode(self, text: str) -> np.ndarray:
        pause = [0] if text == "\n\n" else []
        return np.array(pause + [len(word) for word in text.split()], dtype=np.int64)


def samples(root: Path, units: dict[str, list[str | None]], seq_len: int = T, **how: Any):
    """A store of these units' texts, interleaved in one file; units are in the order given."""
    root.mkdir(exist_ok=True)
    rows = sorted((i, name, text) for name, texts in units.items() for i, text in enumerate(texts))
    lines = [json.dumps({"who": name, "text": text}) for _, name, text in rows]
    (root / "a.jsonl").write_text("\n".join(lines))
    folder = str(root / "index")
    tokenizer = how.pop("tokenizer", ByteTokenizer())
    store = open_store("jsonl", str(root), unit_field="who", index_folder=folder)
    grouped = open_units(store, "who", index_folder=folder)
    return SampleStore(store, tokenizer, seq_len, grouped, **how), [
        next(u for u in range(len(grouped)) if rows[int(grouped.records(u)[0])][1] == name)
        for name in units
    ]


def rng(seed: int = 0) -> np.random.Generator:
    return choices(bytes(32), seed)


def ids(sample: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """The ids that a sample shows."""
    tokens_T, labels_T = sample
    count = int((labels_T != IGNORED).sum())
    assert (labels_T[count:] == IGNORED).all()
    assert tokens_T[1:count].tolist() == labels_T[: max(count - 1, 0)].tolist()
    return [*tokens_T[:1].tolist(), *labels_T[:count].tolist()] if count else []


def marked(*texts: str) -> list[int]:
    return [one for text in texts for one in (BOS, *text.encode(), EOS)]


def test_concat_takes_all_records_in_order_and_leaves_out_empty_ones(tmp_path: Path) -> None:
    store, (ann, bob) = samples(tmp_path, {"ann": ["a1", "", None, "a2"], "bob": ["b" * 9, "c"]})
    assert ids(store.sample(ann)) == marked("a1", "a2")
    assert ids(store.sample(bob)) == marked("b" * 9, "c")
    assert store.undecodable == 1
    assert [store.tokens(unit) for unit in (ann, bob)] == [7, 13]


@pytest.mark.parametrize("seq_len", range(1, 14))
def test_concat_is_cut_at_t(tmp_path: Path, seq_len: int) -> None:
    store, (ann,) = samples(tmp_path, {"ann": ["abc", "de", "fgh"]}, seq_len)
    whole = marked("abc", "de", "fgh")
    assert ids(store.sample(ann)) == whole[: seq_len + 1]
    assert store.tokens(ann) == min(len(whole) - 1, seq_len)


def test_without_marks_a_blank_line_parts_records(tmp_path: Path) -> None:
    store, (ann,) = samples(tmp_path, {"ann": ["w ww", "www"]}, tokenizer=Words())
    assert ids(store.sample(ann)) == [1, 2, 0, 3]


def test_unit_of_bad_records_contributes_nothing(tmp_path: Path) -> None:
    units: dict[str, list[str | None]] = {"ann": [None, "", None], "bob": ["b"]}
    for how in ("concat", "random"):
        store, (ann, _) = samples(tmp_path, units, unit_sampling=how, long_records="window")
        for seed in range(5):
            assert ids(store.sample(ann, rng=rng(seed))) == []


class NoMarks(ByteTokenizer):
    bos_id = eos_id = None  # type: ignore


class Picky(ByteTokenizer):
    """Has no tokens for texts with "!"."""

    def encode(self, text: str) -> Any:
        return None if "!" in text else super().encode(text)


class PickyWithoutMarks(NoMarks):
    """Has none for the blank line between records either."""

    def encode(self, text: str) -> Any:
        return None if "\n" in text or "!" in text else super().encode(text)


@pytest.mark.parametrize("tokenizer", [Picky(), PickyWithoutMarks()], ids=["marks", "none"])
@pytest.mark.parametrize("unit_sampling", ["concat", "random"])
@pytest.mark.parametrize("long_records", ["head", "window"])
def test_row22_records_that_the_tokenizer_has_no_tokens_for_are_left_out(
    tmp_path: Path, tokenizer: Any, unit_sampling: Any, long_records: Any
) -> None:
    long = "ab" * 20 + "!" + "cd" * 20
    units: dict[str, list[str | None]] = {
        "good": ["ef", "gh"],
        "bad": ["!"],
        "mixed": ["!" * 40, "ef", "!", "gh"],
        "long": [long, long],
    }
    how = {"unit_sampling": unit_sampling, "long_records": long_records, "tokenizer": tokenizer}
    store, (good, bad, mixed, far) = samples(tmp_path, units, **how)
    wanted = {tuple(ids(store.sample(good, rng=rng(seed)))) for seed in range(20)}
    assert store.undecodable == 0
    for seed in range(20):
        assert ids(store.sample(bad, rng=rng(seed))) == []
        assert store.undecodable == seed + 1  # counted
        assert store.tokens(int(store.chosen(bad, rng(seed), 1)[0])) == 0
    for seed in range(20):
        allowed = wanted | {()} if unit_sampling == "random" else wanted
        assert tuple(ids(store.sample(mixed, rng=rng(seed)))) in allowed
        shown = ids(store.sample(far, rng=rng(seed)))
        assert len(shown) == T + 1
        assert ord("!") not in shown


@pytest.mark.parametrize("how", ["head", "window"])
@pytest.mark.parametrize("text", ["x" * 10, ""])
def test_many_records_are_not_all_read(tmp_path: Path, how: Any, text: str) -> None:
    """Not even if all are empty."""
    store, (ann,) = samples(tmp_path, {"ann": [text] * 3000}, long_records=how)
    read = []
    real = store.records.read
    store.records.read = lambda index, **k: read.append(index) or real(index, **k)  # type: ignore
    store.tokens(ann)
    store.sample(ann, rng=rng())
    assert len(read) <= 4 * (T + 2)


@pytest.mark.parametrize("seed", range(4))
def test_huge_text_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.write(b"abc")
        file.truncate(1 << 40)  # sparse: reading it whole could not end well
    unread = "torchtitan_dp.data.records.text.text_contents"
    monkeypatch.setattr(unread, lambda *_: ("", np.empty(0, np.int64)))
    folder = str(tmp_path / "index")
    store = open_store("text", str(path), index_folder=folder)
    head = Excerpts(store, ByteTokenizer(), 5).head(np.array([0])).ids
    assert head.tolist() == [BOS, 97, 98, 99, 0]
    window = SampleStore(store, Words(), T, long_records="window").sample(0, rng=rng(seed))
    assert ids(window) == []  # one huge word
    store = SampleStore(store, ByteTokenizer(), T, long_records="window")
    assert ids(store.sample(0, rng=rng(seed))) == [0] * (T + 1)


def test_random_takes_each_record_equally_often_whole_and_alone(tmp_path: Path) -> None:
    texts = ["a", "bb", "", "dddd"]
    store, (ann, bob) = samples(tmp_path, {"ann": texts, "bob": ["b"]}, unit_sampling="random")
    taken = Counter(tuple(ids(store.sample(ann, rng=rng(seed)))) for seed in range(800))
    assert set(taken) == {tuple(marked(text)) if text else () for text in texts}
    assert all(abs(count - 200) < 5 * np.sqrt(150) for count in taken.values())
    assert ids(store.sample(bob, rng=rng(3))) == marked("b")


WINDOWED: dict[str, list[str | None]] = {
    "one record": ["".join(map(chr, range(33, 113)))],
    "records": ["".join(chr(33 + 8 * i + j) for j in range(8)) for i in range(10)],
    "uneven": ["!", "".join(map(chr, range(34, 104))), "", None, "xyz", "{|}"],
    "not ASCII": ["".join(chr(0x100 + i) for i in range(60))],
    "just too long": ["0123456789abcde", "!"],
}


@pytest.mark.parametrize("name", WINDOWED)
def test_window_is_a_part_and_every_part_comes(tmp_path: Path, name: str) -> None:
    store, (ann,) = samples(tmp_path, {"ann": WINDOWED[name]}, long_records="window")
    whole = marked(*[text for text in WINDOWED[name] if text])
    starts = Counter()
    for seed in range(600):
        window = ids(store.sample(ann, rng=rng(seed)))
        assert len(window) == T + 1 == store.tokens(ann) + 1
        starts[next(i for i in range(len(whole)) if whole[i : i + T + 1] == window)] += 1
    last = len(whole) - (T + 1)
    assert {0, last} <= set(starts)
    covered = np.zeros(len(whole))
    for start, count in starts.items():
        covered[start : start + T + 1] += count
    assert covered.min() > 0.2 * covered.mean()


def test_window_of_words(tmp_path: Path) -> None:
    """A tokenizer that merges: where a cut splits a word, a shorter one begins the window."""
    words = [1 + i % 12 for i in range(3000)]
    text = " ".join("w" * n for n in words)
    store, (ann,) = samples(
        tmp_path, {"ann": [text]}, 100, tokenizer=Words(), long_records="window"
    )
    spelt = ",".join(map(str, words))
    seen = set()
    for seed in range(40):
        window = ids(store.sample(ann, rng=rng(seed)))
        assert len(window) == 101
        assert "," + ",".join(map(str, window[1:])) in spelt
        seen.add(tuple(window))
    assert len(seen) > 10


def test_short_units_are_whole(tmp_path: Path) -> None:
    store, (ann, bob) = samples(
        tmp_path, {"ann": ["0123456789abc", "!"], "bob": []} | {"bob": ["b"]}, 17
    )
    windowed = SampleStore(store.records, store.tokenizer, 17, store.units, long_records="window")
    for unit in (ann, bob):
        for seed in range(20):
            assert ids(windowed.sample(unit, rng=rng(seed))) == ids(store.sample(unit))


def test_undecodable_parts_give_way_to_others_of_the_same_length(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_bytes(b"a" * 100 + b"\xff" * 30 + b"b" * 100)
    store = open_store("text", str(tmp_path / "d"), index_folder=str(tmp_path / "index"))
    windows = SampleStore(store, ByteTokenizer(), T, long_records="window")
    shown = {tuple(ids(windows.sample(0, rng=rng(seed)))) for seed in range(100)}
    assert all(len(window) == T + 1 for window in shown)
    assert {97, 98} <= {token for window in shown for token in window}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer, NoMarks, Words])
def test_windows_have_as_many_tokens_as_counted_wherever_text_turns_bad(
    tmp_path: Path, tokenizer: Any
) -> None:
    """What is looked at for the one must be what is looked at for the other."""
    (tmp_path / "d").mkdir()
    text = "a " * 300 if tokenizer is Words else "a" * 600
    for good in range(10, 50):
        (tmp_path / f"d/{good}").write_bytes(text[:good].encode() + b"\xff" * 700)
    records = open_store("text", str(tmp_path / "d"), index_folder=str(tmp_path / "index"))
    for seq_len in range(2, 40, 3):
        store = SampleStore(records, tokenizer(), seq_len, long_records="window")
        for unit in range(len(records)):
            shown = ids(store.sample(unit, rng=rng(unit)))
            assert max(len(shown) - 1, 0) == store.tokens(unit)


@pytest.mark.parametrize("empty", range(T - 2, T + 3))
def test_windows_have_as_many_tokens_as_counted_behind_empty_records(
    tmp_path: Path, empty: int
) -> None:
    texts: list[str | None] = ["", *[None] * (empty - 1), "abc"]
    store, (ann,) = samples(tmp_path, {"ann": texts}, long_records="window")
    for seed in range(3):
        assert max(len(ids(store.sample(ann, rng=rng(seed)))) - 1, 0) == store.tokens(ann)


# As the loader draws them

UNITS: dict[str, list[str | None]] = {
    f"user {u}": [chr(48 + u) * (1 + (7 * u + 3 * i) % 25) for i in range(1 + u % 5)]
    for u in range(20)
}
HOW = [("concat", "window"), ("random", "head"), ("random", "window")]


def processed(loaders: list[RecordLoader], draw: np.ndarray, key: bytes, ladder: Any) -> Any:
    """Every sample of a draw: length and ids, sorted."""
    found = []
    for loader in loaders:
        lengths = loader.lengths(draw, ladder, CPU, key)
        for tokens_BT, labels_BT, valid_B, _ in loader.microbatches(draw, lengths, key):
            for sample in zip(tokens_BT[valid_B], labels_BT[valid_B], strict=True):
                found.append((len(sample[0]), ids(sample)))
    return sorted(found)


@pytest.mark.parametrize("unit_sampling, long_records", HOW)
def test_choices_are_the_same_on_every_mesh(
    tmp_path: Path, unit_sampling: Any, long_records: Any
) -> None:
    """Also on the ranks of one context-parallel group; and whoever else is drawn."""
    store, _ = samples(tmp_path, UNITS, unit_sampling=unit_sampling, long_records=long_records)
    units = np.arange(len(UNITS))[::-1].copy()
    keys = RootKey.from_debug_seed(0).stream("window")

    def loaders(ranks: int, batch_size: int = 2) -> list[RecordLoader]:
        return [
            RecordLoader(store, units, ranks=ranks, rank=rank, batch_size=batch_size)
            for rank in range(ranks)
        ]

    every = np.arange(len(units))
    shown = []
    for step in range(5):
        key = keys.take(step)
        expected = processed(loaders(1), every, key, LADDER)
        assert [length for length, _ in expected] == [
            min(rung for rung in LADDER if rung >= len(one) - 1) for _, one in expected
        ]
        for ranks, batch_size in ((1, 1), (2, 1), (3, 2)):
            assert processed(loaders(ranks, batch_size), every, key, LADDER) == expected
        alone = [processed(loaders(1), np.array([p]), key, LADDER)[0] for p in every]
        assert sorted(alone) == expected
        shown.append(expected)
        padded = processed(loaders(2), every, key, (T,))
        assert sorted(one for _, one in padded) == sorted(one for _, one in expected)
    assert len({str(one) for one in shown}) == 5  # other ones at each step


def test_another_units_records_change_no_choice(tmp_path: Path) -> None:
    store, names = samples(tmp_path / "a", UNITS, unit_sampling="random", long_records="window")
    changed = UNITS | {"user 3": ["other"] * 50}
    other, _ = samples(tmp_path / "b", changed, unit_sampling="random", long_records="window")
    for position, unit in enumerate(names):
        same = ids(store.sample(unit, rng=rng(position))) == ids(
            other.sample(unit, rng=rng(position))
        )
        assert same == (position != 3)


def test_evaluation_takes_the_same_each_time(tmp_path: Path) -> None:
    store, _ = samples(tmp_path, UNITS, unit_sampling="random", long_records="window")
    loader = RecordLoader(store, np.arange(len(UNITS)), ranks=1, rank=0, batch_size=1)
    once, again = (list(loader.microbatches(np.arange(20))) for _ in range(2))
    for one, two in zip(once, again, strict=True):
        assert torch.equal(one.labels_BT, two.labels_BT)


def test_baseline_without_privacy_chooses_too_and_alike_on_cp_ranks(tmp_path: Path) -> None:
    store, _ = samples(tmp_path, UNITS, unit_sampling="random", long_records="window")
    first, second = (
        iter(RecordLoader(store, np.arange(20), ranks=1, rank=0, batch_size=4, shuffle_seed=5))
        for _ in range(2)
    )
    for _ in range(12):
        assert torch.equal(next(first)[1], next(second)[1])


# How much is read and tokenized (row 47)


class Counted(Words):
    """Blanks make a token each 1,000; remembers how much text it was given."""

    def __init__(self) -> None:
        self.bytes = 0

    def encode(self, text: str) -> np.ndarray:
        self.bytes += len(text.encode())
        return np.zeros(len(text) // 1000, dtype=np.int64)


SLOW: dict[str, list[str | None]] = {
    "one text": [" " * 3_000_000],
    "many texts": [" " * 100_000] * 40,
    "short texts": [" " * 900] * 3000,
    "no text": [""] * 5000,
    "bad texts": [None] * 5000,
}


@pytest.mark.parametrize("seq_len", [16, 8000])
@pytest.mark.parametrize("name", SLOW)
def test_row47_a_sample_is_tokenized_from_bounded_text(
    tmp_path: Path, name: str, seq_len: int
) -> None:
    """Over all records of a unit and over what is read again; `tokens` and `sample` each."""
    store, (ann,) = samples(
        tmp_path, {"ann": SLOW[name]}, seq_len, tokenizer=(counted := Counted())
    )
    bound = excerpts.most_bytes(seq_len + 1)
    assert bound == max(2**17, 24 * (seq_len + 65))
    read = []
    real = store.records.read
    store.records.read = lambda index, **k: read.append(index) or real(index, **k)  # type: ignore
    for look in (lambda: store.tokens(ann), lambda: store.sample(ann)):
        counted.bytes = 0
        read.clear()
        look()
        assert counted.bytes <= bound
        assert len(read) <= bound / 64 + 1
    windows = SampleStore(store.records, counted, seq_len, store.units, long_records="window")
    for seed in range(5):
        counted.bytes = 0
        windows.sample(ann, rng=rng(seed))
        assert counted.bytes <= 3 * bound  # three looks: the head, from a place on, the end


def test_row47_lines_that_are_parsed_for_nothing_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JSON line is parsed whole, whatever part of it is text."""
    monkeypatch.setattr(excerpts, "PARSED_BYTES", 3)
    line = json.dumps({"who": "ann", "text": "", "scan": "x" * 100_000})
    (tmp_path / "a.jsonl").write_text("\n".join([line] * 30))
    folder = str(tmp_path / "index")
    records = open_store("jsonl", str(tmp_path), unit_field="who", index_folder=folder)
    units = open_units(records, "who", index_folder=folder)
    read = []
    real = records.read
    records.read = lambda index, **k: read.append(index) or real(index, **k)  # type: ignore
    assert SampleStore(records, ByteTokenizer(), T, units).tokens(0) == 0
    assert len(read) == 4  # 3 x 2**17 bytes, the least that a look may cost
