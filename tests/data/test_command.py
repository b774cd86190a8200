"""The command that prepares records: exact figures, labelled lines, no store after a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.runs import CONFIG
from torchtitan_dp.data.__main__ import main


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
    for row in found["by_length"]:
        length = row["seq_len"]
        assert row["longer"] == sum(t > length for t in tokens) / 6
        assert row["tokens_per_sample"] == sum(min(t, length) for t in tokens) / 6
    lengths = [row["seq_len"] for row in found["by_length"]]
    assert 64 in lengths
    assert lengths[-1] >= tokens[-1]
    lines = err.splitlines()
    assert all(line.startswith(("not private: ", "warning (not private): ")) for line in lines)
    (of_length,) = (line for line in lines if "at training.seq_len = 64, " in line)
    assert (
        "one pass reads 56% of all tokens, and all draws reach 100%: 50% of units are" in of_length
    )
