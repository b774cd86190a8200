"""What a configuration's checks keep of it, and what they scale down."""

import dataclasses

import pytest
import torch

from tests.processes.runs import ROOT
from torchtitan_dp.config.derived import METHODS
from torchtitan_dp.models.hugging_face import parameter_count
from torchtitan_dp.selfcheck.small import default_terms, given_terms

CONFIGS = sorted(p for p in (ROOT / "train_configs").glob("*.toml") if p.stem != "any_lora")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_method_is_checked(world_size):
    """A new entry of METHODS needs nothing here."""
    found = default_terms(world_size)
    meshes = {(1, 1, world_size), (1, 2, 2)} if world_size == 4 else {(1, 1, world_size)}
    assert {
        (terms.config.privacy.gradient_method, terms.dtype, terms.degrees) for terms in found
    } == {
        (method, dtype, mesh)
        for method in METHODS
        for dtype in (torch.float32, torch.bfloat16)
        for mesh in meshes
    }
    shared = {(terms.dtype, terms.args.n_heads, terms.args.n_kv_heads) for terms in found}
    assert shared == {(torch.float32, 2, 2), (torch.bfloat16, 4, 1)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations(config):
    own, *exact = given_terms(["--job.config_file", str(config)], 4)
    args = own.args
    assert parameter_count(args) < 2e7
    assert own.config.training.seq_len <= 64 * 4
    assert own.degrees == ((1, 4, 1) if config.stem == "demo" else (1, 1, 4))
    if config.stem in ("llama3_debug", "demo"):
        assert not exact
        return
    (in_fp32,) = exact
    assert (own.dtype, in_fp32.dtype) == (torch.bfloat16, torch.float32)
    assert args.dim // args.n_heads == {"1b": 64, "3b": 128, "8b": 128}[config.stem.split("_")[1]]
    assert args.n_heads // args.n_kv_heads == (3 if "3b" in config.stem else 4)
    assert own.heads == ((6, 2) if "3b" in config.stem else (8, 2))
    assert in_fp32.heads == (own.heads[0], own.heads[0])
    assert in_fp32.args == dataclasses.replace(args, n_kv_heads=args.n_heads)


DEBUG = ("--job.config_file", str(ROOT / "train_configs/llama3_debug.toml"))


def test_attention_is_checked_at_the_ladders_rungs():
    assert given_terms([*DEBUG], 2)[0].lengths == (4, 8, 16, 32, 64, 128, 256)
    assert given_terms([*DEBUG, "--data.no-length_buckets"], 2)[0].lengths == (256,)
    with pytest.raises(ValueError, match=r"privacy\.enable = false.*set it to true"):
        given_terms([*DEBUG, "--privacy.no-enable"], 1)


def test_what_decides_code_and_kernels_stays():
    overrides = [
        *("--job.config_file", str(ROOT / "train_configs/llama3_8b_256k_ac.toml")),
        "--parallelism.context_parallel_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.context_parallel_rotate_method=allgather",
        *("--parallelism.context_parallel_load_balancer", "None"),
        "--privacy.secure_noise",
        "--privacy.clip_function=automatic",
        "--training.local_batch_size=16",
    ]
    own, _ = given_terms(overrides, 8)
    given, training = own.config, own.config.training
    assert own.degrees == (2, 2, 2)
    assert given.parallelism.context_parallel_load_balancer is None
    assert given.parallelism.context_parallel_rotate_method == "allgather"
    assert given.activation_checkpoint.mode == "full"
    assert given.privacy.gradient_method == "grad_sample"
    assert given.privacy.clip_function == "automatic"
    assert given.privacy.secure_noise
    assert training.local_batch_size == 4
    tokens = training.seq_len // 2
    assert 2 * training.loss_chunk_tokens < tokens
    assert tokens % training.loss_chunk_tokens
