"""Clipping: what a sample adds is at most C, and exactly 0 if rejected; groups divide a gradient;
the rounding of the sum is bounded."""

import math
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
import torch._dynamo.testing
import torch.nn as nn

from torchtitan_dp.gradients.clipped_sum import ClippedSum, Place
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.privacy import clipping
from torchtitan_dp.privacy.clipping import (
    ClipFunction,
    ClipPolicy,
    add_clipped_,
    clip,
    clip_policy,
    fp32_sum_excess,
    squared_norm,
)
from torchtitan_dp.privacy.settings import Privacy

INF, NAN = math.inf, math.nan


def clipped(norms: list[float], valid: list[bool] | None = None, **options):
    squared_norm_B = torch.tensor(norms, dtype=torch.float64).square()
    valid_B = torch.tensor([True] * len(norms) if valid is None else valid)
    return clip(squared_norm_B, valid_B, **{"max_grad_norm": 0.5, **options})


def test_row18_and_22_padding_and_bad_norms_are_rejected():
    result = clipped([1.0, 1.0, NAN, INF, 1e300], [True, False, True, True, True])
    assert result.rejected_B.tolist() == [False, True, True, True, True]
    assert result.factor_B[1:].tolist() == [0.0] * 4


@pytest.mark.parametrize("factor", [0.0, NAN], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3.0], ids=str)
def test_row22_what_is_rejected_leaves_no_trace(value, factor):
    """By selection: 0 x NaN is NaN."""
    total, before = torch.arange(5.0), torch.arange(5.0)
    add_clipped_(total, torch.full((5,), value), torch.tensor(factor), torch.tensor(True))
    assert torch.equal(total, before)


def test_row13_a_sum_in_bf16_is_refused():
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        total, gradient = (torch.zeros(3, dtype=dtype) for dtype in dtypes)
        with pytest.raises(AssertionError):
            add_clipped_(total, gradient, torch.tensor(1.0), torch.tensor(False))
    with pytest.raises(AssertionError):
        squared_norm(torch.zeros(3, dtype=torch.bfloat16))


def test_row13_a_thousand_small_adds_match_fp64():
    generator = torch.Generator().manual_seed(0)
    total, exact = torch.full((500,), 1.0), torch.full((500,), 1.0, dtype=torch.float64)
    for _ in range(1000):
        gradient = 1e-3 * torch.rand(500, generator=generator)
        exact += gradient.double()
        add_clipped_(total, gradient, torch.tensor(1.0), torch.tensor(False))
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1, 100, 4096, 3 * 4096 + 5])
def test_squared_norms_are_those_of_fp64_rows(size):
    gradient_BN = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    expected_B = gradient_BN.double().square().sum(-1)
    torch.testing.assert_close(squared_norm(gradient_BN), expected_B, rtol=1e-6, atol=0)


def lost_in_fp32(period: int, large: int, small_square: float) -> torch.Tensor:
    """`large` ones at each period's start; each of the other squares is lost when added to one."""
    gradient = torch.full((2**18 + 100,), math.sqrt(small_square))
    for i in range(large):
        gradient[i::period] = 1.0
    return gradient


@pytest.mark.parametrize("clip_function", get_args(ClipFunction))
@pytest.mark.parametrize("period", [2**k for k in range(4, 15)])
def test_row13_no_gradient_is_added_with_more_than_C(period, clip_function):
    """A square of less than half a unit in the last place of the sum so far adds nothing to it."""
    terms = {"max_grad_norm": 0.5, "clip_function": clip_function}
    for large in (1, 2, 4, 8):
        for small_square in (5.9e-8, 3e-8, 2.9e-8, 1.2e-7, 1e-9):
            gradient = lost_in_fp32(period, large, small_square)
            assert squared_norm(gradient) >= gradient.double().square().sum() * (1 - 1.6e-5)
            clipped = clip(squared_norm(gradient[None]), torch.tensor([True]), **terms)
            total = torch.zeros_like(gradient)
            add_clipped_(total, gradient, clipped.factor_B[0], clipped.rejected_B[0])
            assert total.double().square().sum().sqrt() <= 0.5


