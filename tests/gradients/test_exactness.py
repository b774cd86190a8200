"""The clipped sum on every mesh equals a one-process loop of single samples.

Hazard rows 1, 2, 3, 6 (both load balancers), 27, 28 and the compiled case.
"""

import pytest

from tests.gradients.loop import check

MESHES = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_every_mesh(degrees):
    check(degrees)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_tied_embeddings_count_once(degrees):
    check(degrees, tie_embeddings=True)


@pytest.mark.thorough_cases("no_early_stop-*")
@pytest.mark.parametrize("degrees", [(1, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("early_stop", ["early_stop", "no_early_stop"])
def test_activation_checkpointing(degrees, mode, early_stop):
    check(
        degrees,
        f"--activation_checkpoint.mode={mode}",
        f"--activation_checkpoint.{early_stop}",
        "--activation_checkpoint.selective_ac_option=1",
    )


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_selective_op_checkpointing(degrees):
    check(
        degrees,
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    )


@pytest.mark.thorough_cases("4-*")
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balancer", ["headtail", "None"])
@pytest.mark.parametrize("cp", [2, 4])
def test_ring_variants(rotate, balancer, cp):
    check(
        (1, 1, cp),
        f"--parallelism.context_parallel_rotate_method={rotate}",
        "--parallelism.context_parallel_load_balancer",
        balancer,
    )


@pytest.mark.parametrize("method", ["microbatch", "grad_sample", "ghost"])
def test_fp16_without_loss_scaling(method):
    """DP-ZeRO's section 3.4."""
    fp16 = "--training.mixed_precision_param=float16"
    samples = "1" if method == "microbatch" else "2"
    options = (f"--privacy.gradient_method={method}", f"--training.local_batch_size={samples}")
    check((1, 1, 2), *options, fp16, tolerance=5e-3)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_bf16_compute_with_fp32_reduction(degrees):
    check(degrees, "--training.mixed_precision_param=bfloat16", tolerance=3e-2)


@pytest.mark.thorough_cases("inductor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks(backend):
    check((1, 1, 2), "--compile.enable", f"--compile.backend={backend}", tolerance=2e-5)


def test_no_clipping_below_the_bound():
    check((1, 2, 2), C=1e6)
