"""Qwen3: its released sizes, and every method's sum is the loop's."""

import pytest
import torch

from tests import build
from tests.gradients.loop import check
from torchtitan_dp.models.families import on_meta, parameter_count
from torchtitan_dp.models.lora import LoRA
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


METHODS = [("microbatch", 1), ("grad_sample", 2), ("ghost", 2)]


@pytest.mark.parametrize("method, samples", METHODS)
def test_adapters(method: str, samples: int) -> None:
    options = f"--privacy.gradient_method={method}", f"--training.local_batch_size={samples}"
    lora = LoRA(2, 4.0, ("wq", "wv", "w2"))
    check((1, 1, 2), *options, family="qwen3", lora=lora, tolerance=2e-5)


def test_initial_weights_are_equal_on_every_start() -> None:
    first, second = (build.reference_model(build.QWEN) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert sum(p.numel() for p in on_meta(build.QWEN).parameters()) > 0


def test_selfcheck_keeps_the_size_of_heads() -> None:
    """0.6B has 16 heads of 128 in a model of 1,024."""
    small = FLAVORS["0.6B"].with_heads(4, 2, n_layers=2)
    assert (small.dim, small.head_dim, small.head_size, small.hidden_dim) == (512, 128, 128, 768)
    assert on_meta(small).layers["0"].attention.wq.weight.shape == (512, 512)
