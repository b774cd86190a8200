"""The parts of a record that the model learns to write: all of its text, or answers alone.

Answers stand beside a prompt (`data.prompt_field`) or are the assistant's turns of a chat.

Guarantee:
    The pieces of a record are a function of that record alone, and so is the reason why it has
    none. A malformed record (a field that is missing or of another type), one that the template
    refuses, and one without an answer have no pieces: they contribute nothing and stop nothing.

The ids of a text are [bos] text [eos] (marks that exist), of a record with a prompt [bos] prompt
answer [eos]; those of a chat are what its template writes. Each piece is tokenized by itself.

The tokenizer's own template is rendered in jinja2's sandbox with the names that Hugging Face's
`apply_chat_template` gives it, but for the clock, chance and addresses of memory: text that differs
by day or process is no function of a record. With `{% generation %}` blocks these are the
assistant's text; else what an answer adds to the messages before it and its opening. Templates and
conversations that rewrite earlier turns are refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan_dp.data.files import MOST_ITEMS, Fields
from torchtitan_dp.data.tokenizer import (
    SETTINGS,
    TOKENIZER,
    Tokenizer,
    read_settings,
    read_text,
    text_of,
)

ASSISTANT = "assistant"
SHAREGPT = {"human": "user", "gpt": ASSISTANT}  # roles, by its names
# Unicode's noncharacters, which no text should have: one that has is refused.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_EITHER = re.compile(f"([{_OPEN}{_CLOSE}])")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # as Python writes a function, or a generator
_GLOBALS = ("range", "dict", "cycler", "joiner", "namespace")  # jinja2's own, without chance
MOST_COST = 2**26  # characters that are rendered for one conversation, over all renderings
_REMEDY = "mark them with {% generation %}"
_PROBE = (("user", "What?"), (ASSISTANT, "That."), ("user", "Why?"), (ASSISTANT, "Because."))
Message = Mapping[str, str]  # "role" and "content"


class Piece(NamedTuple):
    """A part of a text, and whether its tokens are targets."""

    text: str
    is_target: bool


class ChatTemplate:
    """Writes conversations as a model was, or will be, taught to read them."""

    def __init__(self, source: str, marks: Mapping[str, str]) -> None:
        """Compile Jinja, with `marks`: names of special tokens (`bos_token`, …) and their texts;
        raise ValueError, whose text ends a message that names the file."""
        blocks = {"trim_blocks": True, "lstrip_blocks": True}
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(**blocks, extensions=extensions)
        environment.filters["tojson"] = _to_json
        del environment.filters["random"]
        kept = {name: environment.globals[name] for name in _GLOBALS}
        environment.globals = {**kept, "raise_exception": _raise}
        try:
            self._is_marked = environment.parse(source).find(nodes.ExtensionAttribute) is not None
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"is not valid Jinja ({error})") from None
        self._marks = dict(marks)
        terms = json.dumps([source, self._marks], sort_keys=True)
        self.identity = hashlib.sha256(terms.encode()).hexdigest()
        self.trial = self._try_out()  # pieces of a conversation that is no record

    def write(self, messages: Sequence[Message]) -> list[Piece] | None:
        """Write a conversation whose last turn is the assistant's, split into its text and others';
        None, and no error, if it refuses the messages or their turns cannot be separated."""
        if any(_EITHER.search(message["role"] + message["content"]) for message in messages):
            return None
        try:
            return self._pieces(messages)
        except Exception:  # of any kind: a template may do anything with a record's text
            return None

    def _pieces(self, messages: Sequence[Message]) -> list[Piece] | None:
        if not self._is_marked:
            return self._by_turns(messages)
        text, *parts = _EITHER.split(self._render(messages))
        marks = parts[::2]
        if marks != [_OPEN, _CLOSE] * (len(marks) // 2):
            return None
        texts = enumerate([text, *parts[1::2]])
        return [Piece(part, number % 2 == 1) for number, part in texts if part]

    def _by_turns(self, messages: Sequence[Message]) -> list[Piece] | None:
        pieces, done, cost = list[Piece](), "", 0
        for end, message in enumerate(messages, start=1):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[: end - 1], opens_answer=True)
            after = self._render(messages[:end])
            if not (before.startswith(done) and after.startswith(before)):
                return None
            # An answer is what follows its opening. An empty one would teach to say nothing.
            pieces.append(Piece(before[len(done) :], False))
            pieces.append(Piece(after[len(before) :], message["content"].strip() != ""))
            done = after
            cost += _cost(before, messages[: end - 1]) + _cost(after, messages[:end])
            if cost >= MOST_COST:
                break
        return pieces

    def _render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        turns = [dict(message) for message in messages]
        names = {"messages": turns, "add_generation_prompt": opens_answer}
        text = self._template.render(**self._marks, **names, tools=None, documents=None)
        addresses = set(_ADDRESS.findall(text))
        for message in messages if addresses else ():
            addresses.difference_update(_ADDRESS.findall(message["role"] + message["content"]))
        if addresses:
            raise jinja2.TemplateError("it writes an address of memory")
        return text

    def _try_out(self) -> list[Piece]:
        try:
            pieces = self._pieces([{"role": role, "content": text} for role, text in _PROBE])
        except Exception as error:
            raise ValueError(f"cannot be rendered ({type(error).__name__}: {error})") from None
        if pieces is None:
            raise ValueError(f"writes earlier turns otherwise once there are later ones: {_REMEDY}")
        for role, content in _PROBE:
            own = role == ASSISTANT
            if content not in _texts(pieces, own) or content in _texts(pieces, not own):
                raise ValueError(
                    f"does not keep the assistant's turns apart ({content!r} of the {role} in a "
                    f"trial): {_REMEDY}"
                )
        return pieces

    @property
    def end_mark(self) -> str:
        """The text that is learned behind an answer, as `<|im_end|>`; "" if none is."""
        return _texts(self.trial, True).rpartition(_PROBE[-1][1])[2].strip()

    @property
    def lacks_end(self) -> str:
        """A description of a template without an `end_mark`."""
        marked = "{% generation %} in the chat template leaves out the end mark"
        return marked if self._is_marked else "the chat template ends an answer without a mark"


def load_chat_template(assets_path: str) -> ChatTemplate | None:
    """Load the chat template of the folder `model.hf_assets_path`: `chat_template.jinja`, else
    `chat_template` ("default") in `tokenizer_config.json`, else None. Raises ValueError, one line,
    if it cannot be used."""
    name, own = SETTINGS, "chat_template.jinja"
    settings = read_settings(assets_path, name)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if (text := read_text(assets_path, own)) is not None:
        name, template = own, text
    if not isinstance(template, str):
        return None
    marks = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)}
    try:
        return ChatTemplate(template, marks)
    except ValueError as error:
        where = f"model.hf_assets_path = {assets_path!r}: the chat template in its {name}"
        raise ValueError(f"{where} {error}") from None


def _cost(text: str, messages: Sequence[Message]) -> int:
    read = sum(len(message["content"]) for message in messages)
    return max(len(text), read) + 1000 * len(messages)  # copied while a template looks at each


def _texts(pieces: Sequence[Piece], is_target: bool) -> str:
    return "".join(piece.text for piece in pieces if piece.is_target == is_target)


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own is for HTML


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


MOST_PART = 2**18  # characters that are tokenized in one piece


class Lack(NamedTuple):
    """Why records have nothing to learn, as in "7 have no text there (data.text_field = 'body')".
    NOT PRIVATE, as their number."""

    setting: str
    what: str
    remedy: str
    is_undecodable: bool = True  # false: readable, but nothing to learn
    number: int = 0


REFUSED = Lack(
    "training.dataset_path",
    "are refused by the chat template or the tokenizer of model.hf_assets_path",
    "take those of the model that is trained",
)
EMPTY = Lack("training.dataset_path", "are empty", "give records with text", is_undecodable=False)


def _misfit(key: str, field: str, fields: Fields, word: str) -> Lack:
    """Describe a record that lacks a field, or has something else than what is needed."""
    needed = "text"
    if key == "data.messages_field":
        needed = "list of messages, objects with role and content (or from and value)"
    what = f"have no {needed} there" if field in fields else f"have no such {word}"
    return Lack(f"{key} = {field!r}", what, f"name the {word} with the {needed}")


@dataclass(frozen=True)
class Reading:
    """How records are read: a text, all of which is learned; an answer behind its prompt; or, by a
    template, a chat, a list of `{"role": …, "content": …}`."""

    text_field: str = "text"
    prompt_field: str | None = None
    messages_field: str | None = None
    template: ChatTemplate | None = None  # of `messages_field`

    @property
    def has_answers(self) -> bool:
        """Whether only a part of a record is learned."""
        return self.prompt_field is not None or self.messages_field is not None

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        if self.messages_field is not None:
            return {self.messages_field: "data.messages_field"}
        prompt = {} if self.prompt_field is None else {self.prompt_field: "data.prompt_field"}
        return {self.text_field: "data.text_field", **prompt}

    def pieces(self, fields: Fields, word: str) -> list[Piece] | Lack:
        """Return the parts of a record's text, or why it has none; `word` names a field."""
        if self.template is not None:
            return self._turns(self.template, fields, word)
        parts = []
        for field, key in reversed(self.keys.items()):
            if (text := text_of(fields.get(field))) is None:
                return _misfit(key, field, fields, word)
            parts.append(Piece(text, field == self.text_field))
        return [part for part in parts if part.text] if parts[-1].text else EMPTY

    def _turns(self, template: ChatTemplate, fields: Fields, word: str) -> list[Piece] | Lack:
        ((field, key),) = self.keys.items()
        if (messages := _messages_of(fields.get(field))) is None:
            return _misfit(key, field, fields, word)
        turns = [(i, one) for i, one in enumerate(messages) if one["role"] == ASSISTANT]
        if answers := [i for i, one in turns if one["content"].strip()]:
            return template.write(messages[: answers[-1] + 1]) or REFUSED
        found = "only empty turns" if turns else "no turn"
        what = f"have {found} of the role '{ASSISTANT}'"
        remedy = "these alone are learned: rename the role of what the model is to write"
        return Lack(f"{key} = {field!r}", what, remedy, is_undecodable=False)


