"""Samples of records with prompts or chats: only answers are targets, and nothing stops a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan_dp.data.samples.excerpts import most_bytes
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore, TokenCache

from tests.data.chats import END, MARKED, PLAIN, START, chat, folder
from tests.data.samples.test_excerpts import rng
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.chat_template import MOST_MESSAGES
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.reading import Answers, Marked, Prompts, Reading, cut, reading
from torchtitan_dp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

BOS, EOS, IGNORED = 256, 257, IGNORE_INDEX
T = 16
PROMPTS = Prompts("prompt", "text")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(root: Path, rows: list[Any], **how: Any) -> Records:
    (root / "d").mkdir(exist_ok=True)
    (root / "d/a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return Records.open("jsonl", str(root / "d"), **how)


def prompted(root: Path, rows: list[Any], seq_len: int = T, **how: Any) -> SampleStore:
    records = opened(root, rows, prompt_field="prompt", unit_field=how.pop("unit_field", None))
    return SampleStore(
        records.store, ByteTokenizer(), seq_len, records.units, reading=PROMPTS, **how
    )


def chats(root: Path, template: str = PLAIN) -> tuple[Tokenizer, Reading]:
    path = folder(root / "tokenizer", template)
    tokenizer = load_tokenizer(path)
    how = reading("text", None, "messages", path, tokenizer)
    assert how is not None
    return tokenizer, how


def talked(root: Path, rows: list[Any], seq_len: int, template: str = PLAIN) -> SampleStore:
    tokenizer, how = chats(root, template)
    records = opened(root, rows, messages_field="messages")
    return SampleStore(records.store, tokenizer, seq_len, records.units, reading=how)


def shown(store: SampleStore, unit: int, *more: Any) -> tuple[list[int], list[int]]:
    """The ids that are read, and the targets by their places among them."""
    tokens_T, labels_T = (x.tolist() for x in store.sample(unit, *more))
    found = [place + 1 for place, label in enumerate(labels_T) if label != IGNORED]
    for place in found[:-1]:  # what comes behind the last one is not read
        assert labels_T[place - 1] == tokens_T[place]
    return tokens_T, found


def targets(store: SampleStore, unit: int) -> bytes:
    """The bytes that are targets; marks are left out."""
    _, labels_T = store.sample(unit)
    return bytes(label for label in labels_T.tolist() if 0 <= label < 256)


def test_row06_only_the_answer_and_its_end_are_targets(tmp_path: Path) -> None:
    store = prompted(tmp_path, [{"prompt": "ab", "text": "xyz"}])
    tokens_T, labels_T = store.sample(0)
    assert tokens_T.tolist() == [BOS, *b"abxyz", EOS, *[EOS] * 9]
    assert labels_T.tolist() == [IGNORED, IGNORED, *b"xyz", EOS, *[IGNORED] * 10]
    assert store.tokens(0) == 6


MALFORMED = [
    {"prompt": "p", "text": ""},
    {"prompt": "p"},
    {"text": "an answer to nothing"},
    {"prompt": 7, "text": "a"},
    {"prompt": "p", "text": ["a"]},
    {"prompt": "p", "text": "\ud800"},
    {"prompt": None, "text": None},
    [],
    "no object",
]


@pytest.mark.parametrize("place", range(len(MALFORMED)))
def test_row42_a_record_without_an_answer_contributes_nothing_and_stays(
    tmp_path: Path, place: int
) -> None:
    row = MALFORMED[place]
    rows = [{"prompt": "p", "text": "a"}, row, {"prompt": "q", "text": "b"}]
    store = prompted(tmp_path, rows)
    assert len(store.units) == 3
    assert shown(store, 1)[1] == []
    assert store.undecodable == (place != 0)
    assert [targets(store, unit) for unit in range(3)] == [b"a", b"", b"b"]
    loader = RecordLoader(store, np.arange(3), ranks=1, rank=0, batch_size=1)
    drawn = list(loader.microbatches(np.array([0, 1, 2])))
    assert [bool(microbatch.valid_B) for microbatch in drawn] == [True] * 3


def test_a_prompt_may_be_empty(tmp_path: Path) -> None:
    assert shown(prompted(tmp_path, [{"prompt": "", "text": "xy"}]), 0)[1] == [1, 2, 3]


def by_hand(prompt: str, answer: str, limit: int) -> tuple[list[int], list[int]]:
    """The window that the documents promise, from all ids: read ids, and which are targets."""
    ids = [BOS, *prompt.encode(), *answer.encode(), EOS]
    first = 1 + len(prompt)
    start = 0
    while len(ids) - start > limit and first - start > max(limit // 4, 1):
        start += 1
    window = ids[start : start + limit]
    wanted = [place for place in range(1, len(window)) if start + place >= first]
    return window[: limit - 1], wanted


@pytest.mark.parametrize("seq_len", [2, 3, 8, 16, 40])
def test_a_long_prompt_loses_its_beginning_and_targets_are_seen(
    tmp_path: Path, seq_len: int
) -> None:
    shapes = [(p, a) for p in (0, 1, 3, 7, 12, 30, 100) for a in (1, 2, 5, 13, 50)]
    texts = [
        ("".join(chr(97 + i % 26) for i in range(p)), "".join(chr(65 + i % 26) for i in range(a)))
        for p, a in shapes
    ]
    store = prompted(tmp_path, [{"prompt": p, "text": a} for p, a in texts], seq_len)
    for unit, (prompt, answer) in enumerate(texts):
        read, wanted = by_hand(prompt, answer, seq_len + 1)
        tokens, found = shown(store, unit)
        assert found == wanted != []
        assert tokens[: len(read)][:-1] == read[:-1]
        assert store.tokens(unit) == min(len(prompt) + len(answer) + 1, seq_len)


def test_texts_far_longer_than_a_sample_are_read_in_part(tmp_path: Path) -> None:
    """Alike, whatever lies beyond: only what is next to the answer's beginning is tokenized."""

    class Counted(ByteTokenizer):
        most = 0

        def encode(self, text: str) -> np.ndarray:
            self.most = max(self.most, len(text))
            return super().encode(text)

    rows = [{"prompt": "p" * 10**6 + "Q:", "text": "A" * n} for n in (3, 10**6)]
    records, tokenizer = opened(tmp_path, rows), Counted()
    store = SampleStore(records.store, tokenizer, T, reading=PROMPTS)
    for unit, count in ((0, 4), (1, 13)):
        tokens, found = shown(store, unit)
        assert len(found) == count
        assert tokens[found[0] - 2 : found[0]] == list(b"Q:")
    assert tokenizer.most <= most_bytes(T + 1)


