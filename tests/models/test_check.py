"""What a start is told of its model and clip groups, and the choice of kernels by both."""

import pytest

from tests import build
from tests.processes.runs import CONFIG
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import flavor
from torchtitan_dp.models.parallelize import takes_cudnn
from torchtitan_dp.train.check import check_model


def mistake(*options: str) -> str:
    """What `check_model` says of a start with these options; "" if nothing."""
    try:
        config = load_config(["--job.config_file", str(CONFIG), *options], 1)
        check_model(config, decide_start(config))
    except ValueError as error:
        return str(error)
    return ""


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
    config = build.config(*options, degrees=(1, 1, cp))
    assert takes_cudnn(config, flavor("8B")) == taken