def test_row13_any_order_of_summation_keeps_the_bound():
    """n non-negative terms lose at most a share n u, in any order: half in a norm; then a square
    root, the factor and the product round once each."""
    u = 2.0**-24
    worst = clipping._ROW * u / 2 + 4 * u
    assert worst < 0.8 * (1 - clipping._SAFETY)


def test_row22_an_overflow_stays_visible():
    gradient = torch.zeros(10_000)
    gradient[5000] = 3e38
    gradient[5001] = 3e38
    assert not torch.isfinite(squared_norm(gradient)) or squared_norm(gradient) > 1e76
    gradient[5000] = INF
    assert not torch.isfinite(squared_norm(gradient))


@pytest.mark.parametrize("clip_function", get_args(ClipFunction))
@pytest.mark.parametrize("max_grad_norm", [1e-2, 1e-5, 1e-7, 1e-9])
def test_a_factor_that_fp32_rounds_coarsely_is_no_factor(max_grad_norm, clip_function):
    """Norms near fp32's limit over a small C: a subnormal factor may be off by half of itself."""
    for norm in (1e30, 1e36, 1.4e38, 2.9e38, 3.4e38):
        found = clipped([norm], max_grad_norm=max_grad_norm, clip_function=clip_function)
        assert found.factor_B.double().item() * norm <= max_grad_norm
        assert found.rejected_B.item() == (found.factor_B.item() == 0)


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_views_are_added_to_with_one_rounding(threads, rejected):
    """In views that are not contiguous too; the gradient is kept."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 150_007, generator=generator)
    total_DN = whole[:, 3:100_003]
    gradient_DN = torch.randn(2, 100_000, generator=generator)
    factor, before = torch.tensor(0.3), gradient_DN.clone()
    expected = whole.clone()
    if not rejected:
        exact = total_DN.double() + before.double() * factor.double()
        expected[:, 3:100_003] = exact.float()
    torch.set_num_threads(threads)
    try:
        add_clipped_(total_DN, gradient_DN, factor, torch.tensor(rejected))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(whole, expected)
    assert torch.equal(gradient_DN, before)


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [0, 1])
def test_clip_and_add_on_cuda(offset):
    """The sum that the CPU has, in memory that is not aligned as well; NaN is left out."""
    gradient = torch.randn(2, 100_003, generator=torch.Generator().manual_seed(0))
    for rejected in (False, True):
        totals = [torch.ones(2, 100_010, device=device) for device in ("cpu", "cuda")]
        for total in totals:
            here = gradient.to(total.device)
            if rejected:
                here[0, 5] = NAN
            terms = torch.tensor(0.3, device=here.device), torch.tensor(rejected).to(here.device)
            add_clipped_(total[:, offset : offset + 100_003], here, *terms)
        torch.testing.assert_close(totals[1].cpu(), totals[0], rtol=1e-6, atol=1e-6)


# --- groups that are clipped apart ---------------------------------------------------------------

NAMES = ["embedding.weight", "layers.0.wq.weight", "layers.0.wq.bias", "layers.1.wq.weight"]


@pytest.mark.parametrize("groups", ["per_layer", "per_block"])
def test_a_group_is_a_module_that_holds_parameters_or_a_block(groups):
    policy = clip_policy(NAMES, Privacy(clipping=groups), max_grad_norm=2.0)
    assert policy.members == (("embedding.weight",), tuple(NAMES[1:3]), ("layers.1.wq.weight",))
    assert policy.bounds == (2 / math.sqrt(3),) * 3


def test_the_outermost_block_is_one_group():
    nested = ["model.layers.0.experts.1.w", "model.layers.0.norm.w", "model.layers.10.norm.w"]
    members = clip_policy(nested, Privacy(clipping="per_block")).members
    assert members == (tuple(nested[:2]), (nested[2],))


@pytest.mark.parametrize("clip_function", get_args(ClipFunction))
@pytest.mark.parametrize("layers", [1, 7, 300])
def test_row02_a_sample_that_is_large_in_every_layer_counts_at_most_C(layers, clip_function):
    C = 0.7
    privacy = Privacy(max_grad_norm=C, clipping="per_layer", clip_function=clip_function)
    policy = clip_policy([f"{layer}.weight" for layer in range(layers)], privacy)
    squares_GB = torch.logspace(2, 12, layers, dtype=torch.float64)[:, None] * C**2
    clipped = policy.clip(squares_GB, torch.ones(1, dtype=torch.bool))
    assert 0.99 * C < (clipped.factor_B.double() * squares_GB.sqrt()).norm().item() <= C
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


# --- row 49: an fp32 sum can be moved by more than C, and by no more than is said ----------------

P = 16  # values
C = 1.0001  # a gradient of norm 1 is not scaled


def total(gradients_NP):
    """The clipped sum of samples that one rank is given in this order, in fp64."""
    (values,) = gradients_NP.shape[1:]
    clipped_sum = ClippedSum(
        {"w": nn.Parameter(torch.zeros(values))},
        ReductionGroups(None, None, None),
        ClipPolicy((("w",),), C),
    )
    clipped_sum.lay_out([values], {"w": Place(0, 0, values)}, torch.device("cpu"))
    for gradients_BP in gradients_NP.split(1024):
        valid_B = torch.ones(len(gradients_BP), dtype=torch.bool)
        clipped_sum.add([gradients_BP[:, None].clone()], valid_B)
    return clipped_sum.take()["w"].double()


def adversarial(power, record):
    """3 * 2**power + 1 samples, along (1, …, 1) / sqrt(P), in units of the norm.

    The first 2**power add up to two units in the last place below 2**power, in each value's
    binade. Then comes the record: of norm `record`, or nothing. If it tips the sum over the power
    of two, every one of the tiny gradients that follow is less than half a unit in the last place
    and is rounded away; if not, it is more than half of one and is rounded to a whole one.
    """
    below = 2.0 ** (power - 24)  # fp32's unit in the last place below 2**power
    first = torch.ones(2**power)
    first[-1] -= 2 * below
    later = torch.full((2 * 2**power,), -below / 2 * (1 + 2.0**-10))
    norms_N = torch.cat([first, torch.tensor([record]), later])
    return norms_N[:, None] * torch.ones(P) / math.sqrt(P)


def moved(power, record):
    """By how much the record moves the sum, in multiples of C."""
    there, empty = (total(adversarial(power, r)) for r in (record, 0.0))
    return ((there - empty).norm() / C).item()


TIPS = {10: (2.0**-12, 0.125), 12: (2.0**-10, 2.001)}  # the record's norm, what it does in fp32


@pytest.mark.parametrize("power", TIPS)
def test_row49_in_fp32_a_tiny_record_moves_the_sum_far(power):
    """1,025 + 2,048 samples and 4,097 + 8,192: what the caveat counts."""
    record, expected = TIPS[power]
    samples = len(adversarial(power, record))
    assert samples == {10: 1_025 + 2_048, 12: 4_097 + 8_192}[power]
    by = moved(power, record)
    assert by == pytest.approx(expected, abs=3e-4)
    assert expected / 10 < by / (record + fp32_sum_excess(samples)) <= 1  # the bound, and its size


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_row49_the_bound_for_fp32_holds_for_sums_over_ranks(ranks):
    """The adversarial sequence on the last rank, and others' sums that go before it in a chain."""
    record, _ = TIPS[10]
    there, empty = (total(adversarial(10, r)).float() for r in (record, 0.0))
    other = total(adversarial(10, 0.0)).float()
    for _ in range(ranks - 1):
        there, empty = there + other, empty + other
    by = ((there.double() - empty.double()).norm() / C).item()
    assert by <= record + fp32_sum_excess(3_073, ranks)


def test_row49_the_bound_for_fp32_is_that_of_its_additions_one_by_one():
    """By the recurrence of its derivation, without the closed forms."""
    u = 2.0**-24
    for samples in (1, 2, 3, 100, 5_000):
        norm = error = 0.0
        for k in range(samples):
            norm = norm + 1 if k == 0 else (norm + 1) * (1 + u)
            error += 0 if k == 0 else norm * u
        local = error
        for ranks in (1, 2, 8):
            error, partial = local, norm
            for _ in range(ranks - 1):
                partial = (partial + norm) * (1 + u)
                error += partial * u
            bound = fp32_sum_excess(samples, ranks)
            assert 2 * error <= bound * (1 + 1e-9)
            assert bound <= 2 * error * 1.01 + 1e-12
    assert fp32_sum_excess(0) == fp32_sum_excess(1) == 0.0
    assert fp32_sum_excess(4_096) == pytest.approx(1, rel=1e-3)
