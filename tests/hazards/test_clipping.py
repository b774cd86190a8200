"""Hazards of clipping, by row of the list of what silently breaks DP: real meshes, gloo, fp32.

For all gradient methods: microbatches of one sample, and of several in one backward pass. With
`ghost` the model is so wide that all its matrices' norms are ghosts (GHOST), or some (MIXED, in two
backward passes). That every norm and the sum are those of a loop of single samples, on every mesh
and with every option, is shown by tests/gradients/test_exactness.py (rows 1, 2, 6, 27 and 28, too).
"""

import dataclasses
import math

import pytest
import torch

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients.optimizer import DPOptimizer
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.privacy.clipping import squared_norm

MICROBATCH = ["--privacy.gradient_method=microbatch"]
V2 = ["--privacy.gradient_method=grad_sample", "--training.local_batch_size=2"]
V1 = [*V2, "--privacy.no-shard_grad_samples"]
GHOST = ["--privacy.gradient_method=ghost", "--training.local_batch_size=2"]
MIXED = [*GHOST, "--privacy.ghost_passes=two"]
WAYS = {"microbatch": MICROBATCH, "V1": V1, "V2": V2, "ghost": GHOST, "ghost_two": MIXED}


def by(*names):
    return pytest.mark.parametrize("method", [WAYS[name] for name in names], ids=names)


by_way = by(*WAYS)
by_method = by("microbatch", "V2", "ghost", "ghost_two")
by_way_of_several = by("V1", "V2", "ghost", "ghost_two")
PER_LAYER = "--privacy.clipping=per_layer"


def args_for(method):
    """The model's shape: one in which a method does what makes it another."""
    wide = {tuple(GHOST): 96, tuple(MIXED): 40}
    if tuple(method) not in wide:
        return build.ARGS
    return build.llama(wide[tuple(method)], vocab_size=101)


def built_for(method, degrees=(1, 1, 1), *options, **terms):
    return build.build(degrees, *method, *options, args=args_for(method), **terms)


def taken(built):
    """The step's local shards, which are then reset."""
    result = {n: t.clone() for n, t in built.gradients.clipped_sum.take().items()}
    built.gradients.clipped_sum.reset()
    return result


def equal(shards, others):
    return all(torch.equal(shards[name], others[name]) for name in shards | others)


def largest(shards):
    return max(t.abs().max().item() for t in shards.values())


# Row 2: what a sample adds is bounded as a whole, also where its layers are clipped apart.


def large_in_every_layer(degrees, method):
    """The norm of what one sample adds whose loss is a million times as large."""
    tokens_NT, labels_NT = build.data(samples=1)
    built = built_for(method, degrees, PER_LAYER, max_grad_norm=0.5)
    same_B = [0] * built.batch_size
    loss_B = 1e6 * built.losses(tokens_NT[same_B], labels_NT[same_B])
    clip = built.gradients.accumulate_clipped(loss_B, torch.arange(built.batch_size) == 0)
    return build.norm(built.total()), [tensor.tolist() for tensor in clip]


@pytest.mark.thorough_cases("*-V1", "*-ghost_two")
@by_way
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_row02_the_whole_gradient_is_bound_by_C(degrees, method):
    for norm, (_, rejected_B, norm_B, exceeds_B) in on_ranks(
        math.prod(degrees), large_in_every_layer, degrees, method
    ):
        assert 0.499 < norm <= 0.5
        assert rejected_B == [False] + [True] * (len(rejected_B) - 1)
        assert exceeds_B[0]
        assert norm_B[0] > 1e3


# Rows 3 and 4: samples merged before clipping, across data-parallel ranks or in a microbatch.


