"""A tokenizer's own chat template: from messages to text, and which of it the assistant wrote.

The template is Jinja. It comes with the tokenizer, is public like it, and is rendered in jinja2's
sandbox with the names that Hugging Face's `apply_chat_template` gives it, but for the clock
(`strftime_now`), chance (`random`, `lipsum`) and addresses of memory, which show when a function is
written: text that changes with the day or the process would not be a function of the record. No
code but the template is run.

Which text is the assistant's:

- A template with `{% generation %}` blocks marks it: the text within them.
- Any other is rendered turn by turn. The text of the messages before an answer, with the opening
  of the answer (`add_generation_prompt`), is not the assistant's; the text that the answer adds is,
  end mark included. So prompts at inference look as they did in training. Each text must begin with
  the one before: templates and conversations that rewrite earlier turns are refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan_dp.data.tables import MOST_ITEMS
from torchtitan_dp.data.tokenizer import kind_of, text_of

ASSISTANT = "assistant"
# Unicode's noncharacters, which no text should have: one that has is refused.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_EITHER = re.compile(f"([{_OPEN}{_CLOSE}])")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # as Python writes a function, or a generator
_GLOBALS = ("range", "dict", "cycler", "joiner", "namespace")  # jinja2's own, without chance
MOST_MESSAGES = MOST_ITEMS
"""Of a longer conversation these are looked at: the time to render it must be bounded."""
MESSAGE_COST = 1000  # characters: about as many are copied while a template looks at a message
MOST_COST = 2**26  # characters that are rendered for one conversation, over all renderings
_PROBE = (("user", "What?"), (ASSISTANT, "That."), ("user", "Why?"), (ASSISTANT, "Because."))


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Piece(NamedTuple):
    """A part of a text, and whether its tokens are targets."""

    text: str
    is_target: bool


class ChatTemplate:
    """Writes conversations as a model was, or will be, taught to read them. Any thread may ask.

    `trial` is its text of a conversation that is no record. `lacks_end` describes answers in it
    whose end is not learned, or is None.
    """

    def __init__(self, source: str, marks: Mapping[str, str]) -> None:
        """
        Args:
            source: Jinja.
            marks: what templates call special tokens (`bos_token`, …), and their texts.

        Raises:
            ValueError: the mistake, for the end of a message that names the file.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
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
        self.trial = self._try_out()
        self.lacks_end = self._describe_end()

    def write(self, messages: Sequence[Message]) -> list[Piece] | None:
        """Write a conversation, in parts that are the assistant's or not.

        Args:
            messages: the last of them is the assistant's. A template without marks is rendered for
                each turn anew, until `MOST_COST` is spent: later turns are left out.

        Returns:
            None if the template refuses the conversation or its turns cannot be separated, and for
            content that no text should hold. It never raises for what messages hold.
        """
        if any(_EITHER.search(message.role + message.content) for message in messages):
            return None
        try:
            return self._pieces(messages)
        except Exception:  # of any kind: a template may do anything with a record's text
            return None

    def _pieces(self, messages: Sequence[Message]) -> list[Piece] | None:
        rendering = _Rendering(self._template, self._marks)
        return (_by_marks if self._is_marked else _by_turns)(rendering, messages)

    def _try_out(self) -> list[Piece]:
        """Write a conversation that is no record, and look at what became of its turns.

        Raises:
            ValueError: the mistake, for the end of a message that names the file.
        """
        probe = [Message(*turn) for turn in _PROBE]
        try:
            pieces = self._pieces(probe)
        except Exception as error:
            raise ValueError(f"cannot be rendered ({type(error).__name__}: {error})") from None
        if pieces is None:
            raise ValueError(
                "writes earlier turns otherwise once there are later ones, so that the "
                "assistant's cannot be identified: mark them with {% generation %}"
            )
        answers = "".join(piece.text for piece in pieces if piece.is_target)
        others = "".join(piece.text for piece in pieces if not piece.is_target)
        for role, content in _PROBE:
            here, there = (answers, others) if role == ASSISTANT else (others, answers)
            if content not in here or content in there:
                raise ValueError(
                    f"does not keep the assistant's turns apart ({content!r} of the {role} in a "
                    "trial): mark them with {% generation %}"
                )
        return pieces

    def _describe_end(self) -> str | None:
        """Describe answers in the trial whose text is learned, and no mark after it."""
        learned = [piece.text for piece in self.trial if piece.is_target]
        answers = [content for role, content in _PROBE if role == ASSISTANT]
        ends = "".join(learned)
        for content in answers:
            ends = ends.replace(content, "", 1)
        if ends.strip():
            return None
        where = "{% generation %} in the chat template leaves out the end mark"
        if not self._is_marked:
            where = "the chat template ends an answer without a mark"
        return f"{where}: the model never learns to stop"


