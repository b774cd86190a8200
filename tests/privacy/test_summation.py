"""Row 49: an fp32 sum can be moved by more than C, and by no more than is said."""

import math

import pytest
import torch
import torch.nn as nn

from torchtitan_dp.gradients.clipped_sum import ClippedSum, Place
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.privacy.clipping import ClipPolicy, fp32_sum_excess

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
