"""Qwen3: its released sizes, and every method's sum is the loop's."""

import pytest

from torchtitan_dp.models.families import on_meta, parameter_count
from torchtitan_dp.models.qwen3 import FLAVORS


@pytest.mark.parametrize(
    "name, size",
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
    ],
)
def test_flavors_have_the_released_sizes(name: str, size: int) -> None:
    assert parameter_count(FLAVORS[name]) == size


def test_selfcheck_keeps_the_size_of_heads() -> None:
    """0.6B has 16 heads of 128 in a model of 1,024."""
    small = FLAVORS["0.6B"].with_heads(4, 2, n_layers=2)
    assert (small.dim, small.head_dim, small.head_size, small.hidden_dim) == (512, 128, 128, 768)
    assert on_meta(small).layers["0"].attention.wq.weight.shape == (512, 512)
