"""The references in the documents are those that the code gives."""

import dataclasses
from pathlib import Path

import pytest

from scripts.reference import config_reference as markdown
from scripts.reference import insert, privacy_reference
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import schema

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["docs/configuration.md", "docs/privacy_json.md"])
def test_a_document_is_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == insert(text), f"run: python scripts/reference.py --write {name}"


def test_every_key_is_listed_once() -> None:
    for key in schema.KEYS:
        assert f"\n{privacy_reference()}".count(f"\n- `{key.name}` (") == 1
    for section in dataclasses.fields(JobConfig):
        _, _, rest = markdown().partition(f"**`[{section.name}]`**")
        table = rest.split("**`[")[0]
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            assert table.count(f"\n- `{field.name}` (") == 1
