"""The paper's tables: its figures, what is predicted of its lines and how, and the page."""

import json
import types

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split

from scripts.benchmarking import paper
from scripts.benchmarking.plain_step import PlainStep
from scripts.benchmarking.processes import Journal
from tests.plan.test_memory import assert_predicted, small, with_fake_tensors, with_real_tensors
from tests.processes import forks
from tests.processes.ranks import on_ranks


def test_predictions_are_not_made_twice_and_go_to_what_is_there(tmp_path, monkeypatch):
    asked, path = [], tmp_path / "tables.json"
    monkeypatch.setattr(paper, "alone", lambda module, task: asked.append(task) or {"flops": 2.0})
    kept = {"3": {"measured": {"1B": {"rows": [1]}}}, "4": {"predicted": {"1B": {"rows": [4]}}}}
    path.write_text(json.dumps({"paper_tables": kept}))
    terms = {"json": path, "table": "4", "parts": "predicted", "models": "8B", "arms": None}
    options = types.SimpleNamespace(**terms)
    first = paper.run(options, [], Journal(tmp_path / "journal"))
    assert [len(next(first)["4"]["predicted"]["8B"]["rows"]) for _ in range(3)] == [1, 2, 3]
    *_, found = paper.run(options, [], Journal(tmp_path / "journal"))
    assert len(asked) == len(found["4"]["predicted"]["8B"]["rows"]) == 10
    assert found["3"] == kept["3"]
    assert found["4"]["predicted"]["1B"] == {"rows": [4]}
    options.models = "9B"
    with pytest.raises(ValueError, match="--models 9B: choose from 1B, 3B, 8B"):
        next(paper.run(options, [], Journal()))


@pytest.mark.thorough_cases("FSDP", "one rank")
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (2, ["--activation_checkpoint.mode=full", "--training.local_batch_size=2"]),
        (2, ["--parallelism.context_parallel_degree=1"]),
    ],
    ids=["one rank", "ring, recomputed", "FSDP"],
)
def test_predicted_is_what_a_plain_step_takes(world_size, overrides):
    given = small(*overrides, "--privacy.no-enable"), world_size, PlainStep
    predicted, _ = forks.call(with_fake_tensors, *given)
    tracked, allocated = on_ranks(world_size, with_real_tensors, *given)[0]
    assert_predicted(predicted, tracked, allocated)
