"""The experiment's own arithmetic: leaks, the split, what is run again, the page's tables."""

from pathlib import Path

from scripts import experiment

DOCS = Path(__file__).parent.parent / "docs"


def lines(*words: str) -> str:
    """A file of lines that are long enough to tell whose they are."""
    return "\n".join(f"this line belongs to nobody but {word}" for word in words)


def test_a_folder_is_held_out_as_a_whole_and_none_is_in_both():
    files = {f"package/{i % 50}/{i}.py": lines(str(i)) for i in range(500)}
    train, heldout = experiment.split(files)
    assert len(train) + len(heldout) == 500
    assert 20 <= len(heldout) <= 200
    folders = [{str(Path(path).parent) for path in part} for part in (train, heldout)]
    assert not folders[0] & folders[1]


def test_held_out_files_that_training_has_too_are_left_out():
    train = {"a.py": lines("one", "two", "three")}
    heldout = {"copy.py": lines("one", "two", "x"), "own.py": lines("one", "y", "z")}
    assert list(experiment.without_siblings(heldout, train)) == ["own.py"]
    text = "# Copyright 2026 by somebody, all rights\nreturn\n    " + lines("one")
    assert experiment.telling([text]) == {lines("one")}


def test_the_page_has_the_tables_of_its_runs():
    page = (DOCS / "results.md").read_text()
    made = experiment.tables(DOCS)
    on_the_page = {name: made[name] for name in experiment.ON_THE_PAGE}
    assert experiment.filled_in(page, on_the_page) == page
    best = "| ε = 8, all weights | 32 × 16 | 16 bands | MomentumSGD, β₁ = 0.5 | 1 | 0.024 | 0.483 |"
    assert f"{best} 3.671 (3.657–3.699) |" in made["main"]
    assert "beside them: both (10): -0.31; all weights (5): 0.90; LoRA" in made["splits"]
    cut = experiment.filled_in(page, {"main": "cut"})
    assert cut != page
    assert experiment.filled_in(cut, on_the_page) == page
