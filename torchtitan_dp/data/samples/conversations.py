"""Records that have answers: a prompt beside one (`data.prompt_field`), or a chat.

Only the text that the model shall learn to write is a target: the answer, or the assistant's turns.
All else is read and never predicted.

Guarantee:
    The pieces of a record are a function of that record alone. A malformed record (a field that is
    missing or of another type) is `None`; one that the template refuses, or without an answer, has
    no pieces: all contribute nothing and stop nothing. Ids and targets of a sample are a function
    of one unit's records alone. The text that is parsed, rendered and tokenized for them is bounded
    as `excerpts` bounds it, by `limit`.

A unit's ids are those of its records, one after the other. Those of a record with a prompt are
[bos] prompt answer [eos] (marks that exist); those of a chat are what its template writes, marks
included. Each piece is tokenized by itself, as a model that is asked finds the prompt's tokens
before it writes its own. Records without a target, malformed ones among them, are left out.

Of a record longer than a sample, the window of `limit` ids is taken that begins a quarter of a
window before the first target, or earlier if the record ends within it. So a long prompt is cut at
its beginning, an answer only where it has no room beside a quarter of prompt, and every record with
a target shows one. A window that begins within a prompt has no bos, one that ends within an answer
no eos. Of a unit's records that are together longer, the first `limit` ids are taken.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.records.store import RecordStore, text_of
from torchtitan_dp.data.samples.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    Piece,
    load_chat_template,
    messages_of,
)
from torchtitan_dp.data.samples.excerpts import (
    EDGE_TOKENS,
    TOKEN_BYTES,
    Budget,
    Excerpt,
)
from torchtitan_dp.data.samples.tokenizer import Tokenizer

PROMPT_SHARE = 4
"""A prompt that is cut keeps one part in so many of the window, or what the answer leaves."""

Fields = Mapping[str, object]
_NONE = np.empty(0, dtype=np.int64)


class Dialog(NamedTuple):
    """The text of a record, in pieces whose tokens are all targets, or none."""

    pieces: list[Piece] | None
    """None where the template refused the record."""
    begins: bool = True
    """Whether it begins where the record does; else it was cut."""
    ends: bool = True
    """Whether the last answer ends where the record's does; else it was cut."""
    cost: int = 0
    """What rendering it has cost (`chat_template.Written`)."""


@dataclass(frozen=True)
class Prompts:
    """Reads an answer, and the prompt before it. Nothing is put in between."""

    prompt_field: str
    answer_field: str

    has_marks = False
    """Whether texts have the marks of beginning and end already."""

    def read(self, fields: Fields, most: int, most_cost: int) -> Dialog | None:
        """Read a record.

        Args:
            fields: of the record.
            most: bytes of UTF-8 to read before the answer, and of it: the end of the prompt, and
                the beginning of the answer.
            most_cost: nothing is rendered here.
        """
        prompt, answer = (
            text_of(fields.get(name)) for name in (self.prompt_field, self.answer_field)
        )
        if prompt is None or answer is None:
            return None
        if not answer:
            return Dialog([])
        before, text = _last(prompt, most), _first(answer, most)
        pieces = [Piece(before, False)] if before else []
        return Dialog([*pieces, Piece(text, True)], before == prompt, text == answer)


@dataclass(frozen=True)
class Chats:
    """Reads a conversation, a list of `{"role": …, "content": …}`, by a chat template."""

    messages_field: str
    template: ChatTemplate

    has_marks = True

    def read(self, fields: Fields, most: int, most_cost: int) -> Dialog | None:
        """Read a record, up to the last of the assistant's turns that is looked at.

        Args:
            fields: of the record.
            most: bytes of UTF-8 to read of what comes before the assistant's first turn, and from
                that on: the end of the one, and the beginning of the other.
            most_cost: the most that rendering may cost (`ChatTemplate.write`).
        """
        messages = messages_of(fields.get(self.messages_field))
        if messages is None:
            return None
        answers = [i for i, message in enumerate(messages) if is_answer(message)]
        if not answers:
            return Dialog([])
        before, begins = _last_of(messages[: answers[0]], most)
        after, ends = _first_of(messages[answers[0] : answers[-1] + 1], most)
        written = self.template.write([*before, *after], most_cost)
        return Dialog(written.pieces, begins, ends, written.cost)


