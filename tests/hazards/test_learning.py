"""Row 69: a run with nothing to learn is refused before its first draw, by the command too."""

import json
from pathlib import Path

import pytest

from tests.data import chats
from tests.processes.runs import arguments
from torchtitan_dp.plan import __main__ as plan

END = "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
ANY_ROLE = chats.PLAIN.replace(END, "{% if false %}")


def talks(path: Path, *more: object) -> list[str]:
    """Chats without a turn of the assistant; options that name them."""
    turns = [{"role": role, "content": "text"} for role in ("user", "Assistant")]
    rows = [*[{"messages": turns}] * 24, *more]
    (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assets = chats.folder(path.parent / "tokenizer", ANY_ROLE)
    options = ["--training.dataset=jsonl", "--data.messages_field=messages"]
    return [*options, f"--model.hf_assets_path={assets}"]


def documents(path: Path) -> list[str]:
    for i in range(24):
        (path / f"{i:02}").write_bytes(b"%PDF-1.7\n" + bytes([i, 0xFF, 0xFE]))
    return ["--training.dataset=text"]


def one_empty(path: Path) -> list[str]:
    (path / "empty").touch()  # a record, as an empty unit is
    return documents(path)


NOTHING = {
    "Assistant": (talks, "24 have no turn of the role 'assistant'"),
    "PDF": (documents, "24 are no files of 'text'"),
    "PDF and empty": (one_empty, "24 are no files of 'text'"),
}


@pytest.fixture
def argv(tmp_path, own_cache):
    (tmp_path / "d").mkdir()
    return [*arguments(tmp_path / "out", tmp_path / "d", "--training.seq_len=64"), "--world_size=1"]


@pytest.mark.parametrize("name", NOTHING)
def test_row69_a_run_with_nothing_to_learn_is_refused(name, argv, tmp_path, capsys):
    """In one line that names what is lacking, and before anything is written."""
    write, named = NOTHING[name]
    with pytest.raises(SystemExit) as stopped:
        plan.main([*argv, *write(tmp_path / "d")])
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert named in line
    assert not (tmp_path / "out").exists()


def test_row69_one_record_with_a_target_is_enough(argv, tmp_path, capsys):
    """Neighbours start alike, unless one unit has all targets; what is lacking is counted."""
    plan.main([*argv, *talks(tmp_path / "d", {"messages": chats.chat("why?", "so")})])
    said = capsys.readouterr().err
    assert "warning (not private): 24 of 25 records have no target and contribute nothing" in said


UNCHANGED = {
    "optimizer.lr=0": "optimizer.lr = 0: every step would spend epsilon, and none change a weight",
    "optimizer.lr=1e-20": "optimizer.lr = 1e-20: every step",
    "optimizer.eps=1e12": "optimizer.eps = 1e+12: every step",
    "lora.rank=4 lora.alpha=1e-12": "lora.alpha = 1e-12: every step",
    "lr_scheduler.warmup_steps=1000000000000 lr_scheduler.total_steps=1000000000000": (
        "lr_scheduler.warmup_steps = 1000000000000, min_lr_factor = "
    ),
}


@pytest.mark.parametrize("given", UNCHANGED)
def test_row69_steps_that_can_change_no_weight_are_refused(given, argv, tmp_path, capsys):
    documents(tmp_path / "d")
    with pytest.raises(SystemExit) as stopped:
        plan.main([*argv, *(f"--{word}" for word in given.split())])
    said = capsys.readouterr().err
    assert (stopped.value.code, said.startswith(f"error: {UNCHANGED[given]}")) == (2, True), said
    assert said.count("\n") == 1  # before any record is read


def test_row69_last_steps_that_can_change_no_weight_are_refused(monkeypatch):
    """As a schedule that ends too early would have; TorchTitan's own do not."""
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.train import check

    config = load_config([*arguments("o", "d"), "--training.steps=1000"], 1)
    assert len(check.factors(config)) == 1000
    for last in (1000, 995, 900):
        of_step = {step: float(step <= last) for step in range(1, 1001)}
        monkeypatch.setattr(check, "factors", lambda _, of_step=of_step: of_step)
        if last == 900:
            with pytest.raises(
                ValueError, match=r"^lr_scheduler\.warmup_steps = .*: steps after 900"
            ):
                check.check_learning(config)
        else:
            check.check_learning(config)
