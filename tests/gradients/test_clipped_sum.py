"""`ClippedSum` alone, given shards by hand on a cp mesh: what ranks decide, they decide as one."""

import math

import pytest
import torch

from tests import build
from tests.processes.ranks import on_ranks


def sum_of(value):
    """The sum of a sample whose one bad element lies on cp rank 0, and of a good one; and norms."""
    total = build.build((1, 1, 2), "--privacy.gradient_method=grad_sample").gradients.clipped_sum
    first = torch.distributed.get_rank() == 0

    def shards(bad):
        each = [torch.full((1, *bundle.shape), 1e-3) for bundle in total._bundles]
        if bad and first:
            each[0][0, 0, 0] = value
        return each

    valid_B = torch.tensor([True])
    clips = [total.add(shards(True), valid_B), total.add(shards(False), valid_B)]
    both = {n: t.clone() for n, t in total.take().items()}
    total.reset()
    total.add(shards(False), valid_B)
    good = total.take()
    same = all(torch.equal(both[name], good[name]) for name in good)
    total.reset()
    return same, clips[0].rejected_B.item(), clips[1].norm_B.item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row22_a_sample_that_one_rank_sees_to_be_bad_is_rejected_by_all(value):
    """Rejected on one rank only, the others' parts of it would stay in the sum."""
    results = on_ranks(2, sum_of, value)
    assert results[0] == results[1]
    same, rejected, norm = results[0]
    assert same
    assert rejected
    assert math.isfinite(norm)
