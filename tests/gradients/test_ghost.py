"""Ghost norms against the gradients of the same factors, and their errors (rows 1, 13, 22, 28)."""

import math
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients import norms
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.ghost import GhostGradients, _Adding
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.gradients.norms import ExactNorms, squared_norms
from torchtitan_dp.gradients.operands import Products, Rows
from torchtitan_dp.models.parallelize import fsdp_mesh
from torchtitan_dp.privacy.clipping import ClipPolicy

DENSE, GHOST, MIXED = (
    {},
    {"hidden_size": 96, "vocab_size": 101},
    {"hidden_size": 40, "vocab_size": 101},
)
TIED = {"tie_word_embeddings": True}
B, T, P, D = 3, 9, 13, 5
PARTS = ("products", "scaled", "rows")

both_passes = pytest.mark.parametrize("passes", ["one", "two"])


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
def test_row28_a_sum_of_layers_has_the_norm_of_its_gradient(kinds, block_elements, monkeypatch):
    """Cross terms too; whatever the blocks."""
    parts = [factors(kind, seed) for seed, kind in enumerate(kinds)]
    monkeypatch.setattr(norms, "BLOCK_ELEMENTS", block_elements)
    found = squared_norms(parts, None)
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
    output, is_cheaper = torch.Size((128_256, 4_096)), ExactNorms(None).is_cheaper
    assert is_cheaper(16_000, output)
    assert not is_cheaper(16_384, output)
    assert not is_cheaper(4, torch.Size((4, 8)))  # as dear is not cheaper


def over_cp(kinds, block_elements):
    """The sum of the ranks' parts, of T tokens on each, and the most numbers in a block."""
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
    sizes, gather = [0], norms.all_gather

    def watched(input, group):
        gathered = gather(input, group)
        sizes.append(gathered.numel())
        return gathered

    with mock.patch.multiple(norms, all_gather=watched, BLOCK_ELEMENTS=block_elements):
        found = squared_norms(mine, dist.group.WORLD)
    dist.all_reduce(found)
    return found, true.flatten(1).square().sum(1), max(sizes)


@pytest.mark.parametrize("block_elements", [200, 2**24])
@pytest.mark.parametrize("kinds", CASES, ids="+".join)
def test_row01_pairs_across_ranks_belong_to_it(kinds, block_elements):
    for found, expected, largest in on_ranks(2, over_cp, kinds, block_elements):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert largest <= block_elements  # so memory is bounded, however long a sample is


# The method.


def built_for(degrees, passes, changes, max_grad_norm=1.0):
    options = ("--privacy.gradient_method=ghost", f"--privacy.ghost_passes={passes}")
    args = build.llama(**changes)
    several = "--training.local_batch_size=2"
    return build.build(degrees, *options, several, args=args, max_grad_norm=max_grad_norm)


def ghosts(changes, passes):
    """The number of parameters whose norms are ghosts."""
    built = built_for((1, 1, 1), passes, changes)
    with mock.patch.object(norms, "squared_norms", wraps=norms.squared_norms) as found:
        built.accumulate(*build.data(samples=2))
    return found.call_count


@both_passes
@pytest.mark.parametrize(
    "changes, expected",
    # of MIXED 96 x 40 and 40 x 96 of two feed-forwards, 101 x 40 of the embedding and the output
    [(GHOST, 16), (DENSE, 0), (MIXED, 2 * 3 + 2), (MIXED | TIED, 2 * 3)],
    ids=["wide", "narrow", "mixed", "mixed, tied"],
)
def test_a_layer_at_a_time_the_cheaper_way_is_taken(changes, expected, passes):
    """By 2 T^2 < P D. A tied weight has twice the tokens."""
    assert on_ranks(1, ghosts, changes, passes) == [expected]


def with_wrong_norms(degrees, passes, scale, again):
    """One sample's part of the sum, over C: ghost norms are scaled, and what is formed after."""
    built = built_for(degrees, passes, GHOST | TIED, max_grad_norm=0.5)
    found, form = norms.squared_norms, GhostGradients._form_some

    def formed(self, *arguments):
        return form(self, *arguments) * (again if isinstance(self._phase, _Adding) else 1.0)

    tokens_NT, labels_NT = build.data(samples=2)
    with (
        mock.patch.object(norms, "squared_norms", lambda *a, **k: found(*a, **k) * scale),
        mock.patch.object(GhostGradients, "_form_some", formed),
    ):
        return build.norm(build.clipped_sum(built, tokens_NT[1:], labels_NT[1:])[0]) / 0.5


@both_passes
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "scale, again",
    [(1.0, 1.0), (1e-4, 1.0), (0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 30.0), (4.0, 1.0)],
)
def test_row13_no_error_of_a_ghost_norm_moves_the_sum_by_more_than_C(degrees, scale, again, passes):
    """What is added is bounded by what it is, not by what was found for its norm. Nor does a second
    pass that finds another gradient: 30 times what was measured, say."""
    for share in on_ranks(math.prod(degrees), with_wrong_norms, degrees, passes, scale, again):
        assert share <= 1.0
        if scale == again == 1.0:
            assert share > 0.9999


def used_twice(passes):
    """A layer that a forward pass calls twice: the sum's error, in one pass."""
    dims, groups = build.mesh("cpu", (1, 1, 1))
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False)
    x_BTD = torch.randn(2, 3, 16)
    weight = layer.weight.detach().clone().requires_grad_()
    total = torch.zeros_like(weight, dtype=torch.float64)
    for x_TD in x_BTD:
        loss = ((x_TD @ weight.T).tanh() @ weight.T).sin().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        total += gradient * min(1.0, 1 / gradient.norm().item())
    model = torch.nn.Sequential(layer)
    per_sample_layers(model)
    fully_shard(model, mesh=fsdp_mesh(dims))
    parameters = dict(model.named_parameters())
    sums = ClippedSum(parameters, groups, ClipPolicy((tuple(parameters),), 1.0))
    gradients = GhostGradients(model, sums, passes=passes)
    loss_B = model[0](model(x_BTD).tanh()).sin().sum((1, 2))
    gradients.accumulate_clipped(loss_B, torch.ones(2, dtype=torch.bool))
    assert sums.accumulating  # row 44: no checkpoint now
    found = sums.take()["0.weight"].view(16, 16).double()
    return ((found - total).norm() / total.norm()).item()


def test_row28_a_layer_that_is_used_twice():
    assert on_ranks(1, used_twice, "one")[0] < 2e-5
    with pytest.raises(AssertionError, match="used twice; set ghost_passes = 'one'"):
        on_ranks(1, used_twice, "two")
