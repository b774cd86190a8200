"""Selfcheck passes on the code as it is; each planted fault fails the check that is for it."""

import contextlib

import pytest
import torch

from tests.processes.ranks import on_ranks
from tests.processes.runs import CONFIG
from tests.selfcheck import faults
from torchtitan_dp.selfcheck.__main__ import checks_of, run
from torchtitan_dp.selfcheck.small import default_terms, given_terms
from torchtitan_dp.selfcheck.steps import Ranks


def outcomes(fault, only, overrides=()):
    """Name, verdict and value of each outcome, with a fault on every rank, or none."""
    ranks = Ranks(torch.device("cpu"))
    world_size = torch.distributed.get_world_size()
    terms = given_terms(list(overrides), world_size) if overrides else default_terms(world_size)
    chosen = [
        check
        for check in checks_of(terms, "/tmp", every=not overrides)
        if check.name.startswith(only)
    ]
    assert chosen
    with getattr(faults, fault)() if fault else contextlib.nullcontext():
        found = run(ranks, chosen)
    return [(outcome.name, outcome.passed, outcome.value, outcome.error) for outcome in found]


def failed(found):
    return [(name, value, error) for name, passed, value, error in found if not passed]


SUMS = "clipped sum, microbatch, float32"
SEVERAL = "clipped sum, grad_sample, float32"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "only", "at_least"), [(1, "", 40), (2, "", 40), (4, SUMS, 4)]
)
def test_it_passes_here(world_size, only, at_least):
    first, *others = on_ranks(world_size, outcomes, None, only)
    assert failed(first) == []
    assert len(first) >= at_least
    assert all(other == first for other in others)


FAULTS = [  # the fault, on how many ranks, which checks, which of their measurements
    ("sums_of_partial_norms", 2, SEVERAL, "the norms"),
    ("own_tokens_alone", 2, SUMS, "the sum"),
    ("clip_factor_off", 1, SUMS, "the sum"),
    ("bad_samples_kept", 1, SUMS, "the sum"),
    ("bad_samples_kept", 1, SEVERAL, "the sum"),
    ("samples_merged", 1, SEVERAL, "the sum"),
    ("chunk_edge_lost", 1, SUMS, "the sum"),
    ("memory_unwritten", 1, SUMS, "the sum"),
    ("tile_lost", 1, "clipped sum, microbatch, feed-forward in tiles", "the sum"),
    ("heads_share_the_first_key", 1, "attention, heads apart, bfloat16", "tokens"),
    ("ring_of_another_balancer", 2, "ring attention, headtail, alltoall, bfloat16", "tokens"),
    ("ring_of_another_balancer", 2, "ring attention, None, allgather, float32", "tokens"),
    ("noise_too_small", 1, "noise, ", "moments"),
    ("noise_shared_by_shards", 2, "noise, ", "values that differ from another mesh"),
    ("key_repeated", 1, "noise, ", "repeated stretches"),
    ("keys_of_their_own", 2, "root key", "ranks that differ"),
    ("divided_by_the_ranks", 1, "update, microbatch", "sum + noise"),
    ("weights_differ", 2, "update, microbatch", "updated weights"),
    ("checkpoint_loses_a_tensor", 1, "checkpoint", "tensors that changed"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("only", "world_size"), sorted({(only, ranks) for _, ranks, only, _ in FAULTS})
)
def test_what_a_fault_fails_passes_without(only, world_size):
    for found in on_ranks(world_size, outcomes, None, only):
        assert failed(found) == []


@pytest.mark.thorough_cases(*("own_tokens*", "bad_samples_kept-1-*grad_sample*", "keys_of*"))
@pytest.mark.parametrize(("fault", "world_size", "only", "expected"), FAULTS)
def test_a_fault_fails_it(fault, world_size, only, expected):
    """By what it measures, and not because the fault cannot run."""
    for found in on_ranks(world_size, outcomes, fault, only):
        wrong = failed(found)
        assert any(expected in name and not error for name, _, error in wrong), (wrong, found)


GIVEN = ("--job.config_file", str(CONFIG))
ADAPTERS = (*GIVEN, "--lora.rank=4")
REPLICAS = (*GIVEN, "--parallelism.data_parallel_replicate_degree=2")


@pytest.mark.parametrize(
    ("fault", "world_size", "overrides", "expected"),
    [
        # On the last rank alone: its replica has others.
        ("weights_differ", 2, REPLICAS, {"updated weights", "ranks whose weights differ"}),
        ("frozen_weight_moves", 1, ADAPTERS, {"frozen weights that changed"}),
        ("adapter_stays", 1, ADAPTERS, {"updated weights"}),
    ],
)
def test_row56_a_fault_of_replicas_or_adapters_fails_it(fault, world_size, overrides, expected):
    for found in on_ranks(world_size, outcomes, fault, "update", overrides):
        assert {name.rpartition(": ")[2] for name, *_ in failed(found)} == expected, found


OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
BF16 = ("--training.mixed_precision_param=bfloat16", "--training.local_batch_size=3")
CONFIGURATIONS = {
    "offload": (1, OFFLOAD),
    "offload bf16": (2, (*OFFLOAD, *BF16)),
    "dp_shard": (2, ("--parallelism.context_parallel_degree=1", *BF16)),
    "dp_replicate": (2, ("--parallelism.data_parallel_replicate_degree=2",)),
    "secure": (1, ("--privacy.secure_noise", "--training.loss_chunk_tokens=0")),
    "automatic": (1, ("--privacy.clip_function=automatic", "--privacy.no-shard_grad_samples")),
    "adapters": (2, ("--lora.rank=3", *BF16)),
    "randomized": (2, ("--privacy.gradient_method=randomized", "--training.local_batch_size=2")),
    "compile": (1, ("--compile.enable",)),
}


@pytest.mark.thorough_cases("adapters", "automatic", "compile", "dp_replicate", "offload*")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_pass(name):
    world_size, overrides = CONFIGURATIONS[name]
    first, *_ = on_ranks(world_size, outcomes, None, "", (*GIVEN, *overrides))
    assert failed(first) == []
    assert len(first) >= 13
