"""The choice of kernels by a model and its lengths."""

import pytest

from tests import build
from torchtitan_dp.models.hugging_face import flavor
from torchtitan_dp.models.parallelize import takes_cudnn


@pytest.mark.parametrize(
    ("seq_len", "cp", "taken"),
    [
        (2**18, 1, True),
        (2**18 + 2, 1, False),  # the last tile of keys is not full
        (2**19, 1, False),  # 2^31 values of queries, of 8B's 4,096 a token
        (2**20, 4, True),
        (2**22, 8, False),
    ],
)
def test_cudnn_attends_on_a_ring_where_it_counts_and_fills_its_tiles(seq_len, cp, taken):
    options = [f"--training.seq_len={seq_len}", "--data.no-length_buckets"]
    assert takes_cudnn(build.config(*options, degrees=(1, 1, cp)), flavor("8B")) == taken