def test_a_units_records_come_one_after_the_other(tmp_path: Path) -> None:
    rows = [
        {"who": "ann", "prompt": "p", "text": "xy"},
        {"who": "bob", "prompt": "q" * 40, "text": "z"},
        {"who": "ann", "prompt": "no answer", "text": ""},
        {"who": "ann", "prompt": 3, "text": "malformed"},
        {"who": "ann", "prompt": "r", "text": "w"},
    ]
    store = prompted(tmp_path, rows, unit_field="who")
    ann = int(len(store.units.records(0)) == 1)
    tokens, found = shown(store, ann)
    assert tokens[:9] == [BOS, *b"pxy", EOS, BOS, *b"rw", EOS]
    assert found == [2, 3, 4, 7, 8]
    assert targets(store, 1 - ann) == b"z"
    one = prompted(tmp_path, rows, unit_field="who", unit_sampling="random")
    seen = {tuple(shown(one, ann, None, rng(seed))[1]) for seed in range(40)}
    assert seen == {(2, 3, 4), (), (2, 3)}


class NoMarks(ByteTokenizer):
    bos_id = eos_id = None  # type: ignore[assignment]


def test_without_marks_a_blank_line_parts_records_and_is_no_target(tmp_path: Path) -> None:
    rows = [{"who": "ann", "prompt": "p", "text": text} for text in ("x", "y")]
    records = opened(tmp_path, rows, prompt_field="prompt", unit_field="who")
    store = SampleStore(records.store, NoMarks(), T, records.units, reading=PROMPTS)
    assert shown(store, 0)[1] == [1, 5]
    assert store.sample(0)[0][:6].tolist() == [*b"px\n\np", 0]


