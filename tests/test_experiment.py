"""The experiment's own arithmetic: leaks, the split, what is run again, the page's tables."""

from pathlib import Path

from scripts import experiment

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_has_the_tables_of_its_runs():
    page = (DOCS / "results.md").read_text()
    made = experiment.tables(DOCS)
    on_the_page = {name: made[name] for name in experiment.ON_THE_PAGE}
    assert experiment.filled_in(page, on_the_page) == page
    best = "| ε = 8, all weights | 32 × 16 | 16 bands | MomentumSGD, β₁ = 0.5 | 1 | 0.012 | 0.483 |"
    assert f"{best} 3.162 (3.156–3.195) |" in made["main"]
    cut = experiment.filled_in(page, {"main": "cut"})
    assert cut != page
    assert experiment.filled_in(cut, on_the_page) == page