class _Rendering:
    """Renders one conversation, whole or in part, and counts what that costs as it goes."""

    def __init__(self, template: jinja2.Template, marks: Mapping[str, str]) -> None:
        self._template, self._marks = template, marks
        self.cost = 0

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        # Before it is rendered: a template that refuses has worked as well.
        given = sum(len(message.content) for message in messages)
        self.cost += given + MESSAGE_COST * len(messages)
        text = self._template.render(
            **self._marks,
            messages=[message._asdict() for message in messages],
            add_generation_prompt=opens_answer,
            tools=None,
            documents=None,
        )
        self.cost += max(len(text) - given, 0)
        addresses = set(_ADDRESS.findall(text))
        for message in messages if addresses else ():
            addresses.difference_update(_ADDRESS.findall(message.role + message.content))
        if addresses:
            raise jinja2.TemplateError("it writes an address of memory")
        return text


def _by_marks(rendering: _Rendering, messages: Sequence[Message]) -> list[Piece] | None:
    pieces, inside = [], False
    for part in _EITHER.split(rendering.render(messages)):
        if part in (_OPEN, _CLOSE):
            if (part == _OPEN) == inside:
                return None
            inside = part == _OPEN
        elif part:
            pieces.append(Piece(part, inside))
    return None if inside else pieces


def _by_turns(rendering: _Rendering, messages: Sequence[Message]) -> list[Piece] | None:
    pieces: list[Piece] = []
    done = ""
    for end, message in enumerate(messages, start=1):
        if message.role != ASSISTANT:
            continue
        before = rendering.render(messages[: end - 1], opens_answer=True)
        after = rendering.render(messages[:end])
        if not (before.startswith(done) and after.startswith(before)):
            return None
        pieces.append(Piece(before[len(done) :], False))
        # An empty answer would teach to say nothing.
        pieces.append(Piece(after[len(before) :], message.content.strip() != ""))
        done = after
        if rendering.cost >= MOST_COST:
            break
    return pieces


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


def unlike_messages(value: object) -> str:
    """Describe a value that is no list of messages, by types and names of keys."""
    if not isinstance(value, list):
        return kind_of(value)
    for one in value[:MOST_MESSAGES]:
        if not isinstance(one, dict):
            return f"a list with {kind_of(one)}"
        if not one.keys() >= {"role", "content"}:
            return f"a list of objects with {' and '.join(map(repr, list(one)[:4])) or 'no keys'}"
        for key in ("role", "content"):
            if text_of(one[key]) is None:
                return f"messages whose {key} is {kind_of(one[key])}"
    return "a list of messages"


def load_chat_template(assets_path: str) -> ChatTemplate | None:
    """Load the chat template of the folder `model.hf_assets_path`; None if it has none.

    It is `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`: one template, or
    several with names, of which "default" is taken.

    Raises:
        ValueError: one line for the user, for a template that cannot be used.
    """
    path = os.path.join(assets_path, "tokenizer_config.json")
    settings: Any = {}
    if os.path.isfile(path):
        settings = json.loads(_read(path, assets_path))
    name, template = "tokenizer_config.json", settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    own = os.path.join(assets_path, "chat_template.jinja")
    if os.path.isfile(own):
        name, template = "chat_template.jinja", _read(own, assets_path)
    if not isinstance(template, str):
        return None
    marks = {key: value for key, value in settings.items() if key.endswith("_token")}
    # In the older form a mark is {"content": "<s>", "lstrip": false, ...}.
    marks = {k: v.get("content") if isinstance(v, dict) else v for k, v in marks.items()}
    try:
        return ChatTemplate(template, {k: v for k, v in marks.items() if isinstance(v, str)})
    except ValueError as error:
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: the chat template in its {name} {error}"
        ) from None


def _read(path: str, assets_path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        name = os.path.basename(path)
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: its {name} cannot be read ({error}): "
            "download it again"
        ) from None


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
    """Write JSON as it is, where jinja2's own filter would write it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
