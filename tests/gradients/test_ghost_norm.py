"""Ghost norms against the norms of the gradients that the same factors write."""

import math

import pytest
import torch

from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients.ghost_norm import is_cheaper, squared_norms
from torchtitan_dp.gradients.operands import Products, Rows

B, T, P, D = 3, 9, 13, 5
PARTS = ("products", "scaled", "rows")


def factors(kind, seed=0, dtype=torch.float32, tokens=T):
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(B, tokens, D, generator=generator).to(dtype)
    if kind == "rows":
        drawn = torch.randint(0, P, (B, tokens), generator=generator)
        drawn[1] = 3  # one token all over a sample
        return Rows(drawn, right)
    left = torch.randn(B, tokens, P, generator=generator).to(dtype)
    factor_B = torch.tensor([1.0, -2.5, 0.125]) if kind == "scaled" else None
    return Products(left, right, factor_B)


def gradient(one):
    """In fp64: (B, P, D)."""
    if isinstance(one, Rows):
        left = torch.nn.functional.one_hot(one.left, P).double()
    else:
        left = one.left.double()
        if one.factor_B is not None:
            left = left * one.factor_B.double()[:, None, None]
    return left.mT @ one.right.double()


def truth(parts):
    return sum(map(gradient, parts)).flatten(1).square().sum(1)


CASES = [[one] for one in PARTS] + [["products", "rows"], ["scaled", "rows"], list(PARTS)]
CASES += [["rows", "rows"], ["products", "products"]]


@pytest.mark.parametrize("block_elements", [1, 40, 2**24])
@pytest.mark.parametrize("kinds", CASES, ids="+".join)
def test_row28_a_sum_of_layers_has_the_norm_of_its_gradient(kinds, block_elements):
    """Cross terms too; whatever the blocks."""
    parts = [factors(kind, seed) for seed, kind in enumerate(kinds)]
    found = squared_norms(parts, None, block_elements=block_elements)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, truth(parts), rtol=1e-6, atol=0)


def test_row13_factors_of_16_bits_are_multiplied_exactly():
    """The norm is that of what these very factors write, not of a rounded product of theirs."""
    parts = [factors("products", dtype=torch.bfloat16), factors("rows", 1, torch.bfloat16)]
    torch.testing.assert_close(squared_norms(parts, None), truth(parts), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row22_a_sample_that_is_no_number_is_alone(value):
    clean, poisoned = factors("products"), factors("products")
    poisoned.left[1, 4, 2] = value
    found, expected = squared_norms([poisoned], None), squared_norms([clean], None)
    assert not torch.isfinite(found[1])
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_the_published_rule():
    """2 T^2 < P D: Llama 3.1 8B's output layer below some 16k tokens (LongShield, section 2)."""
    output = torch.Size((128_256, 4_096))
    assert is_cheaper(16_000, output)
    assert not is_cheaper(16_384, output)
    assert not is_cheaper(4, torch.Size((4, 8)))  # as dear is not cheaper


def over_cp(kinds, block_elements):
    """The sum of the ranks' parts, of T tokens on each, and the most numbers in a block."""
    from torch import distributed as dist

    from torchtitan_dp.gradients import ghost_norm

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [factors(kind, seed, tokens=T * ranks) for seed, kind in enumerate(kinds)]
    scales = [torch.tensor([1.0, 3.0, -0.5]) * (1 + other) for other in range(ranks)]
    mine, true = [], 0
    for one in whole:
        for other in range(ranks):
            tokens = slice(other * T, (other + 1) * T)
            part = type(one)(one.left[:, tokens], one.right[:, tokens])
            if isinstance(one, Products) and one.factor_B is not None:  # other ones on each rank
                part = Products(part.left, part.right, scales[other])
            true = true + gradient(part)
            if other == rank:
                mine.append(part)
    sizes, gather = [0], ghost_norm.gather_from_all

    def watched(input, group):
        gathered = gather(input, group)
        sizes.append(gathered.numel())
        return gathered

    ghost_norm.gather_from_all = watched
    try:
        found = squared_norms(mine, dist.group.WORLD, block_elements=block_elements)
    finally:
        ghost_norm.gather_from_all = gather
    dist.all_reduce(found)
    return found, true.flatten(1).square().sum(1), max(sizes)


@pytest.mark.thorough_cases("*-200")
@pytest.mark.parametrize("block_elements", [200, 2000, 2**24])
@pytest.mark.parametrize("kinds", CASES, ids="+".join)
def test_row01_pairs_across_ranks_belong_to_it(kinds, block_elements):
    for found, expected, largest in on_ranks(2, over_cp, kinds, block_elements):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert largest <= block_elements  # so memory is bounded, however long a sample is
