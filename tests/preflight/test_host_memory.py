"""A node's memory for offloaded inputs: predicted, and refused on all ranks before step 1."""

import os
from unittest import mock

import pytest

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.train import check as module
from torchtitan_dp.train.check import HostMemory, host_memory, refuse_lack

GIB = 2**30
OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")


def config_of(flavor: str, world_size: int, *overrides: str) -> JobConfig:
    basics = [
        *(f"--model.flavor={flavor}", "--privacy.noise_multiplier=1", "--privacy.delta=1e-5"),
        *("--training.global_batch_size=4", "--training.mixed_precision_param=bfloat16"),
        *("--parallelism.context_parallel_degree=-1", "--parallelism.data_parallel_shard_degree=1"),
        "--checkpoint.enable",
    ]
    return load_config([*basics, *overrides], world_size)


def predicted(flavor: str, world_size: int, *overrides: str) -> HostMemory:
    config = config_of(flavor, world_size, *overrides)
    return host_memory(config, shape(config))


LONG = ("--training.seq_len=4194304", *OFFLOAD)
THREE = ("--training.local_batch_size=3",)
BY_ONE = (*THREE, "--privacy.gradient_method=microbatch")
SHARED = "--parallelism.data_parallel_shard_degree=2"
ASYNC = ("--checkpoint.async_mode=async", "--parallelism.data_parallel_replicate_degree=2")


@pytest.mark.parametrize(
    ("flavor", "overrides", "gib"),
    [
        ("8B", LONG, 32 * 4),
        ("8B", (*LONG, SHARED), 32 * 8),
        ("3B", LONG, 28 * 4),  # a power of two
        ("8B", (*LONG, *THREE), 32 * 16),
        ("8B", (*LONG, *BY_ONE), 32 * 4),  # for microbatches of any size
        ("8B", (*LONG, *BY_ONE, "--privacy.no-enable"), 32 * 16),
        ("8B", ("--training.seq_len=4194304", OFFLOAD[0]), 0),
    ],
)
def test_the_longest_samples_input_of_each_block(flavor, overrides, gib) -> None:
    assert predicted(flavor, 8, *overrides) == (gib * GIB, 0)


@pytest.mark.parametrize(
    ("overrides", "each"),
    [
        ((), 12),
        (("--optimizer.name=MomentumSGD",), 8),
        (("--ema.enable",), 16),
        (("--privacy.no-enable",), 12),
        (("--checkpoint.no-enable",), 0),
    ],
)
def test_a_save_beside_the_run_copies_a_ranks_share_of_the_state(overrides, each) -> None:
    assert predicted("8B", 8, *ASYNC, *overrides) == (0, each * 8_030_261_248 // 4)
    assert predicted("8B", 8, *ASYNC[1:], *overrides).copy == 0


def test_what_a_node_lacks_is_refused_in_one_line() -> None:
    config = config_of("8B", 8, *LONG, "--checkpoint.async_mode=async")
    args = shape(config)
    needed = 8 * sum(host_memory(config, args))
    refuse_lack(config, args, 8, needed)
    refuse_lack(config, args, 8, None)  # not known: the system's own message must do
    kept = config_of("8B", 8, LONG[0], OFFLOAD[0], "--checkpoint.async_mode=async")
    refuse_lack(kept, args, 8, 0)  # nothing is offloaded
    with pytest.raises(ValueError, match="activation_checkpoint") as refusal:
        refuse_lack(config, args, 8, needed - 1)
    line = str(refusal.value)
    assert "\n" not in line
    assert line.startswith(
        "activation_checkpoint.offload_inputs = true: 8 ranks of a node need 1,113.75 GiB of its "
        "memory (a rank 128.00 for inputs and 11.22 to save beside the run), of 1,113.75 GiB; "
    )
    for remedy in ("training.seq_len", "context_parallel_degree", "to false", "async_mode"):
        assert remedy in line
    with pytest.raises(ValueError, match=r"of 0\.00 GiB") as refusal:
        refuse_lack(config_of("8B", 8, *LONG), args, 8, 0)
    assert "async_mode" not in str(refusal.value)


def require(lacking: int, offload: int) -> str:
    """A start on ranks of which one finds too little, and one may not offload at all."""
    import torch.distributed as dist

    rank = dist.get_rank()
    config = build.config(*(OFFLOAD if rank != offload else ()))
    left = mock.patch.object(
        module, "available_bytes", return_value=1 if rank == lacking else 2**60
    )
    with left, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"):
        try:
            module.require_host_memory(config)
        except SystemExit as fault:
            return str(fault.code)
    return "enough"


def test_all_ranks_refuse_what_one_of_them_finds_too_little() -> None:
    """In the same words: none waits for another in its first step, nor for one of another
    configuration."""
    assert on_ranks(4, require, -1, -1) == ["enough"] * 4
    refusals = on_ranks(4, require, 2, -1)
    assert set(refusals) == {refusals[0]}
    key = "error: activation_checkpoint.offload_inputs = true: "
    assert refusals[0].startswith(f"{key}3 ranks of a node need ")
    assert "(found on rank 2)" in refusals[0]
    assert on_ranks(2, require, 1, 0)[0].startswith(key)
    assert on_ranks(2, require, 1, 1) == ["enough"] * 2
