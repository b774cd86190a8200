"""Row 69: a run with nothing to learn is refused before its first draw."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data import chats
from tests.processes.runs import arguments
from torchtitan_dp.plan import __main__ as plan

END = "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
ANY_ROLE = chats.PLAIN.replace(END, "{% if false %}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(path: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--training.dataset=jsonl",)


def talks(
    *roles: str, text: str = "text", keys: tuple[str, str] = ("role", "content")
) -> Callable[[Path], tuple[str, ...]]:
    """Chats of these roles."""

    def write(path: Path) -> tuple[str, ...]:
        turns = [dict(zip(keys, (role, text), strict=True)) for role in roles]
        rows = [{"messages": turns} for _ in range(24)]
        assets = chats.folder(path.parent / "tokenizer", ANY_ROLE)
        more = ("--data.messages_field=messages", f"--model.hf_assets_path={assets}")
        return (*lines(path, rows), *more)

    return write


def files(head: bytes) -> Callable[[Path], tuple[str, ...]]:
    def write(path: Path) -> tuple[str, ...]:
        for i in range(24):
            (path / f"{i:02}").write_bytes(head + bytes([i, 0xFF, 0xFE]))
        return ("--training.dataset=text",)

    return write


def twice(path: Path) -> tuple[str, ...]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array([f"note {i}" for i in range(24)])
    pq.write_table(pa.Table.from_arrays([text, text], ["text", "text"]), path / "a.parquet")
    return ("--training.dataset=parquet",)


def without_answers(path: Path) -> tuple[str, ...]:
    rows = [{"text": "", "prompt": 99 * "why? "} for _ in range(24)]
    return (*lines(path, rows), "--data.prompt_field=prompt")


NOTHING: dict[str, tuple[Callable[[Path], tuple[str, ...]], str]] = {
    "Assistant": (talks("user", "Assistant"), "their roles are Assistant, user)"),
    "model": (talks("user", "model"), "their roles are model, user)"),
    "gpt": (talks("system", "human", "gpt"), "their roles are gpt, human, system)"),
    "user": (talks("user"), " have no turn of the role 'assistant'"),
    "blank": (talks("user", "assistant", text=" "), " have only empty turns of the role"),
    "from": (
        talks("human", "assistant", keys=("from", "value")),
        "they hold a list of objects with 'from' and 'value')",
    ),
    "PDF": (files(b"%PDF-1.7\n"), " are no UTF-8 texts; '00' is PDF"),
    "Latin-1": (files(b"caf\xe9 "), " are no UTF-8 texts; convert them"),
    "twice": (twice, "data.text_field = 'text': "),
    "no answer": (
        without_answers,
        " are empty; give records with text",
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_row69_a_run_with_nothing_to_learn_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that names what is there, and before anything is written."""
    write, named = NOTHING[name]
    (tmp_path / "d").mkdir()
    argv = arguments(tmp_path / "out", tmp_path / "d", *write(tmp_path / "d"))
    with pytest.raises(SystemExit) as stopped:
        plan.main([*argv, "--training.seq_len=64", "--world_size=1"])
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert named in line
    assert not (tmp_path / "out").exists()


def test_row69_one_record_with_a_target_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours start alike, unless one unit has all targets; what is lacking is counted."""
    (tmp_path / "d").mkdir()
    options = talks("user", "model")(tmp_path / "d")
    with (tmp_path / "d/a.jsonl").open("a") as file:
        file.write(json.dumps({"messages": chats.chat("why?", "so")}) + "\n")
    argv = arguments(tmp_path / "out", tmp_path / "d", *options)
    plan.main([*argv, "--training.seq_len=64", "--world_size=1"])
    said = capsys.readouterr().err
    assert "warning (not private): 24 of 25 records have no target and contribute nothing" in said


def test_an_answer_is_learned_however_long_its_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    rows = [{"text": "so", "prompt": 999 * "why? "} for _ in range(24)]
    options = (*lines(tmp_path / "d", rows), "--data.prompt_field=prompt")
    argv = arguments(tmp_path / "out", tmp_path / "d", *options)
    plan.main([*argv, "--training.seq_len=64", "--world_size=1"])
    assert "contribute nothing" not in capsys.readouterr().err
