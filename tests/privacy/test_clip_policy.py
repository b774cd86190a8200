"""Groups of parameters that are clipped apart divide a gradient, and together count at most C."""

import math
from dataclasses import dataclass

import pytest
import torch

from torchtitan_dp.privacy.clipping import ClipPolicy, clip, clip_policy
from torchtitan_dp.privacy.settings import Privacy

NAMES = ["embedding.weight", "layers.0.wq.weight", "layers.0.wq.bias", "layers.1.wq.weight"]


def by_patterns(patterns):
    return Privacy(clipping="per_layer", clipping_groups=patterns)


def test_flat_is_one_group_bound_by_C():
    policy = clip_policy(NAMES, Privacy(max_grad_norm=0.5))
    assert policy.members == (tuple(NAMES),)
    assert policy.is_flat
    assert policy.bounds == (0.5,)


def test_a_layer_is_a_module_that_holds_parameters():
    policy = clip_policy(NAMES, Privacy(clipping="per_layer"), max_grad_norm=2.0)
    expected = (("embedding.weight",), tuple(NAMES[1:3]), ("layers.1.wq.weight",))
    assert policy.members == expected
    assert policy.bounds == (2 / math.sqrt(3),) * 3


def test_groups_of_patterns_take_what_those_before_left():
    policy = clip_policy(NAMES, by_patterns(["layers.0.*", "*"]))
    assert policy.members == (tuple(NAMES[1:3]), (NAMES[0], NAMES[3]))


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
        clip_policy(NAMES, by_patterns(patterns))


@pytest.mark.parametrize("clip_function", ["vanilla", "automatic"])
@pytest.mark.parametrize("layers", [1, 7, 300])
def test_row02_a_sample_that_is_large_in_every_layer_counts_at_most_C(layers, clip_function):
    C = 0.7
    privacy = Privacy(max_grad_norm=C, clipping="per_layer", clip_function=clip_function)
    policy = clip_policy([f"{layer}.weight" for layer in range(layers)], privacy)
    squares_GB = torch.logspace(2, 12, layers, dtype=torch.float64)[:, None] * C**2
    valid_B = torch.ones(1, dtype=torch.bool)
    clipped = policy.clip(squares_GB, valid_B)
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


@dataclass(frozen=True)
class Unequal(ClipPolicy):
    """Bounds of 3/5 and 4/5 of C."""

    @property
    def bounds(self):
        return 0.6 * self.max_grad_norm, 0.8 * self.max_grad_norm


def test_each_group_is_clipped_to_its_own_bound_by_name_and_at_once():
    policy = Unequal((("a",), ("b",)), 2.0)
    squares_GB = torch.tensor([[9.0, 1.0], [100.0, 4.0]], dtype=torch.float64)
    valid_B = torch.ones(2, dtype=torch.bool)
    clipped = policy.clip(squares_GB, valid_B)
    norms_GB = clipped.factor_B.double() * squares_GB.sqrt()
    assert torch.allclose(norms_GB, torch.tensor([[1.2, 1.0], [1.6, 1.6]]).double(), atol=2e-5)
    assert clipped.exceeds_B.tolist() == [[True, False], [True, True]]
    for group in (0, 1):
        apart = policy.clip(squares_GB[group : group + 1], valid_B, group)
        assert torch.equal(apart.factor_B[0], clipped.factor_B[group])
    with pytest.raises(AssertionError):
        policy.clip(squares_GB[:1], valid_B)  # of which group?
