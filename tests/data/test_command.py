"""The command that prepares records: exact figures, labelled lines, and stores that it erases."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes.runs import CONFIG
from torchtitan_dp.data import store as stores
from torchtitan_dp.plan.prepare import main


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"who": i % 5, "note": "x" * 10 * (i % 5)} for i in range(20)]
    rows += [{"who": 9, "note": 7}]  # no text
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(str(CONFIG), "--training.dataset=jsonl", f"--training.dataset_path={path}"),
        *("--data.text_field=note", "--data.unit_field=who", "--training.seq_len=64"),
        *("--data.heldout_fraction=0", "--validation.no-enable", "--json=-"),
    ]


def test_figures_and_labels(command: list[str], capsys: Any) -> None:
    main(command)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["not_private"] is True
    assert (found["records"], found["units"], found["train_units"]) == (21, 6, 6)
    # Four notes of 10 i bytes each: marks of begin and end stand around every note with text.
    tokens = sorted([0, 0] + [4 * (10 * i + 2) for i in range(1, 5)])
    assert found["tokens"] == sum(tokens)
    assert found["tokens_quantiles"]["100"] == tokens[-1] == 168
    assert (found["empty_units"], found["undecodable_records"]) == (2, 1)
    assert found["longer"] == sum(t > 64 for t in tokens) / 6
    assert found["tokens_per_sample"] == sum(min(t, 64) for t in tokens) / 6
    lines = err.splitlines()
    assert all(line.startswith(("not private: ", "warning (not private): ")) for line in lines)
    (of_length,) = (line for line in lines if "at training.seq_len = 64: " in line)
    assert "50% of units are longer, and are cut; a sample averages" in of_length
    assert of_length.endswith("one draw of each covers 56% of all tokens, many draws up to 100%")


def test_figures_of_records_that_are_drawn_one_by_one(command: list[str], capsys: Any) -> None:
    """A unit's text is longer than a sample, and none of its records is."""
    main([*command, "--data.unit_sampling=random"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["tokens_quantiles"]["100"] == 42
    assert (found["longer"], found["tokens_per_sample"]) == (0, sum((0, 12, 22, 32, 42, 0)) / 6)
    assert "tokens per record (a draw of a unit takes one): least 0" in err
    assert "0% of records are longer, and are cut; a sample averages 18 tokens" in err


@pytest.mark.parametrize("place", [[], ["--data.store", "STORES"]], ids=["default", "elsewhere"])
def test_stores_are_listed_and_erased(
    command: list[str], place: list[str], tmp_path: Path, capsys: Any
) -> None:
    place = [word.replace("STORES", str(tmp_path / "stores")) for word in place]
    folder = tmp_path / ("stores" if place else "cache/torchtitan_dp/prepared")
    for fields in ([], ["--data.unit_field=None"]):
        main([*command, *place, *fields])
    first, second = names = stores.names(str(folder))
    (used,) = (s for s in (stores.load(str(folder / n)) for n in names) if s.facts["units"] == 6)
    stores.mark_used(used, str(tmp_path / "gone"))
    stores.mark_used(used, str(tmp_path))
    capsys.readouterr()
    main(["--list", *place])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == names
    assert all(" MB: 21 records of " in line for line in lines[:-1])
    others, of_units = sorted(lines[:-1], key=lambda line: "(gone)" in line)
    assert ", with bytes, vocabulary 258" in of_units
    assert of_units.endswith(f"; runs: {tmp_path}, {tmp_path / 'gone'} (gone)")
    assert others.endswith("; runs: none")
    assert f"; written {time.strftime('%Y-%m-%d')} " in others
    assert lines[-1].startswith(f"not private: 2 stores in {folder}")
    main(["--delete", second, *place])
    assert stores.names(str(folder)) == [first]
    with pytest.raises(SystemExit) as stopped:
        main(["--delete", "../notes.jsonl", *place])
    assert stopped.value.code == 2
    assert "error: --delete ../notes.jsonl: no such store in " in capsys.readouterr().err
    main(["--delete", "all", *place])
    assert stores.names(str(folder)) == []
    assert capsys.readouterr().out == f"not private: erased {folder / first}\n"


def test_a_path_of_several_that_names_no_file_is_refused(
    command: list[str], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(SystemExit):
        main([*command, f"--training.dataset_path={tmp_path}/notes.jsonl,{tmp_path}/more/*.json"])
    assert f"training.dataset_path = '{tmp_path}/more/*.json' holds no" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mistake", ["--data.text_field=other", "--data.unit_field=whom", "--data.store=/proc/none"]
)
def test_mistakes_are_one_line_and_leave_no_store(
    command: list[str], mistake: str, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, mistake])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    key, value = mistake.removeprefix("--").split("=")
    assert (out, f"error: {key} = '{value}': " in err) == ("", True)
    folder = tmp_path / "cache/torchtitan_dp/prepared"
    assert not folder.exists() or stores.names(str(folder)) == []


def test_samples_are_shown_as_the_model_gets_them(tmp_path: Path, capsys: Any) -> None:
    rows = [{"ask": "2 + 2?", "note": "4\x07."}, {"ask": "x" * 99, "note": "y" * 99}]
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    terms = (str(CONFIG), "--training.dataset=jsonl", f"--training.dataset_path={path}")
    fields = ("--data.text_field=note", "--data.prompt_field=ask", "--training.seq_len=64")
    held = ("--data.heldout_fraction=0", "--validation.no-enable", f"--data.store={tmp_path}/s")
    main([*terms, *fields, *held, "--show=5", "--training"])
    out = capsys.readouterr().out
    # The prompt and the mark of begin are read, the answer and the mark of end learned; a control
    # character is written out.
    assert "\n<bos>2 + 2?⟦4\\x07.<eos>⟧\n" in out
    assert "sample 1: 11 of its unit's 11 tokens; 4 are targets" in out
    assert out.count("x") - out.count("\\x") == 64 // 4
    main([*terms, *fields, *held, "--show=5"])  # none is held out
    assert capsys.readouterr().out == out
