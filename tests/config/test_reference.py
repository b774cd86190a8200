"""The references in the documents are those that the code gives."""

from pathlib import Path

import pytest

from scripts.reference import insert

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["docs/configuration.md", "docs/privacy_json.md"])
def test_a_document_is_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == insert(text), f"run: python scripts/reference.py --write {name}"