def opposite_gradients(degrees, method):
    """Samples with gradients +C u and -10 C u: after clipping they cancel."""
    built = built_for(method, degrees)
    scale_B = torch.tensor((1.0, -10.0))
    if built.batch_size == 1:  # one on each data-parallel rank, else both in one microbatch
        scale_B = scale_B[torch.distributed.get_rank() // degrees[2]][None]
    # The loss scaled by hand: the same sample, weighed +1 / |g| and -10 / |g|.
    tokens_NT, labels_NT = build.data(samples=1)
    (gradient,) = build.reference_gradients(
        build.reference_model(args_for(method)), tokens_NT, labels_NT
    )
    shape = (len(scale_B), build.T)
    loss_B = built.losses(tokens_NT.expand(shape), labels_NT.expand(shape))
    valid_B = torch.ones(len(scale_B), dtype=torch.bool)
    built.gradients.accumulate_clipped(loss_B * scale_B / build.norm(gradient), valid_B)
    return build.norm(built.total())


@pytest.mark.parametrize("degrees", [(1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_row03_opposite_samples_cancel_after_clipping(degrees):
    for norm in on_ranks(math.prod(degrees), opposite_gradients, degrees, MICROBATCH):
        assert norm < 1e-4  # unclipped they would leave 9


@pytest.mark.thorough_cases("(1, 1, 2)-V1", "(1, 2, 2)-V1")
@by_way_of_several
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_row04_opposite_samples_in_one_microbatch_cancel_after_clipping(degrees, method):
    for norm in on_ranks(math.prod(degrees), opposite_gradients, degrees, method):
        assert norm < 1e-4


# Row 5 and 7: a sample's gradient depends on others; one record sees another.


def beside(degrees, method, slot):
    """Sample 0's own sum and norm in `slot`, beside each of several neighbours that are left out
    of the sum, and with the first neighbour's added: (all bit-identical, |sum - parts|)."""
    built = built_for(method, degrees)
    tokens_NT, labels_NT = build.data(samples=2)
    other_tokens_NT, other_labels_NT = build.data(samples=4, seed=9)
    neighbours = [
        (tokens_NT[1], labels_NT[1], 1.0),
        *zip(other_tokens_NT, other_labels_NT, (1.0, -1e6, math.nan, 0.0), strict=True),
    ]
    order = [0, 1] if slot == 0 else [1, 0]

    def contributions(neighbour, valid):
        tokens_T, labels_T, factor = neighbour
        loss_B = built.losses(
            torch.stack([tokens_NT[0], tokens_T])[order],
            torch.stack([labels_NT[0], labels_T])[order],
        )
        clip = built.gradients.accumulate_clipped(
            loss_B * torch.tensor([1.0, factor])[order], torch.tensor(valid)[order]
        )
        return taken(built), clip.norm_B[slot].item()

    own, norm = contributions(neighbours[0], [True, False])
    same = True
    for neighbour in neighbours[1:]:
        sums, its_norm = contributions(neighbour, [True, False])
        same = same and its_norm == norm and equal(sums, own)
    both, _ = contributions(neighbours[0], [True, True])
    other, _ = contributions(neighbours[0], [False, True])
    return same, max((both[n] - own[n] - other[n]).abs().max().item() for n in both)


@pytest.mark.thorough_cases("*-V1", "2-1-*", "1-1-ghost*")
@by_way_of_several
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("cp", [1, 2])
def test_row05_and_07_a_sample_knows_no_neighbour_in_its_microbatch(cp, slot, method):
    for same, difference in on_ranks(cp, beside, (1, 1, cp), method, slot):
        assert same  # bit-identical
        assert difference < 1e-6


# Row 6: padding, and labels that all lie on one rank.


# Row 13: bf16 norms or accumulators.


def small_adds(degrees, method):
    """320 adds of one small gradient to a large sum, and dtypes at each stage."""
    tokens_NT, labels_NT = build.data(samples=2)
    bf16 = "--training.mixed_precision_param=bfloat16"
    built = built_for(method, degrees, bf16, max_grad_norm=1 / 320)
    build.clipped_sum(built, tokens_NT, labels_NT)
    same_B = [1] * built.batch_size
    for _ in range(320 // built.batch_size):
        loss_B = built.losses(tokens_NT[same_B], labels_NT[same_B])
        built.gradients.accumulate_clipped(loss_B, torch.ones_like(loss_B, dtype=torch.bool))
    dtypes = {t.dtype for t in built.gradients.clipped_sum.take().values()}
    return build.norm(built.total()), dtypes | {p.dtype for p in built.parameters.values()}


@pytest.mark.thorough_cases("ghost", "ghost_two", "V2")
@by_method
def test_row13_hundreds_of_small_adds(method):
    norm, dtypes = on_ranks(1, small_adds, (1, 1, 1), method)[0]
    assert norm == pytest.approx(1.0, rel=1e-4)  # bf16 accumulation stalls near 0.8
    assert dtypes == {torch.float32}


def test_row13_norms_of_large_tensors():
    """One fp32 norm of 2^27 elements on CPU is 0.5% short."""
    flat = torch.full((2**27 + 17,), 0.75)
    assert squared_norm(flat).item() == pytest.approx(flat.numel() * 0.5625, rel=1e-7)


# Row 17: ranks with different numbers of samples.


def uneven_draws(degrees, counts, method):
    built = built_for(method, degrees)
    errors = []
    for count in counts:
        tokens_NT, labels_NT = build.data(samples=count)
        total, norms = build.clipped_sum(built, tokens_NT, labels_NT)
        if count == 0:
            assert not norms
            errors.append(build.norm(total))
            continue
        reference = build.reference_gradients(
            build.reference_model(args_for(method)), tokens_NT, labels_NT
        )
        errors.append(build.relative_error(total, build.reference_sum(reference, 1.0)))
    return errors


@pytest.mark.thorough_cases("(1, 2, 1)-ghost_two", "(2, 1, 2)-ghost")
@by_method
@pytest.mark.parametrize("degrees", [(1, 2, 1), (2, 1, 2)], ids=str)
def test_row17_draws_of_any_size_keep_ranks_in_lockstep(degrees, method):
    for errors in on_ranks(math.prod(degrees), uneven_draws, degrees, [0, 1, 3, 0, 2], method):
        assert errors[0] == errors[3] == 0.0
        assert max(errors) < 3e-5


# Row 22: a NaN or Inf sample.


def poisoned(degrees, value, method):
    """Whether a good sample's sum is bit-identical with and without a poisoned one before it."""
    built = built_for(method, degrees)
    tokens_NT, labels_NT = build.data(samples=2)
    # Only one rank of the group sees the poison.
    first = torch.distributed.get_rank() % degrees[2] == 0

    def total(poison):
        """The first is poisoned and valid, or clean and marked invalid."""
        factor_N = torch.tensor([value if poison and first else 1.0, 1.0])
        for slots_B in torch.arange(2).split(built.batch_size):
            loss_B = built.losses(tokens_NT[slots_B], labels_NT[slots_B]) * factor_N[slots_B]
            valid_B = torch.tensor([poison, True])[slots_B]
            built.gradients.accumulate_clipped(loss_B, valid_B)
        return taken(built)

    with_poison, without = total(True), total(False)
    assert largest(without) > 0
    return equal(with_poison, without)


@pytest.mark.thorough_cases(
    *("(1, 1, 2)-*-V1", "(1, 1, 2)-*-ghost", "(1, 1, 2)-inf-*", "(1, 2, 2)-*-V1"),
    *("(1, 2, 2)-*-ghost", "(1, 2, 2)-inf-*", "(1, 2, 2)-nan-*"),
)
@by_way
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38], ids=str)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_row22_a_poisoned_sample_contributes_exactly_zero(degrees, value, method):
    assert all(on_ranks(math.prod(degrees), poisoned, degrees, value, method))


# Row 27: checkpointed recomputation keeps activations.


# Row 36: frozen and unused parameters.


def frozen_layer(degrees, frozen, method):
    args = dataclasses.replace(args_for(method), tie_embeddings=frozen == "embed_tokens")
    built = build.build(degrees, *method, frozen=frozen, args=args)
    before = {n: p.full_tensor().clone() for n, p in built.model.named_parameters()}
    optimizer = torch.optim.AdamW(list(built.parameters.values()), lr=0.1, weight_decay=0.1)
    dp = DPOptimizer(
        optimizer, built.parameters, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
    )
    tokens_NT, labels_NT = build.data(samples=1)
    norms = built.accumulate(tokens_NT, labels_NT)
    dp.step(built.gradients.clipped_sum.take(), StepNoise(bytes(32)))
    changed = {
        n: not torch.equal(before[n], p.full_tensor()) for n, p in built.model.named_parameters()
    }
    (reference,) = build.reference_gradients(build.reference_model(args), tokens_NT, labels_NT)
    expected = build.norm({n: g for n, g in reference.items() if frozen not in n})
    return changed, norms, expected


@by_method
@pytest.mark.parametrize("frozen", ["layers.0.", "embed_tokens", "norm"])
def test_row36_frozen_is_bit_identical_and_the_rest_is_in_the_norm(frozen, method):
    for changed, norms, expected in on_ranks(2, frozen_layer, (1, 1, 2), frozen, method):
        assert changed == {name: frozen not in name for name in changed}
        assert norms[0] == pytest.approx(expected, rel=1e-5)


def empty_record(degrees, method):
    """A record without tokens, alone and (at B = 2) beside a good one: what it leaves is 0."""
    tokens_NT, labels_NT = build.data(samples=2)
    labels_NT[0] = -100
    built = built_for(method, degrees)
    B = built.batch_size

    def add(valid):
        loss_B = built.losses(tokens_NT[:B], labels_NT[:B])
        clip = built.gradients.accumulate_clipped(loss_B, torch.tensor(valid[:B]))
        return loss_B[0].item(), clip.norm_B[0].item()

    found = add([True, False])
    left = largest(taken(built))
    add([True, True])
    beside_good = taken(built)
    add([False, True])
    return found, left, equal(beside_good, taken(built))


@by_method
@pytest.mark.parametrize("cp", [1, 2])
def test_row06_a_record_without_tokens_is_exactly_zero(cp, method):
    for results in on_ranks(cp, empty_record, (1, 1, cp), method):
        assert results == ((0.0, 0.0), 0.0, True)