def reading(
    text_field: str,
    prompt_field: str | None,
    messages_field: str | None,
    assets_path: str,
    tokenizer: Tokenizer,
) -> Reading:
    """Choose how records are read, with the tokenizer of `assets_path` ("": bytes); raise
    ValueError, one line, for one that lacks a chat template, or cannot be used with it."""
    if messages_field is None:
        return Reading(text_field, prompt_field)
    # Bytes have no special tokens, which a template writes as text.
    has_tokens = os.path.isfile(os.path.join(assets_path, TOKENIZER))
    template = load_chat_template(assets_path) if assets_path and has_tokens else None
    if template is None:
        raise ValueError(
            f"data.messages_field = {messages_field!r}: the tokenizer of model.hf_assets_path = "
            f"{assets_path!r} has no chat template; use a tokenizer of a chat model, add "
            "chat_template.jinja to the folder, or write prompts and answers (data.prompt_field)"
        )
    texts = [piece.text for piece in template.trial if piece.text]
    whole, *parts = tokenizer.encode_each(["".join(texts), *texts])
    known = [ids for ids in parts if ids is not None]
    if whole is None or len(known) < len(parts) or not np.array_equal(np.concatenate(known), whole):
        raise ValueError(
            f"data.messages_field = {messages_field!r}: the tokenizer of model.hf_assets_path = "
            f"{assets_path!r} has other tokens for a chat than for its turns one by one, so the "
            "assistant's are unknown; end each role's mark in the chat template with a line break "
            "or a special token, or use prompts and answers (data.prompt_field)"
        )
    return Reading(messages_field=messages_field, template=template)


