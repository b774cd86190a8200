"""Texts, prompts and chats: which ids are targets, what of long records is cut, and reasons."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chats import END, MARKED, PLAIN, START, chat, folder
from tests.data.drawn import BOS, EOS, IGNORED, T, dealt, loader, sample
from tests.data.stores import WRITERS, store_of, stored
from torchtitan_dp.data.batching import Draw
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.data.files import MOST_ITEMS
from torchtitan_dp.data.reading import REFUSED, reading
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer

PROMPTS: dict[str, Any] = {"prompt_field": "prompt"}
MESSAGES: dict[str, Any] = {"messages_field": "messages"}


def answers(root: Path, rows: list[Any], seq_len: int = T, **how: Any) -> Samples:
    one_record = how.pop("one_record", False)
    store = store_of(rows, root, **how)
    return Samples(store, seq_len, has_answers=True, one_record=one_record, pad_id=EOS)


def targets(samples: Samples, unit: int) -> bytes:
    """Read the bytes that are targets; marks are left out."""
    _, labels_T = sample(samples, unit)
    return bytes(label for label in labels_T.tolist() if 0 <= label < 256)


def test_row06_only_the_answer_and_its_end_are_targets(tmp_path: Path) -> None:
    samples = answers(tmp_path, [{"prompt": "ab", "text": "xyz"}], **PROMPTS)
    (one,) = stored(samples.store)
    assert one.ids == (~BOS, ~97, ~98, *b"xyz", EOS)
    assert one.first == 3
    tokens_T, labels_T = sample(samples, 0)
    assert tokens_T.tolist() == [BOS, *b"abxyz", EOS, *[EOS] * 9]
    assert labels_T.tolist() == [IGNORED, IGNORED, *b"xyz", EOS, *[IGNORED] * 10]
    assert samples.tokens(0) == 6


@pytest.mark.parametrize(("template", "end"), [(PLAIN, b"\n"), (MARKED, b"")])
def test_row06_only_assistants_turns_are_targets(tmp_path: Path, template: str, end: bytes) -> None:
    tokenizer = load_tokenizer(folder(tmp_path / "tokenizer"))
    rows = [{"messages": chat("What?", "That.", "Why?", "Because.", system="Be short.")}]
    samples = answers(tmp_path, rows, 200, tokenizer=tokenizer, template=template, **MESSAGES)
    assert targets(samples, 0) == b"That." + end + b"Because." + end
    tokens_T, labels_T = sample(samples, 0)
    counts = [int((labels_T == int(tokenizer.encode(mark)[0])).sum()) for mark in (START, END)]
    assert counts == [0, 2]
    assert (tokens_T == BOS).sum() == 1  # the template's
    text = tokenizer.decode(tokens_T.tolist())
    assert text.startswith("system\nBe short.\nuser\nWhat?\nassistant\nThat.")


class Picky(ByteTokenizer):
    """Has no tokens for texts with "!"."""

    identity = "picky"

    def encode(self, text: str) -> Any:
        return None if "!" in text else super().encode(text)


NO_TEXT = "data.text_field = 'text': have no text there"
NO_PROMPT = "data.prompt_field = 'prompt': have no text there"
NO_CHAT = (
    "data.messages_field = 'messages': have no list of messages, objects with role and content "
    "(or from and value) there"
)
NO_TURN = "data.messages_field = 'messages': have no turn of the role 'assistant'"
NO_OBJECT = "training.dataset_path: are no lines of 'jsonl'"
NO_TOKENS = f"{REFUSED.setting}: {REFUSED.what}"
ANSWER = {"role": "assistant", "content": "a"}
BAD: list[tuple[dict[str, str], Any, str]] = [
    ({}, {"text": ""}, "training.dataset_path: are empty"),
    ({}, {"note": "x"}, "data.text_field = 'text': have no such JSON field"),
    ({}, {"text": "\ud800"}, NO_TEXT),
    ({}, [], NO_OBJECT),
    ({}, b'{"text": "torn', NO_OBJECT),
    (PROMPTS, {"prompt": "p", "text": ""}, "training.dataset_path: are empty"),
    (PROMPTS, {"text": "a"}, "data.prompt_field = 'prompt': have no such JSON field"),
    (PROMPTS, {"prompt": 7, "text": "a"}, NO_PROMPT),
    (PROMPTS, {"prompt": "p", "text": ["a"]}, NO_TEXT),
    (MESSAGES, {"messages": None}, NO_CHAT),
    (MESSAGES, {"messages": [1, 2]}, NO_CHAT),
    (MESSAGES, {"messages": [{"role": "user"}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": [{"from": "human"}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": [{"role": "user", "value": "What?"}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": [{"role": "user", "content": ["a"] * MOST_ITEMS}, ANSWER]}, NO_CHAT),
    (MESSAGES, {"messages": []}, NO_TURN),
    (MESSAGES, {"messages": chat("only a prompt")}, NO_TURN),
    (MESSAGES, {"messages": chat("q")[:1] * MOST_ITEMS + chat("q", "too late")}, NO_TURN),
    (MESSAGES, {"messages": chat("What?", " \n")}, NO_TURN.replace("no turn", "only empty turns")),
    (MESSAGES, {"messages": [{"role": "judge", "content": "a"}, ANSWER]}, NO_TOKENS),
    ({}, {"text": "!"}, NO_TOKENS),
    (PROMPTS, {"prompt": "!", "text": "a"}, NO_TOKENS),
    (MESSAGES, {"messages": chat("!", "a")}, NO_TOKENS),
]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_chats_of_other_spellings_are_the_same(tmp_path: Path, format: str) -> None:
    """ShareGPT's names, and contents in parts, as a list or not."""
    plain = [("user", "What is it?"), ("assistant", "That."), ("judge", "No.")]
    spelled = {"user": "human", "assistant": "gpt"}
    forms = [
        [{"role": role, "content": text} for role, text in plain],
        [{"from": spelled.get(role, role), "value": text} for role, text in plain],
        [
            {"role": r, "content": [{"type": "text", "text": part} for part in (t[:2], t[2:])]}
            for r, t in plain
        ],
    ]
    found = []
    for i, form in enumerate(forms):
        root = WRITERS[format](tmp_path / f"{i}", [{"messages": form}])
        store = store_of(root, tmp_path, format, **MESSAGES)
        found.append(stored(store)[0].ids)
    assert found[0] == found[1] == found[2] != ()


