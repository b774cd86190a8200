"""V1 and V2 equal a one-process loop of single samples, on every mesh and at every MBS."""

import pytest

from tests.gradients.loop import check

METHOD = "--privacy.gradient_method=grad_sample"
V1, V2 = "--privacy.no-shard_grad_samples", "--privacy.shard_grad_samples"


def mbs(samples: int) -> str:
    return f"--training.local_batch_size={samples}"


@pytest.mark.parametrize("variant", [V1, V2])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize(
    "degrees",
    [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)],
    ids=str,
)
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_every_mesh(degrees, batch_size, variant, tied):
    """5 samples: the last microbatches are padded."""
    check(degrees, METHOD, variant, mbs(batch_size), samples=5, tie_embeddings=tied == "tied")
