"""Samples of every format, reading and way to take a unit, as commit a92ccd9 made them."""

import json
from pathlib import Path

import pytest

from tests.references.samples import CASES, digest, write, write_tokenizers

REFERENCE = json.loads((Path(__file__).parent / "samples_a92ccd9.json").read_text())
BY_DEFAULT = {"48": ("marks", "plain"), "300": ("no_marks", "marked")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "data"
    write(folder)
    write_tokenizers(folder)
    return folder


def marks(case: str) -> tuple[pytest.MarkDecorator, ...]:
    *_, tokenizer, units, seq_len = case.split(", ")
    is_chosen = tokenizer in BY_DEFAULT[seq_len] and units in ("concat", "three")
    return () if is_chosen else (pytest.mark.thorough,)


@pytest.mark.parametrize("case", [pytest.param(c, marks=marks(c)) for c in CASES])
def test_samples_are_those_of_a92ccd9(case: str, folder: Path) -> None:
    assert digest(case, folder) == REFERENCE[case]
