"""Groups of parameters that are clipped apart divide a gradient, and together count at most C."""

import math

import pytest
import torch

from torchtitan_dp.privacy.clip_groups import clip_groups
from torchtitan_dp.privacy.clipping import clip

NAMES = ["embedding.weight", "layers.0.wq.weight", "layers.0.wq.bias", "layers.1.wq.weight"]


def test_flat_is_one_group_bound_by_C():
    groups = clip_groups(NAMES, 0.5)
    assert groups.members == (tuple(NAMES),)
    assert groups.is_flat
    assert groups.bound == 0.5


def test_a_layer_is_a_module_that_holds_parameters():
    groups = clip_groups(NAMES, 2.0, "per_layer")
    expected = (("embedding.weight",), tuple(NAMES[1:3]), ("layers.1.wq.weight",))
    assert groups.members == expected
    assert groups.bound == 2 / math.sqrt(3)


def test_groups_of_patterns_take_what_those_before_left():
    groups = clip_groups(NAMES, 1.0, "per_layer", ["layers.0.*", "*"])
    assert groups.members == (tuple(NAMES[1:3]), (NAMES[0], NAMES[3]))


@pytest.mark.parametrize(
    ("patterns", "mistake"),
    [
        (["layers.*"], "'embedding.weight' fits none of them"),
        (["*", "layers.*"], r"'layers\.\*' has no trained parameter"),
        (["*", "other"], "'other' has no trained parameter"),
    ],
)
def test_what_does_not_divide_the_parameters_is_refused(patterns, mistake):
    with pytest.raises(ValueError, match=mistake):
        clip_groups(NAMES, 1.0, "per_layer", patterns)


@pytest.mark.parametrize("clip_function", ["vanilla", "automatic"])
@pytest.mark.parametrize("layers", [1, 7, 300])
def test_row02_a_sample_that_is_large_in_every_layer_counts_at_most_C(layers, clip_function):
    C = 0.7
    groups = clip_groups([f"{layer}.weight" for layer in range(layers)], C, "per_layer")
    squares_GB = torch.logspace(2, 12, layers, dtype=torch.float64)[:, None] * C**2
    valid_B = torch.ones(1, dtype=torch.bool)
    clipped = clip(squares_GB, valid_B, max_grad_norm=groups.bound, clip_function=clip_function)
    added = (clipped.factor_B.double() * squares_GB.sqrt()).norm().item()
    assert 0.99 * C < added <= C
    whole = clipped.over_groups()
    assert whole.norm_B.item() == pytest.approx(squares_GB.sum().sqrt().item())
    assert whole.exceeds_B.tolist() == [True]


def test_row22_a_group_that_is_no_number_is_left_out_and_tells_of_the_sample():
    squares_GB = torch.tensor([[1.0, 1.0], [math.nan, 4.0]], dtype=torch.float64)
    clipped = clip(squares_GB, torch.tensor([True, True]), max_grad_norm=1.0)
    assert clipped.factor_B[1, 0] == 0
    whole = clipped.over_groups()
    assert whole.rejected_B.tolist() == [True, False]
    assert whole.exceeds_B.tolist() == [False, True]
