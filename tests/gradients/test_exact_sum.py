"""Every gradient method into an exact sum: the loop's on every mesh, the same bits in any order.

Row 49: integers are added without rounding, over ranks too.
"""

import itertools
import math

import pytest
import torch

from tests.gradients.loop import check
from tests.processes.ranks import on_ranks

EXACT = ("--privacy.secure_noise", "--privacy.exact_sum")
GRAD_SAMPLE = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
METHODS = {
    "microbatch": (),
    "V1": (*GRAD_SAMPLE, "--privacy.no-shard_grad_samples"),
    "V2": GRAD_SAMPLE,
}
SAMPLES = 8


@pytest.mark.thorough_cases("*-V1")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_row49_the_exact_sum_is_the_loops(degrees, method):
    check(degrees, *EXACT, *METHODS[method], samples=5)


def sums(degrees, orders, overrides, C):
    """For each order of the same samples: the whole sums, as the accumulator has them."""
    from tests import build

    built = build.build(degrees, *overrides, max_grad_norm=C)
    tokens_NT, labels_NT = build.data(samples=SAMPLES)
    clipped_sum = built.gradients.clipped_sum
    found = []
    for order in orders:
        clipped_sum.reset()
        built.accumulate(tokens_NT[order], labels_NT[order])
        found.append({name: built.whole(name, flat) for name, flat in clipped_sum.take().items()})
    return found


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def orders(count=4):
    generator = torch.Generator().manual_seed(0)
    return [list(range(SAMPLES))] + [
        torch.randperm(SAMPLES, generator=generator).tolist() for _ in range(count - 1)
    ]


@pytest.mark.thorough_cases("(1, 4, 1)", "(2, 2, 1)")
@pytest.mark.parametrize(
    "degrees", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1)], ids=str
)
def test_row49_whichever_rank_a_sample_is_dealt_to_no_bit_changes(degrees):
    for found in on_ranks(math.prod(degrees), sums, degrees, orders(), EXACT, 0.5):
        assert all(value.dtype == torch.int64 for value in found[0].values())
        assert all(equal(found[0], other) for other in found[1:])


def test_row49_in_fp32_bits_do_change():
    """So the test above could fail."""
    for degrees in ((1, 1, 1), (1, 2, 1)):
        found = on_ranks(math.prod(degrees), sums, degrees, orders(), (), 0.5)[0]
        assert not all(equal(found[0], other) for other in found[1:])


@pytest.mark.thorough
def test_row49_more_ranks_change_no_bit():
    """What replicas add up has one layout, so clipped too. `dp_shard` lays gradients out anew, and
    norms are summed in another order: unclipped, since a factor may differ in its last bit."""
    meshes = {0.5: [(1, 1, 1), (2, 1, 1), (4, 1, 1)], 1e3: [(1, 1, 1), (1, 2, 1), (2, 2, 1)]}
    for C, (alone, *others) in meshes.items():
        (expected,) = on_ranks(1, sums, alone, orders(1), EXACT, C)[0]
        assert any((value != 0).any() for value in expected.values())
        for degrees in others:
            for found in on_ranks(math.prod(degrees), sums, degrees, orders(2), EXACT, C):
                assert all(equal(expected, other) for other in found)


def update(degrees, overrides):
    """What AdamW is handed, of a first step that has no microbatch, and of one that has some."""
    from tests import build
    from torchtitan_dp.optimizer import DPOptimizer

    built = build.build(degrees, *overrides, max_grad_norm=0.5)
    seen = []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            seen.append({n: p.grad.full_tensor().clone() for n, p in built.parameters.items()})

    dp = DPOptimizer(
        Recorder(list(built.parameters.values()), lr=0.0),
        built.parameters,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        expected_batch_size=1,
        summation=built.summation,
    )
    clipped_sum = built.gradients.clipped_sum
    for samples in (0, 3):
        if samples:
            built.accumulate(*build.data(samples=samples))
        dp.step(clipped_sum.take(), [(bytes([samples]) * 32, 1.0)])
        clipped_sum.reset()
    return seen


@pytest.mark.thorough_cases("microbatch-(2, 1, 2)")
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("method", ["microbatch", "V2"])
def test_row12_and_49_an_exact_step_is_a_secure_step_without_its_sums_rounding(degrees, method):
    """The same noise on every mesh, and before the first microbatch, when nothing is laid out."""
    from torchtitan_dp.privacy.secure_noise import grid

    world = math.prod(degrees)
    exact = on_ranks(world, update, degrees, (*EXACT, *METHODS[method]))
    secure = on_ranks(1, update, (1, 1, 1), (EXACT[0], *METHODS[method]))[0]
    for rank, step in itertools.product(range(world), range(2)):
        for name, gradient in exact[rank][step].items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient / grid(0.5), (gradient / grid(0.5)).round())
            torch.testing.assert_close(gradient, secure[step][name], rtol=0, atol=2 * grid(0.5))
    assert all(torch.equal(exact[0][0][name], secure[0][name]) for name in secure[0])
