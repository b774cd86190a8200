"""The experiment's own arithmetic: leaks, the split, what is run again, the tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.experiments import corpus, report, runs
from scripts.experiments.arms import RANK, Arm, arms, groups, noise, private, split_over
from scripts.experiments.evaluate import by_bucket, token_losses
from scripts.experiments.ranks import spearman
from torchtitan_dp.models.llama3.model import Llama, LlamaArgs
from torchtitan_dp.plan.signal import noise_of

DOCS = Path(__file__).parent.parent / "docs"


def lines(*words: str) -> str:
    """A file of lines that are long enough to tell whose they are."""
    return "\n".join(f"this line belongs to nobody but {word}" for word in words)


def test_a_folder_is_held_out_as_a_whole_and_none_is_in_both():
    files = {f"package/{i % 50}/{i}.py": lines(str(i)) for i in range(500)}
    train, heldout = corpus.split(files)
    assert len(train) + len(heldout) == 500
    assert 20 <= len(heldout) <= 200
    folders = [{str(Path(path).parent) for path in part} for part in (train, heldout)]
    assert not folders[0] & folders[1]


def test_held_out_files_that_training_has_too_are_left_out():
    train = {"a.py": lines("one", "two", "three")}
    heldout = {"copy.py": lines("one", "two", "x"), "own.py": lines("one", "y", "z")}
    kept, dropped = corpus.without_siblings(heldout, train)
    assert (list(kept), dropped) == (["own.py"], 1)


def test_comments_and_short_lines_tell_nothing():
    text = "# Copyright 2026 by somebody, all rights\nreturn\n    " + lines("one")
    assert corpus.telling([text]) == {lines("one")}


def test_pieces_join_to_the_whole():
    texts = ["a" * 7000, "b" * 100, "c" * 13000]
    pieces = list(corpus.cut(texts))
    assert "".join(pieces) == "\n\n".join(texts)
    assert {len(piece) for piece in pieces[:-1]} == {corpus.PIECE_CHARACTERS}


def test_runs_have_names_of_their_own_that_say_all_settings():
    every = arms([])
    assert len({arm.name for arm in every}) == len(every)
    assert {arm.samples for arm in every if arm not in groups()["longer"]} == {Arm("none").samples}
    assert set(arms(["splits"])) == set(groups()["splits"])
    assert arms(["plain-full"]) == [a for a in every if a.name.startswith("plain-full")]


def test_noise_alone_comes_after_the_run_whose_noise_it_has(tmp_path):
    names = [arm.name for arm in arms(["main"])]
    for rank in (0, RANK):
        assert names.index(noise(rank).name) > names.index(private(rank).name)
    folder = runs.Folder(tmp_path)
    with pytest.raises(ValueError, match="first, whose noise"):
        runs.noise_of(folder, noise(0))
    folder.told("x").parent.mkdir()
    folder.told(private(0).name).write_text('{"privacy": {"noise_multiplier": 0.5}}')
    options = runs.tuning_options(folder, noise(0), runs.noise_of(folder, noise(0)))
    said = dict(zip(options[::2], options[1::2], strict=True))
    # the same noise: sigma C
    assert float(said["--privacy.noise_multiplier"]) * runs.TINY == pytest.approx(0.5)
    assert "--privacy.target_epsilon" not in said


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    folder, trained = runs.Folder(tmp_path), []
    monkeypatch.setattr(runs, "train", lambda options: trained.append(options))
    folder.told(private(0).name).parent.mkdir()
    folder.told(private(0).name).write_text('{"loss": 1.0}')
    assert runs.do(folder, private(0)) == {"loss": 1.0}
    assert not trained


def test_losses_are_those_of_each_place():
    model = Llama(LlamaArgs(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=64))
    model.init_weights()
    ids = torch.randint(0, 32, (20,))
    losses = token_losses(model, ids)
    # a token's loss depends on what comes before it alone
    assert torch.allclose(losses[:10], token_losses(model, ids[:11]), atol=1e-5)
    sums, counts = np.zeros(2048), np.zeros(2048)
    sums[:300], counts[:300] = 3.0, 2
    assert by_bucket(sums, counts) == [1.5, 1.5, *[0.0] * 6]


def test_noise_is_that_of_a_mean_over_the_batch_and_over_the_run():
    noise = noise_of(noise_multiplier=0.5, trained=10_000, batch=25, steps=16)
    assert (noise.in_step, noise.over_run) == (2.0, 0.5)
    torch.manual_seed(0)
    noises = 0.5 * torch.randn(16, 10_000) / 25
    assert float(noises.mean(0).norm()) == pytest.approx(0.5, rel=0.05)


def test_rank_correlation_is_that_of_ranks():
    assert spearman([1, 2, 3, 4], [10, 100, 101, 5000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def told(arm: Arm, loss: float) -> dict[str, Any]:
    noise = {"noise_multiplier": 0.5, "noise_norm": 2.0, "averaged_noise_norm": 1 / arm.batch}
    return {"name": arm.name, "loss": loss, "by_position": [loss] * 8, "privacy": noise}


def test_tables_hold_medians_and_the_share_of_the_gap():
    plains = [arm for arm in groups()["main"] if arm.kind == "plain" and arm.rank == 0]
    losses = dict(zip(plains, (2.0, 2.2, 1.9), strict=True))
    losses |= {Arm("none"): 4.0, private(0): 2.5}
    losses |= {split_over(private(0), steps): 3 - steps / 100 for steps in (64, 4)}
    made = report.tables({arm.name: told(arm, loss) for arm, loss in losses.items()})
    assert "| without privacy | all weights | 2.000 (1.900–2.200) | 3 | 100% |" in made["main"]
    assert "| ε = 8 | all weights | 2.500 | 1 | 75% | 0.500 |" in made["main"]
    assert "all splits: both (3): -1.00; all weights (3): -1.00" in made["splits"]
    page = "".join(f"a{report.BEGIN.format(n)}old{report.END.format(n)}b" for n in made)
    filled = report.filled_in(page, made)
    assert "old" not in filled
    assert report.filled_in(filled, made) == filled


def test_settings_that_the_plan_considers_are_ranked_over_all_epsilons_and_seeds():
    seeds = [split_over(private(0, seed=seed), 64) for seed in (1, 2, 3)]
    losses = dict(zip(seeds, (3.3, 3.1, 3.2), strict=True))
    losses |= {private(0): 3.0, private(0, epsilon=1.0): 3.6, split_over(private(0), 4): 9.0}
    rows = report.considered_rows({arm.name: told(arm, loss) for arm, loss in losses.items()})
    # few steps are left out; one row for the seeds of a setting
    assert sorted(row["loss"] for row in rows) == [3.0, 3.2, 3.6]


def test_the_page_has_the_tables_of_its_runs():
    page = (DOCS / "results.md").read_text()
    assert report.filled_in(page, report.tables(report.read(DOCS))) == page


def test_split_keeps_the_compute_and_scales_the_rate():
    arm = split_over(private(0), 4)
    assert arm.batch * arm.steps == private(0).batch * private(0).steps
    assert arm.lr == pytest.approx(2 * private(0).lr)
    assert json.dumps(vars(arm))
