"""The experiment's own arithmetic: leaks, the split, what is run again, the page's tables."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_runs_are_taken_again_by_their_options_and_once(tmp_path, monkeypatch):
    (run,) = (
        r for r in experiment.read(DOCS, "earlier") if r["name"].startswith("noise8-C1-lora8")
    )
    ran = []

    def python(out, arguments):
        ran.append(arguments)
        (out / "runs" / run["name"]).mkdir(parents=True)
        published = json.dumps(run["privacy"] | {"epsilon": 7.5, "steps": 16})
        (out / "runs" / run["name"] / "privacy.json").write_text(published)

    monkeypatch.setattr(experiment, "python", python)
    monkeypatch.setattr(experiment, "heldout_losses", lambda *_: {"loss": 1.0})
    numbers = experiment.do(tmp_path, run, None)
    assert experiment.do(tmp_path, run, None) == numbers
    (arguments,) = ran
    assert "--job.config_file private.toml" in arguments
    assert "--privacy.max_grad_norm 0.0001" in arguments
    assert numbers["privacy"].keys() == {"epsilon", "delta", "noise_multiplier", "sample_rate"}
    assert numbers["privacy"]["epsilon"] == 7.5
    assert numbers["loss"] == 1.0


def test_losses_are_those_of_each_place():
    torch.manual_seed(0)
    table = torch.randn(32, 32)
    model = lambda input_ids: SimpleNamespace(logits=table[input_ids])  # noqa: E731
    ids = torch.randint(0, 32, (20,))
    expected = [-float(table[a].log_softmax(-1)[b]) for a, b in itertools.pairwise(ids)]
    assert experiment.token_losses(model, ids).tolist() == pytest.approx(expected, rel=1e-5)


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
