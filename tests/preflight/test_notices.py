"""What is said of records before a run starts: by the plan and by a worker, and nowhere else."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests import accounts
from tests.data import chats
from tests.data.stores import Row, as_lines, write
from tests.processes.runs import arguments, with_sigma
from torchtitan_dp.base.process import typed
from torchtitan_dp.checkpoint.start import Start, plan_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data.store import mark_used, runs_beside
from torchtitan_dp.ledger import EXECUTED_FILE, write_fingerprint
from torchtitan_dp.plan import __main__ as plan
from torchtitan_dp.train.check import check_run, open_records, warn_of_other_runs

NOTES: list[Row] = [{"who": i % 8, "note": f"note {i}"} for i in range(24)]
JSONL = ("--training.dataset=jsonl", "--data.text_field=note")


pytestmark = pytest.mark.usefixtures("own_cache")


def command(root: Path, *overrides: str) -> list[str]:
    return arguments(root / "out", root / "notes.jsonl", *JSONL, *overrides)


def planned(root: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    plan.main([*command(root, *overrides), "--world_size=1"])
    return "".join(capsys.readouterr())


def begun(root: Path, *overrides: str) -> None:
    """Leave what a run leaves that was killed after its first step."""
    config = load_config(command(root, *with_sigma(1), *overrides), 1)
    records, out = open_records(config), str(root / "out")
    os.makedirs(out, exist_ok=True)
    ledger = plan_start(config, len(records.train), Start(), None).ledger
    accounts.publish(ledger, out)
    write_fingerprint(out, records.fingerprint, records.settings)
    accounts.begun(ledger, out, 1)


def test_counts_change_no_file_that_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor anything else that the plan says: neighbours differ in labelled lines alone."""
    published, unlabelled, labelled = [], [], []
    for text in ({"note": "text"}, {"other": "no text"}, {"note": ""}):
        write(tmp_path, {"notes.jsonl": as_lines([*NOTES, {"who": 9, **text}])})
        files = f"--json={tmp_path / 'plan'}", "--no_memory"
        lines = planned(tmp_path, capsys, *with_sigma(1), *files).splitlines()
        labelled.append([line for line in lines if "not private" in line])
        unlabelled.append([line for line in lines if "not private" not in line])
        begun(tmp_path)
        spent = json.loads((tmp_path / "out/privacy.json").read_text())
        published.append(({**spent, "run": ""}, (tmp_path / "plan").read_text()))
        for path in (tmp_path / "out").iterdir():
            path.unlink()
    assert unlabelled == unlabelled[:1] * 3
    assert len({str(lines) for lines in labelled}) == 3
    assert published == published[:1] * 3


def test_a_start_without_a_step_binds_the_folder_to_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"notes.jsonl": as_lines(NOTES)})
    config = load_config(command(tmp_path, *with_sigma(1)), 1)
    out = tmp_path / "out"
    out.mkdir()
    write_fingerprint(str(out), "of other records", {})
    check_run(config)
    begun(tmp_path)
    check_run(config)
    write(tmp_path, {"notes.jsonl": as_lines([*NOTES, {"note": "one more"}])})
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records are not those"):
        check_run(config)
    os.unlink(out / "steps_executed.log")  # a checkpoint is one of some records, too
    (out / "checkpoint/step-1").mkdir(parents=True)
    (out / "checkpoint/step-1/.metadata").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"^training\.dataset_path: the records are not those"):
        check_run(load_config(command(tmp_path, *with_sigma(1), "--checkpoint.no-enable"), 1))


def test_the_tokenizer_and_ends_that_are_not_learned_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"note": "text", "chat": chats.chat("?", "!")}] * 24
    write(tmp_path, {"notes.jsonl": as_lines(rows)})
    said = planned(tmp_path, capsys)
    assert "tokenizer: bytes, vocabulary 258, bos 256, eos 257, from no model.hf_assets" in said
    assert "learns to stop" not in said

    outside = chats.MARKED.replace(
        "{{ '<|end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|end|>' }}"
    )
    assets = chats.folder(tmp_path / "tokenizer", outside)
    at = f"--model.hf_assets_path={assets}"
    chat = at, "--data.text_field=text", "--data.messages_field=chat"
    said = planned(tmp_path, capsys, *chat)
    marks = "bos <|begin_of_text|> (256), eos <|end_of_text|> (257)"
    assert f"      tokenizer: tokenizer.json, vocabulary 260, {marks}, from {assets}\n" in said
    assert "{% generation %} in the chat template leaves out the end mark: the model never" in said

    chats.folder(tmp_path / "tokenizer", chats.MARKED)  # ends with <|end|>, which is 259
    assert "would not stop" not in planned(tmp_path, capsys, *chat)
    own = tmp_path / "tokenizer/generation_config.json"
    own.write_text('{"eos_token_id": [1, 257]}')
    ends = "warning: records end with '<|end|>', 259, and {} has eos_token_id = [1, 257]: what is"
    assert ends.format(own) in planned(tmp_path, capsys, *chat)
    own.write_text('{"eos_token_id": [1, 259]}')
    assert "would not stop" not in planned(tmp_path, capsys, *chat)
    chats.folder(tmp_path / "tokenizer", chats.MARKED.replace("<|end|>", "<|im_end|>"))
    ends = "warning: answers end with '<|im_end|>', 10 tokens of this tokenizer: what is released"
    assert ends in planned(tmp_path, capsys, *chat)
    own.unlink()

    (tmp_path / "tokenizer/tokenizer_config.json").write_text("{}")
    said = planned(tmp_path, capsys, at)
    assert f"no bos, no eos, from {assets}\n" in said
    assert "      the tokenizer has no eos: the model never learns to stop\n" in said


