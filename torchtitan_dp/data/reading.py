"""What of a record the model learns to write: all of its text, or answers alone.

Answers stand beside a prompt (`data.prompt_field`) or are the assistant's turns of a chat. All else
of these records is read and never predicted.

Guarantee:
    The pieces of a record are a function of that record alone, and so is the reason why it has
    none. A malformed record (a field that is missing or of another type), one that the template
    refuses, and one without an answer have no pieces: they contribute nothing and stop nothing.

The ids of a text are [bos] text [eos] (marks that exist), of a record with a prompt [bos] prompt
answer [eos]; those of a chat are what its template writes, marks included. Each piece is tokenized
by itself, as a model that is asked finds the prompt's tokens before it writes its own.

Reasons have names of fields, roles and types: they are PRIVATE, for the records' owner.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchtitan_dp.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    Piece,
    load_chat_template,
    messages_of,
    unlike_messages,
)
from torchtitan_dp.data.tables import Fields
from torchtitan_dp.data.tokenizer import Tokenizer, kind_of, text_of

MOST_PART = 2**18  # characters that are tokenized in one piece


class Lack(NamedTuple):
    """A reason why records have nothing to learn."""

    setting: str  # that does not fit the records
    what: str  # these records are or have, in the plural
    remedy: str = ""  # empty: that of the format (`Format.explain`)
    they: str = ""  # what the names that were met are
    is_undecodable: bool = True  # or else readable, and without an answer
    is_unnamed: bool = False  # whether they name no unit


class Nothing(NamedTuple):
    """A record without anything to learn."""

    lack: Lack
    names: Iterable[str] = ()  # of what it has instead


REFUSED = Lack(
    "training.dataset_path",
    "are refused by the chat template or the tokenizer of model.hf_assets_path",
    "take those of the model that is trained",
)
EMPTY = Lack("training.dataset_path", "are empty", "give records with text", is_undecodable=False)


def _missing(
    key: str, fields: Fields, field: str, word: str, what: str, instead: str | None, hint: str = ""
) -> Nothing | None:
    """Return what a record lacks that has no field, or something else in it; else None.

    Args:
        key: of the configuration, which names the field.
        word: the format's phrase for a field.
        what: the field must have.
        instead: what it has, if not that.
        hint: what that is, for a refusal.
    """
    setting = f"{key} = {field!r}"
    if field not in fields:
        remedy = f"name the one with the {what}"
        return Nothing(Lack(setting, f"have no such {word}", remedy, "their fields are"), fields)
    if instead is None:
        return None
    remedy = f"name the {word} with it{hint}"
    return Nothing(Lack(setting, f"have no {what} there", remedy, "they hold"), (instead,))


@dataclass(frozen=True)
class Texts:
    """Reads a text, all of which is learned, or an answer behind its prompt, with nothing put in
    between."""

    text_field: str
    prompt_field: str | None = None

    has_marks, identity = False, ""

    @property
    def has_answers(self) -> bool:
        """Whether only a part of a record is learned."""
        return self.prompt_field is not None

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        prompt = {} if self.prompt_field is None else {self.prompt_field: "data.prompt_field"}
        return {self.text_field: "data.text_field", **prompt}

    def pieces(self, fields: Fields, word: str) -> list[Piece] | Nothing:
        """Return the parts of a record's text, or why it has none.

        Args:
            word: the format's phrase for a field.
        """
        parts = []
        for field, key in reversed(self.keys.items()):
            value = fields.get(field)
            instead = kind_of(value) if text_of(value) is None else None
            if (nothing := _missing(key, fields, field, word, "text", instead)) is not None:
                return nothing
            parts.append(Piece(str(value), field == self.text_field))
        return [part for part in parts if part.text] if parts[-1].text else Nothing(EMPTY)


@dataclass(frozen=True)
class Chats:
    """Reads a conversation, a list of `{"role": …, "content": …}`, by a chat template."""

    messages_field: str
    template: ChatTemplate

    has_answers, has_marks = True, True

    @property
    def identity(self) -> str:
        """What the pieces depend on besides the record."""
        return self.template.identity

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        return {self.messages_field: "data.messages_field"}

    def pieces(self, fields: Fields, word: str) -> list[Piece] | Nothing:
        """Return the parts of a record's text up to the last answer, or why it has none
        (`Texts.pieces`)."""
        value, ((field, key),) = fields.get(self.messages_field), self.keys.items()
        messages = messages_of(value)
        instead = unlike_messages(value) if messages is None else None
        what, hint = "list of messages", ", a list of objects with a role and a content, two texts"
        if (nothing := _missing(key, fields, field, word, what, instead, hint)) is not None:
            return nothing
        assert messages is not None
        answers = [number for number, message in enumerate(messages, 1) if is_answer(message)]
        if not answers:
            roles = [message.role for message in messages]
            found = "only empty turns" if ASSISTANT in roles else "no turn"
            remedy = "these alone are learned: rename the role of what the model is to write"
            what = f"have {found} of the role '{ASSISTANT}'"
            return Nothing(
                Lack(f"{key} = {field!r}", what, remedy, "their roles are", False), roles
            )
        pieces = self.template.write(messages[: answers[-1]])
        return Nothing(REFUSED) if pieces is None else pieces


Reading = Texts | Chats


def reading(
    text_field: str,
    prompt_field: str | None,
    messages_field: str | None,
    assets_path: str,
    tokenizer: Tokenizer,
) -> Reading:
    """Choose how records are read.

    Args:
        text_field: of the text, or of the answer where `prompt_field` is given.
        assets_path: the folder that the tokenizer was loaded from; empty for bytes.

    Raises:
        ValueError: one line for the user; a tokenizer without a chat template, say.
    """
    if messages_field is None:
        return Texts(text_field, prompt_field)
    # Bytes have no special tokens, which a template writes as text.
    has_tokens = os.path.isfile(os.path.join(assets_path, "tokenizer.json"))
    template = load_chat_template(assets_path) if assets_path and has_tokens else None
    where = f"data.messages_field = {messages_field!r}: the tokenizer of model.hf_assets_path = "
    if template is None:
        raise ValueError(
            f"{where}{assets_path!r} has no chat template; use a tokenizer of a chat model, add "
            "chat_template.jinja to the folder, or write prompts and answers (data.prompt_field)"
        )
    parts = [tokenizer.encode(piece.text) for piece in template.trial if piece.text]
    whole = tokenizer.encode("".join(piece.text for piece in template.trial))
    known = [ids for ids in parts if ids is not None]
    if whole is None or len(known) < len(parts) or not np.array_equal(np.concatenate(known), whole):
        raise ValueError(
            f"{where}{assets_path!r} has other tokens for a chat than for its turns one by one, so "
            "that the assistant's cannot be identified; use another, or prompts and answers "
            "(data.prompt_field)"
        )
    return Chats(messages_field, template)


def is_answer(message: Message) -> bool:
    """Return whether a turn is one that is learned."""
    return message.role == ASSISTANT and message.content.strip() != ""


class Assembler:
    """Puts the ids of a record together from those of its pieces. Those that are no targets are
    stored as their bitwise complement, which is negative."""

    def __init__(self, tokenizer: Tokenizer, how: Reading, dtype: np.dtype[Any]) -> None:
        self._has_answers = how.has_answers
        marks = (None, None) if how.has_marks else (tokenizer.bos_id, tokenizer.eos_id)
        self._bos, self._eos = (
            np.array([] if mark is None else [mark], dtype=dtype) for mark in marks
        )
        self.between = self._bos[:0]
        """The ids between two records of a unit, stored before each."""
        if not how.has_marks and marks == (None, None):
            found = tokenizer.encode("\n\n")
            self.between = self.between if found is None else found.astype(dtype)
        if how.has_answers:
            self._bos, self.between = ~self._bos, ~self.between

    def record(
        self, parts: list[tuple[np.ndarray | None, bool]]
    ) -> tuple[np.ndarray, int] | Nothing:
        """Return a record's ids behind those of `between`, and the place of its first target,
        counted without them.

        Args:
            parts: ids of each piece, of the store's dtype, and whether they are targets; None where
                the tokenizer refused one.
        """
        if any(ids is None for ids, _ in parts):
            return Nothing(REFUSED)
        found = [ids if is_target else ~ids for ids, is_target in parts if ids is not None]
        text = np.concatenate([self._bos[:0], *found])
        is_target = text >= 0
        if not is_target.any():
            return Nothing(EMPTY)
        stop = len(text) - int(is_target[::-1].argmax())  # nothing behind it is ever learned
        first = int(is_target.argmax()) + len(self._bos) * self._has_answers
        return np.concatenate([self.between, self._bos, text[:stop], self._eos]), first


def split(text: str, most: int = MOST_PART) -> Iterator[str]:
    """Cut a text into parts of at most `most` characters, for the tokenizer's memory.

    A part ends before a blank between two letters if there is one near its end, where the
    tokenizers of most models begin a new word anyway.

    >>> list(split("one two three", 9))
    ['one two', ' three']
    """
    start = 0
    while len(text) - start > most:
        stop = start + most
        near = range(stop - 1, max(stop - 4096, start), -1)
        at = next(
            (
                i
                for i in near
                if text[i] == " " and text[i - 1 : i].isalpha() and text[i + 1].isalpha()
            ),
            stop,
        )
        yield text[start:at]
        start = at
    yield text[start:]