def _messages_of(value: object) -> list[dict[str, str]] | None:
    """Return the messages of a chat: objects with a `role` and a `content`, or, as ShareGPT writes
    them, `from` and `value`; None if one is none."""
    if not isinstance(value, list):
        return None
    found = []
    for one in value[:MOST_ITEMS]:  # the time to render a conversation is bounded
        if not isinstance(one, dict):
            return None
        role, content = text_of(one.get("role")), _content_of(one.get("content"))
        if role is None and content is None:
            role, content = text_of(one.get("from")), _content_of(one.get("value"))
            role = SHAREGPT.get(role, role) if role else role
        if role is None or content is None:
            return None
        found.append({"role": role, "content": content})
    return found


def _content_of(value: object) -> str | None:
    """Return a text, or those of a list of parts, `{"type": "text", "text": …}`, joined."""
    if not isinstance(value, list):
        return text_of(value)
    if len(value) >= MOST_ITEMS:  # readers leave out what follows
        return None
    found = ""
    for part in value:
        if isinstance(part, dict) and part.get("type") in (None, "text"):
            part = part.get("text")
        if (text := text_of(part)) is None:  # an image, say
            return None
        found += text
    return found


class Assembler:
    """Puts the ids of a record together from those of its pieces. Ids that are no targets are
    stored as their bitwise complement, which is negative."""

    def __init__(self, tokenizer: Tokenizer, how: Reading) -> None:
        marks, none = (tokenizer.bos_id, tokenizer.eos_id), np.empty(0, dtype=np.int64)
        if how.template is not None:  # which writes its own
            marks = (None, None)
        self._bos, self._eos = (none if mark is None else np.array([mark]) for mark in marks)
        self.between = none  # ids between two records of a unit, stored before each
        if marks == (None, None) and how.template is None:
            found = tokenizer.encode("\n\n")
            self.between = none if found is None else found
        if how.has_answers:
            self._bos, self.between = ~self._bos, ~self.between

    def record(
        self, pieces: Sequence[Piece], encoded: Sequence[np.ndarray | None]
    ) -> tuple[np.ndarray, int] | Lack:
        """Put a record's ids together behind `between`; None is a piece that the tokenizer refused.
        Return also the index of the first target after the first id, without `between`, or 0."""
        found = []
        for piece, ids in zip(pieces, encoded, strict=True):
            if ids is None:
                return REFUSED
            found.append(ids if piece.is_target else ~ids)
        text = np.concatenate([self._bos[:0], *found])
        if not (text >= 0).any():
            return EMPTY
        stop = len(text) - int((text >= 0)[::-1].argmax())  # nothing behind it is ever learned
        ids = np.concatenate([self._bos, text[:stop], self._eos])
        is_predicted = ids[1:] >= 0
        first = int(is_predicted.argmax()) + 1 if is_predicted.any() else 0
        return np.concatenate([self.between, ids]), first


def split(text: str, most: int = MOST_PART) -> Iterator[str]:
    """Cut a text into parts of at most `most` characters, for the tokenizer's memory: before a
    blank between two letters if there is one near, where most tokenizers begin a new word anyway.
    """
    start = 0
    while len(text) - start > most:
        stop = start + most
        near = range(stop - 1, max(stop - 4096, start), -1)
        blanks = (i for i in near if text[i] == " " and (text[i - 1] + text[i + 1]).isalpha())
        at = next(blanks, stop)
        yield text[start:at]
        start = at
    yield text[start:]
