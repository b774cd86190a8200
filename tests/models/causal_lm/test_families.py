"""Each sample's gradient is that of transformers' eager model in fp64, one sample at a time."""

import numpy as np
import pytest
import torch

from tests.build import clipped_sum, config, data, reference_gradients, relative_error
from tests.models.causal_lm.families import FAMILIES, T, arguments, eager, small
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.families import on_meta
from torchtitan_dp.models.lora import LoRA

BOUND = 1e-5
FULL = "--activation_checkpoint.mode=full"
CHUNKS = "--training.loss_chunk_tokens=7"
TILES = "--training.feed_forward_chunk=5"  # where the feed-forward is gated
CONTIGUOUS = "--parallelism.context_parallel_load_balancer=None"
MESHES = {"one": (1, 1, 1), "cp 2": (1, 1, 2), "dp_shard 2 x cp 2": (1, 2, 2)}
MESHES["dp_replicate 2 x cp 2"] = (2, 1, 2)


def worst_error(degrees, overrides, name, tokens, lora, changes):
    """The largest relative error of a sample's gradient, unclipped."""
    args = arguments(name, tokens, lora, **changes)
    tokens_NT, labels_NT = data(3, args=args)
    expected = reference_gradients(eager(args), tokens_NT, labels_NT)
    ours, worst = small(args, degrees, *overrides), 0.0
    for sample, gradient in enumerate(expected):
        found, _ = clipped_sum(ours, tokens_NT, labels_NT, drawn=np.array([sample]))
        worst = max(worst, relative_error(found, gradient))
    return worst


def check(name, mesh, *overrides, tokens=T, lora=None, **changes):
    degrees = MESHES[mesh]
    case = degrees, overrides, name, tokens, lora, changes
    assert max(on_ranks(int(np.prod(degrees)), worst_error, *case)) < BOUND


@pytest.mark.thorough_cases(
    *("*-one", "*-cp 2", "*-dp_replicate 2 x cp 2"),
    *(
        "llama*-*",
        "glm4_moe-*",
        "ernie*-*",
        "qwen3-*",
        "mi*-*",
        "phi3-*",
        "gemma2-*",
        "smollm3-*",
        "olmo2-*",
        "cohere2-*",
    ),
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name, mesh):
    check(name, mesh)


@pytest.mark.thorough_cases("[lpsocme]*", "qwen2_*", "qwen3", "glm4_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_and_in_chunks_on_contiguous_shards(name):
    """Also soft caps and scales of logits, which the chunks must know."""
    check(name, "cp 2", FULL, CHUNKS, TILES, CONTIGUOUS)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_samples_shorter_than_the_window(name):
    check(name, "cp 2", tokens=16)


@pytest.mark.parametrize(
    "name, targets",
    [
        ("qwen2, biases, tied", ("q_proj", "down_proj")),
        ("phi3", ("all-linear",)),
        ("gemma2", ("o_proj",)),
        ("gpt_oss", ("q_proj", "v_proj")),  # beside frozen experts and sinks
        ("ernie4_5_moe", ("q_proj",)),  # beside routers that FSDP2 leaves alone
    ],
)
def test_adapters(name, targets):
    check(name, "cp 2", FULL, CHUNKS, TILES, lora=LoRA(3, 6.0, targets))


def test_rotary_embeddings_depend_on_no_other_sample():
    """transformers keeps the frequencies of the longest sample so far."""
    ((before, after),) = on_ranks(1, _before_and_after)
    assert relative_error(after, before) < 1e-6


def _before_and_after():
    args = arguments("llama, dynamic", 48)
    ours = small(args, (1, 1, 1))
    samples, longer = data(2, args=args), data(2, args=arguments("llama, dynamic", 64))
    found = []
    for _ in range(2):
        found.append(clipped_sum(ours, *samples, drawn=np.array([1]))[0])
        clipped_sum(ours, *longer, drawn=np.array([1]))
    return found


@pytest.mark.parametrize(
    "name, layers",
    [
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_adapters_on_all_linear_layers(name, layers):
    """By default, whatever their names are."""
    targets = tuple(config("--lora.rank=3").lora.targets)
    model = on_meta(arguments(name, lora=LoRA(3, 6.0, targets)))
    assert {
        path.split(".")[-3] for path, _ in model.named_parameters() if "lora_a" in path
    } == layers


@pytest.mark.parametrize("lora", [None, LoRA(3, 6.0, ("q_proj",))])
def test_frozen_weights_that_transformers_keeps_in_fp32(lora):
    """They are stored and computed with as they are, beside others in bf16."""
    for computed in on_ranks(2, _computed_with, lora):
        frozen = {"weight": lora is not None, "moe_statics.e_score_correction_bias": True}
        for name, is_frozen in frozen.items():
            expected = torch.float32 if is_frozen else torch.bfloat16
            assert computed[name] == expected, name


def _computed_with(lora):
    """The dtypes of a router's parameters in its forward."""
    args = arguments("ernie4_5_moe", lora=lora)
    model = small(args, (1, 1, 2), "--training.mixed_precision_param=bfloat16").model
    found = {}

    def look(router, *_):
        found.update({name: parameter.dtype for name, parameter in router.named_parameters()})

    model.layers[1].mlp.gate.register_forward_pre_hook(look)
    with torch.no_grad():
        model(data(1, args=args)[0][:, : T // 2])
    return found
