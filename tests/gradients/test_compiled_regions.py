"""`grad_sample` with compiled regions equals the loop of single samples, whatever is checkpointed.

Hazard rows 1, 2, 4, 27 and 28. What is compiled is tested, not its kernels: `aot_eager`, and one
case of Inductor's.
"""

import pytest

from tests import build
from tests.gradients.loop import check

METHOD = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
FULL = "--activation_checkpoint.mode=full"
SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.early_stop")


ONE = "--activation_checkpoint.selective_ac_option=1"
ONE_RANK, CP, SHARDED = (1, 1, 1), (1, 1, 2), (1, 2, 2)


@pytest.mark.thorough_cases("(1, 1, 1)-0", "(1, 1, 2)-0", "(1, 2, 2)-*", "*-2", "*-3")
@pytest.mark.parametrize(
    ("degrees", "checkpointing"),
    [
        (ONE_RANK, ()),
        (ONE_RANK, SELECTIVE),  # every second block
        (ONE_RANK, (FULL, "--activation_checkpoint.no_early_stop")),
        (CP, ()),
        (CP, (*SELECTIVE, ONE)),
        (CP, (FULL, "--activation_checkpoint.early_stop")),
        (CP, (FULL, "--activation_checkpoint.offload_inputs")),
        (SHARDED, (FULL,)),
    ],
    ids=lambda value: str(value) if value and isinstance(value[0], int) else "",
)
def test_equals_the_loop(degrees, checkpointing):
    """5 samples: the last microbatch is padded."""
    check(degrees, *METHOD, *COMPILED, *checkpointing, samples=5, tie_embeddings=True)


def test_whole_gradients():
    """V1."""
    check(ONE_RANK, *METHOD, *COMPILED, "--privacy.no-shard_grad_samples")


def test_ghost():
    """Its sink takes the copies' gradients as it takes a layer's."""
    ghost = ("--privacy.gradient_method=ghost", "--training.local_batch_size=2")
    check(CP, *ghost, *COMPILED, FULL, samples=5, tie_embeddings=True, dim=96, vocab_size=101)


@pytest.mark.thorough
def test_inductor():
    check(CP, *METHOD, "--compile.enable", FULL, tolerance=2e-5)


@pytest.mark.thorough
def test_bf16_compute_with_fp32_reduction():
    bf16 = "--training.mixed_precision_param=bfloat16"
    check(CP, *METHOD, *COMPILED, bf16, tolerance=3e-2)


@pytest.mark.parametrize(
    ("checkpointing", "refusal"),
    [
        (
            ("selective", "--activation_checkpoint.selective_ac_option=op"),
            r"activation_checkpoint.selective_ac_option = 'op': set it to a number .* to false",
        ),
        (("memory_budget",), "activation_checkpoint.mode = 'memory_budget': set it to 'full'"),
    ],
    ids=["op", "memory_budget"],
)
def test_what_gains_nothing_is_refused(checkpointing, refusal):
    mode, *more = checkpointing
    given = (f"--activation_checkpoint.mode={mode}", *more)
    with pytest.raises(ValueError, match=refusal):
        build.config(*METHOD, *COMPILED, *given)
    build.config(*COMPILED, *given)  # whole blocks
