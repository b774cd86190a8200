"""What documents name is there: links and their anchors, paths, modules."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_dp"
ROOMS = tuple(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
)
NOT_HERE = (
    # What a run writes: into its folder, into the user's cache.
    "checkpoint/step-N/",
    "torchtitan_dp/prepared",
)
TOP = ("torchtitan_dp", "tests", "scripts", "docs", "examples", "train_configs", ".ci")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}"


@pytest.mark.parametrize("name", [page for page in PAGES if page != "CHANGELOG.md"])
def test_paths_are_there(name: str) -> None:
    missing = []
    for span in re.findall(r"`([^`\n]+)`", (ROOT / name).read_text()):
        for word in re.findall(r"(?<![\w<./~-])[\w.-]+/[\w./*-]*", span):
            top = word.partition("/")[0]
            if word in NOT_HERE or top not in (*TOP, "..", *ROOMS):
                continue
            folders = [ROOT] if top in TOP else [(ROOT / name).parent, PACKAGE]
            if not any(list(folder.glob(word)) for folder in folders):
                missing.append(word)
    assert not missing, f"{name} names {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_modules_are_there(name: str) -> None:
    for module in re.findall(r"-m (torchtitan_dp[\w.]*\w)", (ROOT / name).read_text()):
        assert importlib.util.find_spec(module), f"{name}: {module}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_tests_behind_known_pitfalls_are_there() -> None:
    """Each pitfall names rows of hazards that have a mutant, and so a test."""
    from tests.hazards.test_mutants import ROWS

    page = (ROOT / "docs" / "privacy.md").read_text()
    section = page.split("\n## Known pitfalls\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.search(r"\| [0-9, ]+ \|$", line)]
    assert len(rows) == 17
    for line in rows:
        cell = line.rpartition(" | ")[2]
        assert {int(number) for number in re.findall(r"\b[0-9]+\b", cell)} <= ROWS, line
