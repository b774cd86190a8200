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
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchtitan_dp.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    Piece,
    load_chat_template,
)
from torchtitan_dp.data.console import listed
from torchtitan_dp.data.tables import MOST_ITEMS, Fields
from torchtitan_dp.data.tokenizer import Tokenizer, text_of

MOST_PART = 2**18  # characters that are tokenized in one piece
MOST_MESSAGES = MOST_ITEMS
"""Of a longer conversation these are looked at: the time to render it must be bounded."""


class Lack(NamedTuple):
    """Why records have nothing to learn. PRIVATE, for their owner: it names what they have."""

    setting: str  # that does not fit them
    what: str  # they are or have, in the plural
    remedy: str = ""  # empty: that of the format (`Format.explain`)
    they: str = ""  # a phrase for what the names are of
    names: tuple[str, ...] = ()  # of fields, roles or types that they have instead
    is_undecodable: bool = True  # or else readable, and without an answer
    file: str = ""  # of one of these records
    number: int = 0  # of them

    def explain(self) -> str:
        """Describe them, with the setting."""
        named = f": {self.they} {listed(self.names)}" if self.names else ""
        return f"{self.number:,} {self.what} ({self.setting}{named})"


REFUSED = Lack(
    "training.dataset_path",
    "are refused by the chat template or the tokenizer of model.hf_assets_path",
    "take those of the model that is trained",
)
EMPTY = Lack("training.dataset_path", "are empty", "give records with text", is_undecodable=False)
THEIR_FIELDS = "their fields are"


def _misfit(
    key: str, field: str, fields: Fields, word: str, needed: str, instead: str, hint: str = ""
) -> Lack:
    """Describe a record without a field, or with something else in it.

    Args:
        key: of the configuration, which names the field.
        word: the format's phrase for a field.
        needed: in the field; `hint` explains it.
        instead: in the field, if it is there.
    """
    setting = f"{key} = {field!r}"
    if field not in fields:
        remedy = f"name the one with the {needed}"
        return Lack(setting, f"have no such {word}", remedy, THEIR_FIELDS, tuple(fields))
    remedy = f"name the {word} with it{hint}"
    return Lack(setting, f"have no {needed} there", remedy, "they hold", (instead,))


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

    def pieces(self, fields: Fields, word: str) -> list[Piece] | Lack:
        """Return the parts of a record's text, or why it has none.

        Args:
            word: the format's phrase for a field.
        """
        parts = []
        for field, key in reversed(self.keys.items()):
            text = text_of(fields.get(field))
            if text is None:
                return _misfit(key, field, fields, word, "text", _kind_of(fields.get(field)))
            parts.append(Piece(text, field == self.text_field))
        return [part for part in parts if part.text] if parts[-1].text else EMPTY


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

    def pieces(self, fields: Fields, word: str) -> list[Piece] | Lack:
        """Return the parts of a record's text up to the last answer, as `Texts.pieces` does."""
        field, key = self.messages_field, "data.messages_field"
        messages = _messages_of(fields.get(field))
        if isinstance(messages, str):
            hint = ", a list of objects with a role and a content, two texts"
            return _misfit(key, field, fields, word, "list of messages", messages, hint)
        answers = [number for number, message in enumerate(messages, 1) if _is_answer(message)]
        if not answers:
            roles = tuple(message.role for message in messages)
            found = "only empty turns" if ASSISTANT in roles else "no turn"
            what = f"have {found} of the role '{ASSISTANT}'"
            remedy = "these alone are learned: rename the role of what the model is to write"
            return Lack(f"{key} = {field!r}", what, remedy, "their roles are", roles, False)
        return self.template.write(messages[: answers[-1]]) or REFUSED


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


def _messages_of(value: object) -> list[Message] | str:
    """Return the first messages, or a description of a value that is no list of messages, by types
    and names of keys."""
    if not isinstance(value, list):
        return _kind_of(value)
    found = []
    for one in value[:MOST_MESSAGES]:
        if not isinstance(one, dict):
            return f"a list with {_kind_of(one)}"
        if not one.keys() >= {"role", "content"}:
            return f"a list of objects with {' and '.join(map(repr, list(one)[:4])) or 'no keys'}"
        role, content = text_of(one["role"]), text_of(one["content"])
        if role is None:
            return f"messages whose role is {_kind_of(one['role'])}"
        if content is None:
            return f"messages whose content is {_kind_of(one['content'])}"
        found.append(Message(role, content))
    return found


def _kind_of(value: object) -> str:
    """Name the type of a value in a field, with its article."""
    kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    kinds |= {dict: "an object", type(None): "null", bytes: "text that is broken or too long"}
    kinds[str] = "text with half a character" if text_of(value) is None else "a text"
    return kinds.get(type(value), f"a {type(value).__name__}")


def _is_answer(message: Message) -> bool:
    return message.role == ASSISTANT and message.content.strip() != ""


class Assembler:
    """Puts the ids of a record together from those of its pieces. Those that are no targets are
    stored as their bitwise complement, which is negative."""

    def __init__(self, tokenizer: Tokenizer, how: Reading, dtype: np.dtype[Any]) -> None:
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

    def record(self, parts: list[tuple[np.ndarray | None, bool]]) -> tuple[np.ndarray, int] | Lack:
        """Return a record's ids behind those of `between`, and the place of its first target that
        is not its first id, counted without them; 0 if it has none.

        Args:
            parts: ids of each piece, of the store's dtype, and whether they are targets; None where
                the tokenizer refused one.
        """
        if any(ids is None for ids, _ in parts):
            return REFUSED
        found = [ids if is_target else ~ids for ids, is_target in parts if ids is not None]
        text = np.concatenate([self._bos[:0], *found])
        if not (text >= 0).any():
            return EMPTY
        stop = len(text) - int((text >= 0)[::-1].argmax())  # nothing behind it is ever learned
        ids = np.concatenate([self._bos, text[:stop], self._eos])
        is_predicted = ids[1:] >= 0
        first = int(is_predicted.argmax()) + 1 if is_predicted.any() else 0
        return np.concatenate([self.between, ids]), first


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
        blanks = (
            i
            for i in range(stop - 1, max(stop - 4096, start), -1)
            if text[i] == " " and text[i - 1].isalpha() and text[i + 1].isalpha()
        )
        at = next(blanks, stop)
        yield text[start:at]
        start = at
    yield text[start:]
