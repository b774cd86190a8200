"""A whole run on two ranks whose units have chats, several of which are averaged in a draw."""

import json
from pathlib import Path

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.data.chats import chat, folder
from tests.launch import arguments, privacy, train

USERS, STEPS = 6, 2


def write_chats(path: Path) -> Path:
    lines = [
        {"user": f"u{user}", "chat": chat("Who? " * 30, f"u{user}.", "Why?", "Because." * chats)}
        for user in range(USERS)
        for chats in range(user + 1)
    ]
    lines += [{"user": "u0", "chat": None}, {"user": "nobody", "chat": chat("Is anybody there?")}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.slow
def test_chats_are_trained_on_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = arguments(
        out,
        write_chats(tmp_path / "chats.jsonl"),
        "--training.dataset=jsonl",
        "--data.messages_field=chat",
        "--data.unit_field=user",
        "--data.unit_sampling=random",
        "--data.windows_per_draw=2",
        f"--model.hf_assets_path={folder(tmp_path / 'tokenizer')}",
        f"--training.global_batch_size={USERS + 1}",  # all units at every step
        f"--training.steps={STEPS}",
        "--comm.train_timeout_seconds=1000",  # a busy machine's tokenizer looks slow
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan.main([*command, "--world_size=2", "--no_memory"])
    told = capsys.readouterr().err
    assert "of 2 windows, averaged, of at most" in told
    assert "targets: the assistant's turns in data.messages_field 'chat'" in told
    train(command, log=tmp_path / "log")
    spent = privacy(out)
    assert spent["private"] is True
    assert spent["steps"] == STEPS
    assert spent["targets"] == "the assistant's turns in data.messages_field 'chat'"
    assert spent["windows_per_draw"] == 2
