"""LoRA's factors alone: their clipped sums are the loop's, and what is frozen costs nothing."""

import dataclasses
import math

import pytest
import torch

from tests.gradients.loop import check, norm_error
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.lora import LoRA

ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
LORA = LoRA(rank=3, alpha=5.0, targets=ALL)  # no mesh divides its rows
METHODS = {
    "microbatch": ("--privacy.gradient_method=microbatch",),
    "V1": ("--privacy.gradient_method=grad_sample", "--privacy.no-shard_grad_samples"),
    "V2": ("--privacy.gradient_method=grad_sample",),
    "ghost": ("--privacy.gradient_method=ghost",),
    "ghost two": ("--privacy.gradient_method=ghost", "--privacy.ghost_passes=two"),
}
by_method = pytest.mark.parametrize("method", METHODS)


def module(name: str) -> str:
    """The layer that a parameter is of."""
    return name.rpartition(".")[0]


def options(method: str) -> tuple[str, ...]:
    samples = 1 if method == "microbatch" else 3
    return (*METHODS[method], f"--training.local_batch_size={samples}")


@pytest.mark.thorough_cases(
    "(1, 1, 2)-V1",
    "(1, 1, 2)-ghost two",
    "(1, 2, 1)-V1",
    "(1, 2, 1)-ghost",
    "(1, 2, 1)-ghost two",
    "(1, 2, 2)-*",
    "(2, 1, 1)-*",
)
@by_method
@pytest.mark.parametrize(
    "degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)], ids=str
)
def test_every_mesh(degrees, method):
    check(degrees, *options(method), samples=5, lora=LORA)


@pytest.mark.thorough_cases("*-V1", "*-ghost", "*-ghost two", "offload-*", "op-*", "selective-*")
@by_method
@pytest.mark.parametrize("mode", ["full", "selective", "op", "offload"])
def test_activation_checkpointing(mode, method):
    if mode == "op" and method == "ghost two":
        pytest.skip("refused: PyTorch allows one backward pass")
    modes = {
        "full": ("full",),
        "offload": ("full", "--activation_checkpoint.offload_inputs"),
        "selective": ("selective", "--activation_checkpoint.selective_ac_option=1"),
        "op": ("selective", "--activation_checkpoint.selective_ac_option=op"),
    }
    mode, *more = modes[mode]
    check((1, 1, 2), *options(method), f"--activation_checkpoint.mode={mode}", *more, lora=LORA)


@pytest.mark.thorough_cases("V1", "ghost", "ghost two")
@by_method
def test_tied_embeddings_and_few_targets(method):
    few = LoRA(rank=1, alpha=2.0, targets=("wv",))
    check((1, 1, 2), *options(method), tie_embeddings=True, lora=few)


@pytest.mark.thorough_cases("V1", "V2", "ghost", "ghost two")
@by_method
def test_frozen_weights_of_16_bits(method):
    bf16 = "--training.mixed_precision_param=bfloat16"
    check((1, 1, 2), *options(method), bf16, tolerance=3e-2, lora=LORA)


@pytest.mark.thorough
@by_method
def test_factors_clipped_apart(method):
    apart = "--privacy.clipping=per_layer"
    check((1, 1, 2), *options(method), apart, group_of=module, lora=LORA)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["microbatch", "V2"])
def test_compiled(method):
    compiled = ("--compile.enable", "--compile.backend=aot_eager")
    check((1, 1, 2), *options(method), *compiled, tolerance=2e-5, lora=LORA)


def step_of_27M(degrees, overrides):
    """A noised step of the model that benchmarks on CPU take, at T = 128, with adapters of rank 8.

    Returns:
        (errors of the clipped sum and of the norms against the loop, whether every frozen tensor
        has the bits that it had, and of 8 blocks' 7 targets' 2 factors each, how many moved).
    """
    from tests import build
    from torchtitan_dp.models.llama3.model import FLAVORS

    C, std, lora = 0.05, 0.02, LoRA(rank=8, alpha=16.0, targets=ALL)
    args = dataclasses.replace(FLAVORS["30M"], max_seq_len=128, lora=lora)
    options = (*overrides, f"--training.seq_len={args.max_seq_len}")
    tokens_NT, labels_NT = build.data(args=args)
    built = build.build(degrees, *options, args=args, max_grad_norm=C, adapter_std=std)
    before = {name: p.to_local().clone() for name, p in built.model.named_parameters()}

    actual, norms = built.clipped_sum(tokens_NT, labels_NT)
    model = build.reference_model(args, adapter_std=std)
    assert 26e6 < sum(p.numel() for p in model.parameters() if not p.requires_grad) < 28e6
    gradients = build.reference_gradients(model, tokens_NT, labels_NT)
    true_norms = [build.norm(gradient) for gradient in gradients]
    assert min(true_norms) > C  # each is clipped

    trained = [p for p in built.model.parameters() if p.requires_grad]
    optimizer = built.step.optimizer(
        torch.optim.AdamW(trained, lr=1e-3), noise_multiplier=1.0, expected_batch_size=3.0
    )
    built.accumulate(tokens_NT, labels_NT)
    optimizer.step(built.step.clipped_sum.take(), [(bytes(32), 1.0)])
    built.step.clipped_sum.reset()
    moved = {
        name: not torch.equal(before[name], p.to_local())
        for name, p in built.model.named_parameters()
        if p.to_local().numel()
    }
    return (
        build.relative_error(actual, build.reference_sum(gradients, C)),
        norm_error(built, norms, true_norms),
        not any(moved[name] for name in moved if ".lora_" not in name),
        sum(moved[name] for name in moved if ".lora_" in name),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["microbatch", "V2"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_27M_parameters_at_rank_8(degrees, method):
    for error, off, base_kept, moved in on_ranks(
        math.prod(degrees), step_of_27M, degrees, options(method)
    ):
        assert error < 2e-5
        assert off < 1e-5
        assert base_kept
        assert moved == 2 * 7 * 8
