"""Chat templates: whose text is whose, as `transformers` has it, and what is refused."""

import itertools
from pathlib import Path

import pytest

from tests.data.chats import MARKED, PLAIN, REWRITES, chat, folder
from torchtitan_dp.data.reading import ChatTemplate, Piece, load_chat_template

MARKS = {"bos_token": "<|begin_of_text|>"}


def pieces(template: str | ChatTemplate, turns: list[dict[str, str]]) -> list[Piece] | None:
    if isinstance(template, str):
        template = ChatTemplate(template, MARKS)
    return template.write(turns)


def targets(template: str, turns: list[dict[str, str]]) -> list[str]:
    return [text for text, is_target in pieces(template, turns) or () if is_target]


CHAT = chat("What?", " That. ", "Why?", "Because.", system="Be short.")


def test_the_assistants_turns_are_what_the_template_adds_for_them() -> None:
    assert targets(PLAIN, CHAT) == ["That.<|end|>\n", "Because.<|end|>\n"]
    assert targets(PLAIN, chat("What?", "", "So?", "That.")) == ["That.<|end|>\n"]
    assert targets(MARKED, CHAT) == ["That.<|end|>", "Because.<|end|>"]
    whole, marked = ("".join(text for text, _ in pieces(t, CHAT) or ()) for t in (PLAIN, MARKED))
    assert whole == marked
    assert whole.startswith("<|begin_of_text|><|start|>system\nBe short.<|end|>\n<|start|>user\n")


@pytest.mark.parametrize("what", ["lipsum()", "cycler ~ message.content.upper", "joiner()"])
def test_text_is_a_function_of_the_conversation(what: str) -> None:
    """Also in a branch that the trial never takes; an address that a message has is text."""
    shown = "{% if 'x' in message.content %}{{ " + what + " }}{% endif %}"
    late = PLAIN.replace("{% endfor %}", shown + "{% endfor %}")
    assert pieces(late, CHAT) == pieces(PLAIN, CHAT)
    assert pieces(late, chat("x", "y")) is None
    assert targets(PLAIN, chat("?", "f at 0x7f00>.")) == ["f at 0x7f00>.<|end|>\n"]


def test_what_the_template_refuses_is_none() -> None:
    """The trial passes: it is this conversation that makes the difference."""
    assert pieces(PLAIN, [{"role": "judge", "content": "?"}, *chat("a", "b")]) is None
    divides = "{{ 1 // (messages[0]['content'] | length - 3) }}" + PLAIN
    assert pieces(divides, chat("four", "a")) is not None
    assert pieces(divides, chat("thr", "a")) is None
    picky = PLAIN.replace("message['content'] | trim", "message['content'][:1 + 9 * loop.last * 9]")
    rewrites = "{% if messages | length > 4 %}" + picky + "{% else %}" + PLAIN + "{% endif %}"
    assert len(targets(rewrites, chat("a", "b", "c", "d"))) == 2
    assert pieces(rewrites, chat("a", "b", "c", "dd", "e", "ff")) is None


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% if %}", "is not valid Jinja"),
        ("{{ strftime_now('%d') }}" + PLAIN, "cannot be rendered .*strftime_now"),
        ("{{ [1, 2] | random }}" + PLAIN, "is not valid Jinja .*random"),
        ("{{ messages.count }}" + PLAIN, "cannot be rendered .*an address of memory"),
        ("{{ 'ab' | map('upper') }}" + PLAIN, "cannot be rendered .*an address of memory"),
        ("{{ raise_exception('never') }}", "cannot be rendered .*never"),
        (REWRITES, "writes earlier turns otherwise"),
        ("{% generation %}" + PLAIN + "{% endgeneration %}", "does not keep .* apart"),
        ("{% generation %}{% endgeneration %}" + PLAIN, "does not keep .* apart"),
        ("{{ messages.append(1) }}" + PLAIN, "cannot be rendered .*SecurityError"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.hf_assets_path = .*{message}.*\Z"):
        load_chat_template(folder(tmp_path, template))


def test_where_a_template_lies(tmp_path: Path) -> None:
    assert load_chat_template(folder(tmp_path, None)) is None
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": PLAIN}]
    one = load_chat_template(folder(tmp_path, named))  # type: ignore[arg-type]
    assert one is not None
    marks = {**MARKS, "eos_token": "<|end_of_text|>"}
    assert one.trial == ChatTemplate(PLAIN, marks).trial
    assert one.identity == ChatTemplate(PLAIN, marks).identity
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    other = load_chat_template(str(tmp_path))
    assert other is not None
    assert other.trial != one.trial
    assert len({one.identity, other.identity, ChatTemplate(PLAIN, MARKS).identity}) == 3


@pytest.mark.thorough_cases("template0")
@pytest.mark.slow
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_texts_and_marks_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder(tmp_path, template))
    ours = load_chat_template(str(tmp_path))
    assert ours is not None
    for turns in (CHAT, chat("ü☃", "x  y"), chat("a", "b", "c", "d", "e", "f")):
        written = pieces(ours, turns) or []
        text = "".join(piece.text for piece in written)
        assert text == theirs.apply_chat_template(turns, tokenize=False)
        if template == MARKED:
            found = theirs.apply_chat_template(
                turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            parts = [
                [piece.is_target] * len(theirs.encode(piece.text, add_special_tokens=False))
                for piece in written
            ]
            assert list(itertools.chain(*parts)) == [bool(one) for one in found["assistant_masks"]]
