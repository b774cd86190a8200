"""Neighbouring data sets: one unit's content, or nothing in its place; odd contents by a seed."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.data.chats import chat

UNITS, CHANGED = 12, 5
"""Units of a data set, and the one in which neighbours differ."""


def _odd_bytes(random: random.Random) -> bytes:
    """A text that somebody might have: empty, of one byte, huge, undecodable, of odd characters."""
    return random.choice(
        [
            b"",
            b"x",
            b"long " * random.choice((40, 4000)),
            b"\xff\xfe not UTF-8 \xc3",
            "\u202e\u0000\U0001f600 \ud7ff".encode() * random.randint(1, 40),
            b"<|begin_of_text|><|end_of_text|>" * 3,
            bytes(random.randrange(256) for _ in range(200)),
            b"plain words of a note " * random.randint(1, 30),
        ]
    )


def _odd_text(random: random.Random) -> str:
    return _odd_bytes(random).decode("utf-8", errors="replace")


def text_files(folder: Path, random: random.Random, changed: bool) -> None:
    """One file a unit."""
    folder.mkdir(parents=True)
    for i in range(UNITS):
        content = (
            _odd_bytes(random) if i == CHANGED else f"record {i} {random.random()} ".encode() * 3
        )
        if i == CHANGED and not content.strip():
            content = b"something, so that neighbours differ"
        (folder / f"{i:02}.txt").write_bytes(content if i != CHANGED or changed else b"")


def one_long(folder: Path, random: random.Random, changed: bool) -> None:
    """Short files, and one that is long or empty: a step's time depends on it."""
    folder.mkdir(parents=True)
    for i in range(UNITS):
        content = f"record {i} {random.random()}"
        (folder / f"{i:02}.txt").write_text(
            content if i != CHANGED else "long " * 400 if changed else ""
        )


def _lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def units(path: Path, random: random.Random, changed: bool) -> None:
    """Several lines a unit; the changed one has many lines, or one that is empty."""
    lines = []
    for i in range(UNITS):
        texts = [f"note {i} {random.random()} " * 4 for _ in range(random.randint(1, 3))]
        if i == CHANGED:
            texts = [_odd_text(random) for _ in range(random.randint(2, 9))] + ["not nothing"]
            texts = texts if changed else [""]
        lines += [{"user": f"u{i}", "text": text} for text in texts]
    _lines(path, lines)


def letters(path: Path, random: random.Random, changed: bool) -> None:
    """Letters between two people, each in several; one writes odd ones, or empty ones. An odd byte
    stays one: a line of JSON may hold it."""
    lines = []
    for i in range(3 * UNITS):
        one, other = i % UNITS, (i + 1 + i // UNITS) % UNITS
        line = {"from": f"u{one}", "to": [f"u{other}"], "text": f"letter {i} {random.random()}"}
        if CHANGED in (one, other):
            odd = random.choice((_odd_text(random), "not nothing", None, ["x"], "long " * 3000))
            line["text"] = odd if changed else ""
        lines.append(line)
    _lines(path, lines)
    path.write_bytes(path.read_bytes().replace(b"not nothing", b"no UTF-8 \xff"))


def prompts(path: Path, random: random.Random, changed: bool) -> None:
    """A prompt and an answer a line, each of which may be odd; or an empty line in its place."""
    lines: list[dict[str, Any]] = []
    for i in range(UNITS):
        line = {"prompt": f"question {i}? ", "text": f"answer {random.random()}"}
        if i == CHANGED:
            odd = random.choice(
                ({"prompt": _odd_text(random)}, {"prompt": None}, {"prompt": "q " * 3000}, {})
            )
            whole = {**line, "text": _odd_text(random), **odd}
            line = whole if changed else {"prompt": "", "text": ""}
        lines.append(line)
    _lines(path, lines)


def chats(path: Path, random: random.Random, changed: bool) -> None:
    """A conversation a line; the changed one lacks an answer, is broken or long, or is empty."""
    lines: list[dict[str, Any]] = []
    for i in range(UNITS):
        turns: Any = chat(f"Who is {i}?", f"It is {random.random()}.", "Why?", "Because.")
        if i == CHANGED:
            odd = random.choice(
                (
                    chat("Is anybody there?"),
                    chat("Who?", _odd_text(random)),
                    [{"role": "narrator", "content": "no such role"}],
                    "not a conversation",
                    chat(*("a " * 300, "b " * 300) * 4),
                )
            )
            turns = odd if changed else []
        lines.append({"chat": turns})
    _lines(path, lines)


KINDS: dict[str, tuple[str, Callable[[Path, random.Random, bool], None]]] = {
    "text": ("data", text_files),
    "one long": ("data", one_long),
    "units": ("data/units.jsonl", units),
    "letters": ("data/letters.jsonl", letters),
    "prompts": ("data/prompts.jsonl", prompts),
    "chats": ("data/chats.jsonl", chats),
}


def write(kind: str, root: Path, seed: int, changed: bool) -> Path:
    """Write one of two neighbours below `root`; the path for `training.dataset_path`."""
    name, writer = KINDS[kind]
    writer(root / name, random.Random(f"{kind} {seed}"), changed)
    return root / name
