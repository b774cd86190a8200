"""Which releases are tested: the table of docs/install.md, and the warning about all others."""

import importlib.metadata
import platform
from pathlib import Path

import pytest

from scripts.versions import PAGE, TABLE
from tests.processes.runs import arguments
from torchtitan_dp.base.process import RELEASES, minor, untested
from torchtitan_dp.config.load import load_config
from torchtitan_dp.train.check import notices


def test_the_table_has_exactly_the_tested_releases_and_no_failure() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[2].splitlines()]
    quick = [row for row in rows if row[3] == "quick"]
    assert sorted({minor(row[0]) for row in quick}) == sorted(RELEASES["torch"])
    assert sorted({minor(row[1]) for row in quick}) == sorted(RELEASES["Python"])
    assert {minor(row[2]) for row in rows} <= {*RELEASES["transformers"]}
    assert {row[-1] for row in rows} == {"0"}


def test_an_untested_release_is_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "version", {"torch": "2.13.0+cpu", "transformers": "5.23.0"}.__getitem__
    )
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
    assert untested() == []
    other = {"torch": "2.1.0a0+git", "transformers": "5.17.0"}
    monkeypatch.setattr(importlib.metadata, "version", other.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: "3.15.0")
    python, torch, transformers = untested()
    assert python.startswith("warning: Python 3.15.0 was not tested (3.10, 3.11")
    assert torch.startswith("warning: torch 2.1.0a0+git was not tested (2.11, ")
    assert torch.endswith(" selfcheck passes")
    assert transformers.startswith("warning: transformers 5.17.0 was not tested (5.20, 5.23")


def test_a_plan_and_a_start_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RELEASES, "torch", ("1.0",))
    lines = notices(load_config(arguments(tmp_path / "out", tmp_path / "data"), 1))
    assert any(" was not tested (1.0 were)" in line for line in lines)