# Chats.


def test_row06_only_the_assistants_turns_are_targets(tmp_path: Path) -> None:
    rows = [{"messages": chat("What?", "That.", "Why?", "Because.", system="Be short.")}]
    for template, end in ((PLAIN, b"\n"), (MARKED, b"")):
        store = talked(tmp_path, rows, 200, template)
        assert targets(store, 0) == b"That." + end + b"Because." + end
        end_id = store.tokenizer.encode(END)
        _, labels_T = store.sample(0)
        assert (labels_T == int(end_id[0])).sum() == 2  # type: ignore[index]
        tokens = store.sample(0)[0].tolist()
        assert tokens.count(BOS) == 1  # the template's
        text = store.tokenizer.decode(tokens)
        assert text.startswith("system\nBe short.\nuser\nWhat?\nassistant\nThat.")


BAD_CHATS = [
    [],
    chat("only a prompt"),
    chat("What?", ""),
    chat("What?", "  \n"),
    None,
    "What?",
    {"role": "user", "content": "What?"},
    [1, 2],
    [{"role": "user"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}],
    [{"role": 3, "content": "a"}, {"role": "assistant", "content": "a"}],
    [{"role": "judge", "content": "a"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": [{"type": "text"}]}, {"role": "assistant", "content": "a"}],
    chat(*["only questions"] * 2)[::2] * MOST_MESSAGES + chat("q", "too late"),
]


@pytest.mark.parametrize("place", range(len(BAD_CHATS)))
def test_row42_a_chat_without_an_answer_contributes_nothing_and_stays(
    tmp_path: Path, place: int
) -> None:
    good = {"messages": chat("What?", "That.")}
    store = talked(tmp_path, [good, {"messages": BAD_CHATS[place]}, good], 64)
    assert [targets(store, unit) for unit in range(3)] == [b"That.\n", b"", b"That.\n"]
    assert store.tokens(1) == 0


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("seq_len", [16, 64, 500])
def test_a_long_chat_is_what_its_whole_text_would_give(
    tmp_path: Path, template: str, seq_len: int
) -> None:
    """Whatever is cut off before it is tokenized."""
    long = "abcdefgh" * 3000
    shapes = [
        chat(long, "That."),
        chat("What?", long.upper()),
        chat(long, "That.", "Why?", "Because."),
        chat("a", "b", system=long),
        [{"role": "user", "content": "x"}] * 3 + chat(long, "That."),
    ]
    stopped = {"messages": chat("Who?", "I.", long, "That.")}
    rows = [*({"messages": turns} for turns in shapes), stopped]
    store = talked(tmp_path, rows, seq_len, template)
    assert targets(store, len(shapes)).strip() == b"I."  # before a question that is too long
    tokenizer, how = chats(tmp_path, template)
    for unit, turns in enumerate(shapes):
        dialog = how.read({"messages": turns}, 10**9, 10**9)
        assert dialog is not None
        assert dialog.begins
        assert dialog.ends
        parts = []
        for piece in dialog.pieces:
            found = tokenizer.encode(piece.text)
            assert found is not None
            parts.append(Marked.of(found, are_targets=piece.is_target))
        wanted = cut(Marked.join(parts), seq_len + 1)
        excerpt = store.excerpt(unit)
        assert excerpt.ids.tolist() == wanted.ids.tolist()
        assert excerpt.targets is not None
        assert excerpt.targets.tolist() == wanted.targets.tolist()
        assert excerpt.targets[1:].any()


# What is kept, counted, compared.


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_row48_kept_ids_keep_their_targets(tmp_path: Path, kind: str) -> None:
    if kind == "prompts":
        rows: list[Any] = [{"prompt": "p" * i, "text": "a" * (i % 7)} for i in range(30)]
        tokenizer, how, fields = ByteTokenizer(), PROMPTS, {"prompt_field": "prompt"}
    else:
        rows = [{"messages": chat("p" * i, "a" * (i % 7), "q", "b")} for i in range(30)]
        tokenizer, how = chats(tmp_path)  # type: ignore[assignment]
        fields = {"messages_field": "messages"}
    rows += MALFORMED
    records = opened(tmp_path, rows, **fields)

    def made(cache: TokenCache | None) -> SampleStore:
        return SampleStore(records.store, tokenizer, T, reading=how, cache=cache)

    plain, store = made(None), made(cache := TokenCache())
    for _ in range(2):
        for unit in range(len(rows)):
            for one, other in zip(plain.sample(unit), store.sample(unit), strict=True):
                assert torch.equal(one, other)
            assert plain.tokens(unit) == store.tokens(unit)
    assert cache.get(8) is not None  # it was found there


def test_other_fields_are_other_records(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "other": "o", "text": "a", "messages": chat("p", "a")}]
    opened(tmp_path, rows)
    named: list[dict[str, str]] = [
        {},
        {"prompt_field": "prompt"},
        {"prompt_field": "other"},
        {"messages_field": "messages"},
    ]
    found = {
        Records.open("jsonl", str(tmp_path / "d"), **fields).fingerprint  # type: ignore[arg-type]
        for fields in named
    }
    assert len(found) == 4


LATE = "{% if messages | length == 100 %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize("template", [PLAIN, LATE + PLAIN], ids=["accepted", "refused"])
def test_row47_looking_is_bounded(tmp_path: Path, template: str) -> None:
    """Of a unit of many small chats: what is rendered, parsed and tokenized, all together, also
    where the template refuses each at its end."""
    tokenizer, how = chats(tmp_path, template)
    rows = [{"who": "ann", "messages": chat(*["x"] * 100)} for _ in range(300)]
    records = opened(tmp_path, rows, messages_field="messages", unit_field="who")
    asked: list[int] = []

    class Spied:
        has_marks = True

        def read(self, fields: Any, most: int, most_cost: int) -> Any:
            found = how.read(fields, most, most_cost)
            assert found is not None
            if not asked:  # of the last one there is less to spend than to refuse it
                assert (found.pieces is None) == (template != PLAIN)
            asked.append(found.cost)
            return found._replace(pieces=found.pieces and found.pieces[-1:])  # few tokens a record

    Answers(records.store, tokenizer, 50_001, Spied()).head(  # type: ignore[arg-type]
        records.units.records(0)
    )
    assert 1 < len(asked) < 300
    assert sum(asked) < 64 * most_bytes(50_001) + max(asked)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt_field": "prompt"}, r"data\.prompt_field = 'prompt': text files have no fields"),
        ({"messages_field": "m"}, r"data\.messages_field = 'm': text files have no fields"),
    ],
)
def test_files_of_text_have_no_prompts(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Records.open("text", str(tmp_path), **fields)  # type: ignore[arg-type]


def test_chats_need_a_template(tmp_path: Path) -> None:
    bare = folder(tmp_path / "bare", None)
    for path, tokenizer in (("", ByteTokenizer()), (bare, load_tokenizer(bare))):
        with pytest.raises(ValueError, match=r"^data\.messages_field = 'm': .* no chat template"):
            reading("text", None, "m", path, tokenizer)
    kept = folder(tmp_path / "bytes")
    (tmp_path / "bytes/tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        reading("text", None, "m", kept, load_tokenizer(kept))


def test_a_tokenizer_that_reads_a_turn_otherwise_alone_is_refused(tmp_path: Path) -> None:
    class Prefixed(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return super().encode(" " + text)

    path = folder(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="other tokens for a chat than for its turns"):
        reading("text", None, "m", path, Prefixed())


def test_start_marks_are_single_tokens(tmp_path: Path) -> None:
    tokenizer, _ = chats(tmp_path)
    assert [len(tokenizer.encode(mark)) for mark in (START, END)] == [1, 1]  # type: ignore[arg-type]
