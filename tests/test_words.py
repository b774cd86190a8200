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
DOCUMENTS = ["README.md", "CHANGELOG.md", "docs/sharp_edges.md", "docs/README.md"]
DOCUMENTS += ["docs/running.md", "docs/extending.md", "docs/architecture.md", "docs/data.md"]


def files() -> list[str]:
    """List the files of the package, and the documents."""
    return [*(str(file.relative_to(ROOT)) for file in sorted(PACKAGE.rglob("*.py"))), *DOCUMENTS]


@pytest.mark.parametrize("name", files())
def test_words_that_stay_out(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [f"{n}: {line}" for n, line in enumerate(lines, 1) if WORDS.search(line)]
