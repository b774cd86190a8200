"""The plain loop: the paper's algorithm, and independent of the code that is held against it."""

import math

import pytest
import torch

from tests.test_imports import PACKAGE, imported
from torchtitan_dp.privacy.clipping import clip_policy
from torchtitan_dp.privacy.settings import Privacy
from torchtitan_dp.selfcheck import reference

A, B = torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0]])
GRADIENT = {"x.a": A, "y.b": B}  # of norm 5


def test_it_takes_nothing_from_the_code_that_it_checks():
    names = list(imported(PACKAGE / "selfcheck/reference.py"))
    assert not [name for name in names if ".gradients" in name or ".privacy" in name]


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, (0.2, 0.2)),
        ({"max_grad_norm": 6.0}, (1.0, 1.0)),
        ({"clip_function": "automatic"}, (1 / 5.01, 1 / 5.01)),
        ({"group_of": lambda name: name}, (0.5**0.5 / 3, 0.5**0.5 / 4)),
    ],
    ids=["vanilla", "not clipped", "automatic", "two groups"],
)
def test_each_sample_is_clipped_and_added(options, factors):
    total = reference.reference_sum([GRADIENT, GRADIENT], **{"max_grad_norm": 1.0, **options})
    for name, factor in zip(GRADIENT, factors, strict=True):
        assert torch.allclose(total[name], 2 * factor * GRADIENT[name].double())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_counts_as_0(bad):
    total = reference.reference_sum([{"x.a": A * bad, "y.b": B}, GRADIENT], 5.0)
    assert reference.relative_error(total, GRADIENT) < 1e-12


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "per_block"])
def test_its_groups_are_those_of_the_configuration(clipping):
    names = ["a.w", "a.bias", "c.d.w", "m.layers.0.e.0.w", "m.layers.0.b.w", "m.layers.10.b.w"]
    group_of = reference.group_names(clipping)
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(group_of(name), []).append(name)
    expected = clip_policy(names, Privacy(clipping=clipping)).members
    assert {tuple(group) for group in found.values()} == set(expected)
