"""V1 and V2 equal a one-process loop of single samples, on every mesh and at every MBS.

Hazard rows 1, 2, 4, 5, 7, 27, 28 and 36 for microbatches of several samples.
"""

import dataclasses
import math

import pytest
import torch

from tests.gradients.loop import check, error_on_this_rank
from tests.processes.ranks import on_ranks

METHOD = "--privacy.gradient_method=grad_sample"
V1, V2 = "--privacy.no-shard_grad_samples", "--privacy.shard_grad_samples"
TIED, UNTIED = {"tie_embeddings": True}, {}

variants = pytest.mark.parametrize("variant", [V1, V2], ids=["V1", "V2"])


def mbs(samples: int) -> str:
    return f"--training.local_batch_size={samples}"


@pytest.mark.thorough_cases(
    "(1, 1, 4)-*-{'tie_embeddings': True}-*",
    "(1, 2, 2)-*-{'tie_embeddings': True}-*",
    "*-2-*-V1",
    "*-4-{}-*",
)
@variants
@pytest.mark.parametrize(
    "degrees, batch_size, changes",
    [
        ((1, 1, 1), 2, UNTIED),
        ((1, 1, 1), 4, TIED),
        ((1, 1, 2), 1, UNTIED),
        ((1, 1, 2), 2, TIED),
        ((1, 1, 2), 4, UNTIED),
        ((1, 2, 1), 2, TIED),
        ((1, 1, 4), 2, UNTIED),
        ((1, 1, 4), 4, TIED),
        ((1, 2, 2), 2, UNTIED),
        ((1, 2, 2), 4, TIED),
        ((2, 1, 2), 2, TIED),
    ],
    ids=str,
)
def test_every_mesh(degrees, batch_size, changes, variant):
    """5 samples: the last microbatches are padded."""
    check(degrees, METHOD, variant, mbs(batch_size), samples=5, **changes)