@pytest.mark.parametrize("how, row, reason", BAD)
def test_row22_and_42_a_record_without_an_answer_contributes_nothing_and_stays(
    tmp_path: Path, how: dict[str, str], row: Any, reason: str
) -> None:
    good = {"text": "a", "prompt": "p", "messages": chat("What?", "That.")}
    samples = answers(tmp_path, [good, row, good], 64, tokenizer=Picky(), **how)
    first, bad, last = stored(samples.store)
    assert (bad.ids, bad.reason) == ((), reason)
    assert first.ids == last.ids != ()
    drawn = dealt(loader(samples), Draw(np.arange(3)))
    assert [bool(microbatch.valid_B) for microbatch in drawn] == [True] * 3
    learned = [bool((microbatch.labels_BT != IGNORED).any()) for microbatch in drawn]
    assert learned == [True, False, True]


LONG = "abcdefgh" * 40


def test_row69_the_first_id_of_a_sample_is_no_answer(tmp_path: Path) -> None:
    """Nothing predicts it: what a sample shows is a later target, or nothing is learned."""
    bare = "{% generation %}{{ m.content }}{% endgeneration %}"
    bare = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}" + bare
    one, *other = chat("", "a", LONG, "b")[1:]
    rows = [{"who": "ann", "messages": [one, *other]}, {"who": "bob", "messages": [one]}]
    rows += [{"who": "bob", "messages": other}, {"who": "cyd", "messages": [one]}]
    template = bare + "{% endif %}{% endfor %}"
    samples = answers(tmp_path, rows, unit_field="who", template=template, **MESSAGES)
    learned = samples.has_target(np.arange(3)).tolist()
    assert [bool((sample(samples, unit)[1] != IGNORED).any()) for unit in range(3)] == learned
    firsts = samples.units.members[samples.units.starts[:3]].tolist()
    assert dict(zip(firsts, learned, strict=True)) == {0: True, 1: False, 3: False}


def test_chats_need_a_template(tmp_path: Path) -> None:
    bare = folder(tmp_path / "bare", None)
    for path, tokenizer in (("", ByteTokenizer()), (bare, load_tokenizer(bare))):
        with pytest.raises(ValueError, match=r"^data\.messages_field = 'm': .* no chat template"):
            reading("text", None, "m", path, tokenizer)
    kept = folder(tmp_path / "bytes")
    (tmp_path / "bytes/tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor config\.json: name a model"):
        load_tokenizer(kept)
    (tmp_path / "bytes/config.json").write_text("{}")
    with pytest.raises(ValueError, match="no chat template"):
        reading("text", None, "m", kept, load_tokenizer(kept))


def test_a_tokenizer_that_reads_a_turn_otherwise_alone_is_refused(tmp_path: Path) -> None:
    class Prefixed(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return super().encode(" " + text)

    path = folder(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="other tokens for a chat than for its turns"):
        reading("text", None, "m", path, Prefixed())
