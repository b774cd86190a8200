"""Words that make prose hard to read stay out of the package and its documents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchtitan_dp"
WORDS = re.compile(
    r"\b(told|tells|whoever)\b|\bas of `|\"\"\"(Holds?|Gives|Tells?) |what is drawn from"
    r"|\bleave it away\b|\bmend (it|them|that)\b|(releasing|auditing)\.\w+",
    re.IGNORECASE,
)
TO_DO = {"checkpoint", "config", "models", "release"}
TO_DO |= {"baseline.py", "train_spec.py"}
DOCUMENTS = ["README.md", "CHANGELOG.md", "docs/sharp_edges.md", "docs/README.md"]
DOCUMENTS += ["docs/running.md", "docs/extending.md", "docs/architecture.md", "docs/data.md"]


def cleaned() -> list[str]:
    """List the files of rooms that are not left to do, and the documents."""
    files = (file.relative_to(PACKAGE) for file in sorted(PACKAGE.rglob("*.py")))
    done = [f"torchtitan_dp/{file}" for file in files if file.parts[0] not in TO_DO]
    return done + DOCUMENTS


@pytest.mark.parametrize("name", cleaned())
def test_words_that_stay_out(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [f"{n}: {line}" for n, line in enumerate(lines, 1) if WORDS.search(line)]


def test_rooms_to_do_exist() -> None:
    assert not [name for name in TO_DO if not (PACKAGE / name).exists()]