@pytest.mark.thorough_cases("*-no_early_stop-*")
@variants
@pytest.mark.parametrize("early_stop", ["early_stop", "no_early_stop"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing(mode, early_stop, variant):
    check(
        (1, 1, 2),
        METHOD,
        variant,
        mbs(2),
        f"--activation_checkpoint.mode={mode}",
        f"--activation_checkpoint.{early_stop}",
        "--activation_checkpoint.selective_ac_option=1",
        tie_embeddings=True,
    )


@variants
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_selective_op_checkpointing(degrees, variant):
    check(
        degrees,
        METHOD,
        variant,
        mbs(2),
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    )


def test_full_checkpointing_with_dp_shard():
    check((1, 2, 2), METHOD, mbs(2), "--activation_checkpoint.mode=full")


@variants
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_bf16_compute_with_fp32_reduction(degrees, variant):
    bf16 = "--training.mixed_precision_param=bfloat16"
    check(degrees, METHOD, variant, mbs(2), bf16, tolerance=3e-2, tie_embeddings=True)


def with_limit(transient_bytes, *arguments):
    """The errors; and how many samples were reduced at once."""
    from torchtitan_dp.collectives import Pending
    from torchtitan_dp.gradients import grad_sample

    reduced = []
    build, reduce = grad_sample.GradSampleGradients.__init__, Pending.reduce_scatter

    def build_with_limit(self, *args, **kwargs):
        build(self, *args, transient_bytes=transient_bytes, **kwargs)

    def count(self, part, input, group):
        reduced.append(part.stop - part.start)
        reduce(self, part, input, group)

    grad_sample.GradSampleGradients.__init__ = build_with_limit
    Pending.reduce_scatter = count
    try:
        return error_on_this_rank(*arguments), set(reduced)
    finally:
        grad_sample.GradSampleGradients.__init__ = build
        Pending.reduce_scatter = reduce


@pytest.mark.thorough_cases("(1, 2, 2)-*")
@pytest.mark.parametrize("changes", [UNTIED, TIED], ids=str)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_large_layers_go_one_sample_at_a_time(degrees, changes):
    world_size = degrees[1] * degrees[2]
    arguments = (degrees, [METHOD, mbs(3)], changes, 1.0, 4)
    for transient_bytes, at_once in ((1, 1), (2**28, 3)):
        for errors, found in on_ranks(world_size, with_limit, transient_bytes, *arguments):
            assert max(errors) < 2e-5
            assert found == ({at_once} if degrees[2] > 1 else set())


def against_microbatch(degrees, variant):
    """On one mesh: the methods' sums, and norms of the same samples."""
    from tests import build

    tokens_NT, labels_NT = build.data(samples=4)
    results = [
        build.build(degrees, *overrides).clipped_sum(tokens_NT, labels_NT)
        for overrides in (
            ["--privacy.gradient_method=microbatch"],
            [METHOD, variant],
            [METHOD, variant, mbs(2)],
        )
    ]
    (expected, expected_norms), *others = results
    for actual, norms in others:
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert build.relative_error(actual, expected) < 1e-6


@pytest.mark.thorough_cases("*-V1")
@variants
@pytest.mark.parametrize("degrees", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_row04_equals_the_microbatch_method(degrees, variant):
    on_ranks(degrees[1] * degrees[2], against_microbatch, degrees, variant)


def beside(degrees, method, slot, changes=UNTIED):
    """Sample 0's own sum and norm in `slot`, beside each of several neighbours that are left out
    of the sum, and with the first neighbour's added: (all bit-identical, |sum - parts|)."""
    from tests import build

    built = build.build(degrees, *method, args=dataclasses.replace(build.ARGS, **changes))
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
        total = {n: t.clone() for n, t in built.gradients.clipped_sum.take().items()}
        built.gradients.clipped_sum.reset()
        return total, clip.norm_B[slot].item()

    own, norm = contributions(neighbours[0], [True, False])
    same = True
    for neighbour in neighbours[1:]:
        sums, its_norm = contributions(neighbour, [True, False])
        same = same and its_norm == norm and all(torch.equal(sums[n], own[n]) for n in own)
    both, _ = contributions(neighbours[0], [True, True])
    other, _ = contributions(neighbours[0], [False, True])
    return same, max((both[n] - own[n] - other[n]).abs().max().item() for n in both)


@pytest.mark.thorough_cases("*-V1")
@variants
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("cp", [1, 2])
def test_row05_and_07_a_sample_knows_no_neighbour_in_its_microbatch(cp, slot, variant):
    method = [METHOD, variant, mbs(2)]
    for same, difference in on_ranks(cp, beside, (1, 1, cp), method, slot):
        assert same  # bit-identical
        assert difference < 1e-6


def frozen_errors(degrees, frozen, changes, overrides):
    from tests import build

    args = dataclasses.replace(build.ARGS, **changes)
    tokens_NT, labels_NT = build.data(samples=3)
    built = build.build(degrees, METHOD, *overrides, args=args, frozen=frozen)
    actual, _ = built.clipped_sum(tokens_NT, labels_NT)
    model = build.reference_model(args)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    gradients = build.reference_gradients(model, tokens_NT, labels_NT)
    return build.relative_error(actual, build.reference_sum(gradients, 1.0))


@variants
@pytest.mark.parametrize(
    "frozen, changes",
    [("layers.0.", {}), ("norm", {}), ("tok_embeddings", TIED), ("tok_embeddings", UNTIED)],
    ids=str,
)
def test_row36_what_is_frozen_counts_nowhere(frozen, changes, variant):
    for error in on_ranks(2, frozen_errors, (1, 1, 2), frozen, changes, [variant, mbs(2)]):
        assert error < 2e-5


def most_running(degrees):
    """How many sums over cp run at once, and how many while a matrix's gradients are written."""
    from tests import build
    from torchtitan_dp.gradients.grad_sample import GradSampleGradients

    built = build.build(degrees, METHOD, mbs(2), "--training.loss_chunk_tokens=5")
    gradients = built.gradients
    assert isinstance(gradients, GradSampleGradients)
    started, writing = [0], [0]
    form = gradients.form

    def watched(name, batch_size, write):
        def write_watched(layout, *args):
            if len(layout.shape) > 1:
                writing.append(len(gradients._in_flight))
            write(layout, *args)

        formed = form(name, batch_size, write_watched)
        started.append(len(gradients._in_flight))
        return formed

    gradients.form = watched
    tokens_NT, labels_NT = build.data(samples=2)
    built.accumulate(tokens_NT, labels_NT)
    return max(started), max(writing), len(gradients._in_flight)


def test_two_layers_sums_run_at_once():
    """One goes on while the next layer's gradients are written; a third would hold more memory."""
    for found in on_ranks(2, most_running, (1, 1, 2)):
        assert found == (2, 1, 0)
