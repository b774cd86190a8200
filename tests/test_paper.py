"""The paper's tables: what is predicted of the plain step is what it takes."""

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split

from scripts.benchmarking.plain_step import PlainStep
from tests.plan.test_memory import assert_predicted, small, with_fake_tensors, with_real_tensors
from tests.processes import forks
from tests.processes.ranks import on_ranks


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