def test_a_field_that_names_people_is_a_notice_where_records_are_the_unit(tmp_path, capsys) -> None:
    write(tmp_path, {"notes.jsonl": as_lines([{"patient_id": row["who"], **row} for row in NOTES])})
    notice = "if one of these names the person, set it: 'patient_id', 'who'"
    assert notice in planned(tmp_path, capsys, *with_sigma(1))
    assert notice not in planned(tmp_path, capsys, *with_sigma(1), "--data.unit_field=patient_id")
    texts = write(tmp_path / "texts", {f"{n}/note.txt": b"text" for n in range(24)})
    of_folders = *with_sigma(1), "--training.dataset=text", f"--training.dataset_path={texts}"
    notice = "the files lie in 24 folders, and epsilon protects one file"
    assert notice in planned(tmp_path, capsys, *of_folders)
    assert notice not in planned(tmp_path, capsys, *of_folders, "--data.unit_field=folder")


@pytest.mark.parametrize("same", [False, True])
def test_a_field_that_makes_each_record_a_unit_is_asked_about(tmp_path, capsys, same) -> None:
    rows = [{"who": 7 if same and i < 2 else i, "note": "text"} for i in range(24)]
    write(tmp_path, {"notes.jsonl": as_lines(rows)})
    said = planned(tmp_path, capsys, "--data.unit_field=who", *with_sigma(1))
    assert ("every line is a unit of its own: check that data.unit_field = 'who'" in said) != same


def test_other_runs_on_the_same_records_are_named(tmp_path, capsys) -> None:
    """Each has a card of its own epsilon, and a person pays for both."""
    write(tmp_path, {"notes.jsonl": as_lines(NOTES)})
    assert "trained on these records" not in planned(tmp_path, capsys)
    begun(tmp_path)
    mark_used(open_records(load_config(command(tmp_path), 1)).store, str(tmp_path / "out"))
    assert "trained on these records" not in planned(tmp_path, capsys)  # it is this one
    (line,) = (
        line
        for line in planned(tmp_path, capsys, f"--job.dump_folder={tmp_path}/second").splitlines()
        if "trained on these records" in line
    )
    assert line.startswith(f"warning: {tmp_path}/out trained on these records, or on units with")
    assert line.endswith(f"epsilons add up: {typed('ledger')} {tmp_path}/second {tmp_path}/out")
    mark_used(open_records(load_config(command(tmp_path), 1)).store, str(tmp_path / "second"))
    assert runs_beside(str(tmp_path / "second"), None) == [str(tmp_path / "out")]
    assert runs_beside(str(tmp_path / "third"), None) == []
    second = load_config([*command(tmp_path), f"--job.dump_folder={tmp_path}/second"], 1)
    warn_of_other_runs(second, "", known=[str(tmp_path / "out")])
    assert capsys.readouterr().err == ""  # a release adds this one up itself
    shutil.copytree(tmp_path / "out", plain := tmp_path / "plain")
    (plain / EXECUTED_FILE).unlink()
    mark_used(open_records(load_config(command(tmp_path), 1)).store, str(plain))
    warn_of_other_runs(second, "")
    said = capsys.readouterr().err
    assert said.startswith("warning: 2 other runs trained on these records, ")
    assert f"{tmp_path}/second {tmp_path}/out" in said
    assert said.endswith(f"; none covers what was trained without privacy: {plain}\n")
    os.rename(tmp_path / "out", tmp_path / "moved")  # its weights may be anywhere
    warn_of_other_runs(second, "", known=[str(plain)])
    said = capsys.readouterr().err
    assert said.startswith("warning: another run trained on these records, ")
    assert said.endswith(
        f" {plain} --overlapping; 1 of these, whose folders are gone, may count, too\n"
    )
