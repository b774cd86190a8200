"""A value of a CSV file above the limit: its record alone reads as nothing."""

from pathlib import Path

import pytest

from torchtitan_dp.data import formats


@pytest.mark.xfail(
    strict=True,
    raises=ValueError,
    reason="csv.field_size_limit: one value above MOST_ROW_BYTES refuses its file, and so the run",
)
def test_a_value_above_the_limit_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MOST_ROW_BYTES", 100)
    path = tmp_path / "a.csv"
    path.write_text(f'text\n"a"\n"{"x" * 101}"\n"b"\n')
    rows = formats.csv_rows(str(path), ["text"])
    assert list(rows) == [{"text": "a"}, None, {"text": "b"}]
