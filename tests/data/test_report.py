"""The report of a configuration's records: exact figures, every line labelled."""

import json
from pathlib import Path

import pytest

from torchtitan_dp.data import __main__ as report

TOML = str(Path(__file__).parents[2] / "train_configs" / "llama3_debug.toml")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"who": i % 5, "note": "x" * 10 * (i % 5)} for i in range(20)]
    rows += [{"who": 9, "note": 7}]  # no text
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(TOML, "--training.dataset=jsonl", f"--training.dataset_path={path}"),
        *("--data.text_field=note", "--data.unit_field=who", "--training.seq_len=64"),
        *("--data.heldout_fraction=0", "--validation.no-enable", "--json=-"),
    ]


def test_figures_and_labels(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report.main(command)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["records"], found["units"], found["train_units"]) == (21, 6, 6)
    # Four notes of 10 i bytes each: marks of begin and end stand around every note with text.
    tokens = sorted([0, 0] + [4 * (10 * i + 2) for i in range(1, 5)])
    assert found["tokens_quantiles"]["100"] == tokens[-1] == 168
    assert found["empty_units"] == 2
    assert found["undecodable_records"] == 1
    (own,) = [row for row in found["by_length"] if row["seq_len"] == 64]
    assert [row["seq_len"] for row in found["by_length"]] == [16, 32, 64, 128, 256]  # 168 tokens
    assert own["longer_units"] == sum(t > 64 for t in tokens) / 6
    assert own["tokens_beyond"] == sum(max(t - 64, 0) for t in tokens) / sum(tokens)
    assert own["tokens_per_sample"] == sum(min(t, 64) for t in tokens) / 6
    lines = err.splitlines()
    assert len(lines) > 5
    assert all(line.startswith(("not private: ", "warning (not private): ")) for line in lines)
    assert any("(training.seq_len): " in line for line in lines)


def test_longer_samples_than_any_unit_are_left_out(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([*command, "--training.seq_len=1024"])
    found = json.loads(capsys.readouterr().out)
    assert [row["seq_len"] for row in found["by_length"]] == [256, 1024]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--units=0"], "--units = 0: must be 1 or more"),
        (
            ["--data.text_field=other"],
            "data.text_field = 'other': none of the 6 units has a target",
        ),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main([*command, *options])
    assert stopped.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err
