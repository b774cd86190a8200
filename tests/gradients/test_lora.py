"""LoRA's factors alone: their clipped sums are the loop's, and what is frozen costs nothing."""

import pytest

from tests.gradients.loop import check
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


@by_method
@pytest.mark.parametrize(
    "degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)], ids=str
)
def test_every_mesh(degrees, method):
    check(degrees, *options(method), samples=5, lora=LORA)


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


@by_method
def test_tied_embeddings_and_few_targets(method):
    few = LoRA(rank=1, alpha=2.0, targets=("wv",))
    check((1, 1, 2), *options(method), tie_embeddings=True, lora=few)


@by_method
def test_frozen_weights_of_16_bits(method):
    bf16 = "--training.mixed_precision_param=bfloat16"
    check((1, 1, 2), *options(method), bf16, tolerance=3e-2, lora=LORA)


@by_method
def test_factors_clipped_apart(method):
    apart = "--privacy.clipping=per_layer"
    check((1, 1, 2), *options(method), apart, group_of=module, lora=LORA)


@pytest.mark.parametrize("method", ["microbatch", "V2"])
def test_compiled(method):
    compiled = ("--compile.enable", "--compile.backend=aot_eager")
    check((1, 1, 2), *options(method), *compiled, tolerance=2e-5, lora=LORA)
