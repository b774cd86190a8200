"""The references in the documents are those that the code gives."""

import dataclasses
from pathlib import Path

import pytest

from scripts.reference import config_reference as markdown
from scripts.reference import insert, main, privacy_reference
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import schema

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- config reference: begin -->", "<!-- config reference: end -->"


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


def test_write_changes_only_what_is_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "R.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    main(["--write", str(file)])
    written = file.read_text(encoding="utf-8")
    assert written == f"before\n{BEGIN}\n\n{markdown()}\n\n{END}\nafter\n"
    main(["--write", str(file)])
    assert file.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_file_without_the_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "R.md"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["--write", str(file)])
    assert stop.value.code == 2
    assert file.read_text(encoding="utf-8") == text