Reading = Prompts | Chats


def reading(
    text_field: str,
    prompt_field: str | None,
    messages_field: str | None,
    assets_path: str,
    tokenizer: Tokenizer,
) -> Reading | None:
    """Choose how records with answers are read; None where all of a record's text is a target.

    Args:
        text_field: of the answer, where `prompt_field` is given.
        assets_path: the folder that the tokenizer was loaded from; empty for bytes.

    Raises:
        ValueError: one line for the user; a tokenizer without a chat template, say.
    """
    if prompt_field is not None:
        return Prompts(prompt_field, text_field)
    if messages_field is None:
        return None
    # Bytes have no special tokens, which a template writes as text.
    has_tokens = os.path.isfile(os.path.join(assets_path, "tokenizer.json"))
    template = load_chat_template(assets_path) if assets_path and has_tokens else None
    if template is None:
        raise ValueError(
            f"data.messages_field = {messages_field!r}: the tokenizer of model.hf_assets_path = "
            f"{assets_path!r} has no chat template; use a tokenizer of a chat model, add "
            "chat_template.jinja to the folder, or write prompts and answers (data.prompt_field)"
        )
    parts = [tokenizer.encode(piece.text) for piece in template.trial if piece.text]
    whole = tokenizer.encode("".join(piece.text for piece in template.trial))
    known = [ids for ids in parts if ids is not None]
    if whole is None or len(known) < len(parts) or not np.array_equal(np.concatenate(known), whole):
        raise ValueError(
            f"data.messages_field = {messages_field!r}: the tokenizer of model.hf_assets_path = "
            f"{assets_path!r} has other tokens for a chat than for its turns one by one, so that "
            "the assistant's cannot be identified; use another, or prompts and "
            "answers (data.prompt_field)"
        )
    return Chats(messages_field, template)


def is_answer(message: Message) -> bool:
    """Return whether a turn is one that is learned."""
    return message.role == ASSISTANT and message.content.strip() != ""


def _first(text: str, most: int) -> str:
    """Take at most so many bytes of a text's beginning."""
    data = text.encode("utf-8")
    return text if len(data) <= most else data[:most].decode("utf-8", "ignore")


def _last(text: str, most: int) -> str:
    """Take at most so many bytes of a text's end."""
    data = text.encode("utf-8")
    return text if len(data) <= most else data[len(data) - most :].decode("utf-8", "ignore")


def _last_of(messages: Sequence[Message], most: int) -> tuple[list[Message], bool]:
    """Keep the end of all contents, and return whether that is all: earlier ones become empty."""
    kept: list[Message] = []
    for message in reversed(messages):
        content = _last(message.content, most)
        most -= len(content.encode("utf-8"))
        kept.append(message._replace(content=content))
    kept.reverse()
    return kept, kept == list(messages)


def _first_of(messages: Sequence[Message], most: int) -> tuple[list[Message], bool]:
    """Keep the beginning of a conversation whose first turn is an answer, up to the end of an
    answer or its cut, or before a question that is too long. Return whether no answer was cut.
    """
    kept: list[Message] = []
    for number, message in enumerate(messages):
        content = _first(message.content, most)
        if content != message.content:
            if message.role != ASSISTANT or not content.strip():
                break
            return [*messages[:number], message._replace(content=content)], False
        most -= len(content.encode("utf-8"))
        if is_answer(message):
            kept = list(messages[: number + 1])
    return kept, True


class Marked(NamedTuple):
    """Token ids, and which of them are targets."""

    ids: np.ndarray  # int64 (n,)
    targets: np.ndarray  # bool (n,)

    @classmethod
    def of(cls, ids: np.ndarray, *, are_targets: bool) -> "Marked":
        return cls(ids, np.full(len(ids), are_targets))

    @classmethod
    def join(cls, parts: list["Marked"]) -> "Marked":
        return cls(
            np.concatenate([_NONE, *(part.ids for part in parts)]),
            np.concatenate([np.empty(0, dtype=bool), *(part.targets for part in parts)]),
        )

    def part(self, start: int, stop: int) -> "Marked":
        return Marked(self.ids[start:stop], self.targets[start:stop])


