"""A tokenizer's own chat template: from messages to text, and which parts the assistant wrote.

The template is rendered in jinja2's sandbox with the names that Hugging Face's
`apply_chat_template` gives it, but for the clock, chance and addresses of memory: text that differs
by day or process is no function of a record.

In a template with `{% generation %}` blocks these are the assistant's text. Any other is rendered
turn by turn: what an answer adds to the messages before it and its opening
(`add_generation_prompt`) is the assistant's, end mark included. Templates and conversations that
rewrite earlier turns are refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan_dp.data.tokenizer import SETTINGS, read_settings, read_text

ASSISTANT = "assistant"
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
        pieces, inside = [], False
        for part in _EITHER.split(self._render(messages)):
            if part in (_OPEN, _CLOSE):
                if (part == _OPEN) == inside:
                    return None
                inside = part == _OPEN
            elif part:
                pieces.append(Piece(part, inside))
        return None if inside else pieces

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
            raise ValueError(
                "writes earlier turns otherwise once there are later ones, so that the assistant's "
                f"cannot be identified: {_REMEDY}"
            )
        for role, content in _PROBE:
            own = role == ASSISTANT
            if content not in _texts(pieces, own) or content in _texts(pieces, not own):
                raise ValueError(
                    f"does not keep the assistant's turns apart ({content!r} of the {role} in a "
                    f"trial): {_REMEDY}"
                )
        return pieces

    @property
    def lacks_end(self) -> str | None:
        """A description of answers in the trial whose end is not learned, or None."""
        ends = _texts(self.trial, True)
        for _, content in _PROBE:
            ends = ends.replace(content, "", 1)
        marked = "{% generation %} in the chat template leaves out the end mark"
        where = marked if self._is_marked else "the chat template ends an answer without a mark"
        return None if ends.strip() else f"{where}: the model never learns to stop"


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
    """Marks the text in `{% generation %}` … `{% endgeneration %}`."""

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
