"""Records that have answers: a prompt beside one (`data.prompt_field`), or a chat.

Only what the model shall learn to write is a target: the answer, or the assistant's turns. All else
is read and never predicted.

Guarantee:
    What is read of a record is a function of that record alone. One that is malformed (a field that
    is missing or of another type) is `None`, and one that the template refuses has no pieces but
    what it cost: both contribute nothing and stop nothing; one without an answer has no pieces.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    Piece,
    load_chat_template,
)
from torchtitan_dp.data.tokenizer import Tokenizer

MOST_MESSAGES = 256
"""Of a longer conversation these are looked at: the time to render it must be bounded."""

Fields = Mapping[str, object]


class Dialog(NamedTuple):
    """Holds what is read of a record, in pieces whose tokens are all targets, or none."""

    pieces: list[Piece] | None
    """None where the template refused what was read."""
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
            most_cost: as of `ChatTemplate.write`.
        """
        messages = messages_of(fields.get(self.messages_field))
        if messages is None:
            return None
        answers = [i for i, message in enumerate(messages) if _is_answer(message)]
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
            "the assistant's cannot be told; use another, or prompts and answers "
            "(data.prompt_field)"
        )
    return Chats(messages_field, template)


def text_of(value: object) -> str | None:
    """Return a text that can be written as UTF-8: JSON can spell half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8")
    except UnicodeError:
        return None
    return value


def messages_of(value: object) -> list[Message] | None:
    """Return the first messages, or None if one of them is none."""
    if not isinstance(value, list):
        return None
    found = []
    for one in value[:MOST_MESSAGES]:
        if not isinstance(one, dict):
            return None
        role, content = text_of(one.get("role")), text_of(one.get("content"))
        if role is None or content is None:
            return None
        found.append(Message(role, content))
    return found


def _is_answer(message: Message) -> bool:
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
    """Keep the end of all contents, and tell whether that is all: earlier ones become empty."""
    kept: list[Message] = []
    for message in reversed(messages):
        content = _last(message.content, most)
        most -= len(content.encode("utf-8"))
        kept.append(message._replace(content=content))
    kept.reverse()
    return kept, kept == list(messages)


def _first_of(messages: Sequence[Message], most: int) -> tuple[list[Message], bool]:
    """Keep the beginning of a conversation whose first turn is an answer, up to an answer's end, or
    to where that was cut; tell whether no answer was cut. Before a question that is too long it
    ends.
    """
    kept: list[Message] = []
    for number, message in enumerate(messages):
        content = _first(message.content, most)
        if content != message.content:
            if message.role != ASSISTANT or not content.strip():
                break
            return [*messages[:number], message._replace(content=content)], False
        most -= len(content.encode("utf-8"))
        if _is_answer(message):
            kept = list(messages[: number + 1])
    return kept, True