def cut(whole: Marked, limit: int) -> Marked:
    """Take `limit` consecutive ids of one record, as above, or all if there are fewer; ids after
    the last target are left out.

    >>> ids = np.arange(12)
    >>> cut(Marked(ids, ids >= 9), 8).ids  # a short answer: as much of the prompt as there is room
    array([ 4,  5,  6,  7,  8,  9, 10, 11])
    >>> cut(Marked(ids, ids >= 3), 8).ids  # a long one: a quarter
    array([1, 2, 3, 4, 5, 6, 7, 8])
    """
    places = np.flatnonzero(whole.targets)
    whole = whole.part(0, int(places[-1]) + 1)
    if len(whole.ids) <= limit:
        return whole
    first = int(places[0])
    # At least one id before it: the first of a sample is never predicted.
    start = min(first - max(limit // PROMPT_SHARE, 1), len(whole.ids) - limit)
    return whole.part(max(start, 0), max(start, 0) + limit)


class Answers:
    """Samples' ids from records with answers. Stateless, hence thread-safe."""

    def __init__(
        self, records: RecordStore, tokenizer: Tokenizer, limit: int, reading: Reading
    ) -> None:
        """
        Args:
            records: of a format with fields.
            limit: ids of a sample, at most.
        """
        self._records, self._tokenizer, self._reading = records, tokenizer, reading
        self._limit = limit
        self._edge = 0 if tokenizer.bytes_per_token == 1 else EDGE_TOKENS
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        if reading.has_marks:
            bos_id = eos_id = None
        self._bos = _NONE if bos_id is None else np.array([bos_id])
        self._eos = _NONE if eos_id is None else np.array([eos_id])
        self._between = _NONE
        if not reading.has_marks and bos_id is eos_id is None:
            between = tokenizer.encode("\n\n")
            self._between = _NONE if between is None else between

    def head(self, members: np.ndarray) -> Excerpt:
        """Take the ids and targets of a unit's sample.

        Args:
            members: its records; those beyond `limit` are not read.
        """
        parts: list[Marked] = []
        have, undecodable = 0, 0
        budget = Budget(self._limit, self._records.most_row_bytes)
        for record in members[: self._limit].tolist():
            found = self._of_record(record, budget)
            if found is None:
                undecodable += 1
            elif found.targets.any():
                if parts:
                    parts.append(Marked.of(self._between, are_targets=False))
                parts.append(cut(found, self._limit))
                have += len(found.ids)
            if have >= self._limit or budget.is_spent:
                break
        ids, targets = Marked.join(parts).part(0, self._limit)
        return Excerpt(ids, undecodable, targets)

    def _of_record(self, record: int, budget: Budget) -> Marked | None:
        """Tokenize a record; None if it is malformed, or has text that there are no tokens for."""
        # A third before the answer, a third from there on, and a third for a template's own text.
        most = TOKEN_BYTES * (self._limit + EDGE_TOKENS) // 3
        budget.open(self._records, record, 2 * most)
        fields = self._records.fields(record)
        if fields is None:
            return None
        dialog = self._reading.read(fields, min(most, max(budget.text, 0) // 3), budget.rendered)
        if dialog is None:
            return None
        budget.rendered -= dialog.cost  # whether it was refused or not
        return None if dialog.pieces is None else self._encode(dialog, dialog.pieces, budget)

    def _encode(self, dialog: Dialog, pieces: list[Piece], budget: Budget) -> Marked | None:
        parts = []
        for piece in pieces:
            budget.text -= len(piece.text.encode("utf-8"))
            if budget.text < 0:  # a template that writes more than there is
                return Marked.join([])
            ids = self._tokenizer.encode(piece.text) if piece.text else _NONE
            if ids is None:
                return None
            parts.append(Marked.of(ids, are_targets=piece.is_target))
        whole = Marked.join(parts)
        if not whole.targets.any():
            return Marked.join([])
        # Tokens next to a cut may differ from those of the whole text. Behind that of an answer
        # stands an end mark, too, which is not where the answer ends.
        start = 0 if dialog.begins else self._edge
        whole = whole.part(start, len(whole.ids) - (0 if dialog.ends else self._edge))
        bos = Marked.of(self._bos, are_targets=False)
        eos = Marked.of(self._eos, are_targets=True)
        return Marked.join([bos] * dialog.begins + [whole] + [eos] * dialog.ends)
