"""Each sample's gradient is that of transformers' eager model in fp64, one sample at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.build import clipped_sum, data, reference_gradients, reference_sum, relative_error
from tests.models.causal_lm.families import FAMILIES, KINDS, OTHERS, T, arguments, eager, small
from tests.processes.ranks import on_ranks
from torchtitan_dp.config import ALL_LINEAR
from torchtitan_dp.models.causal_lm.settings import LoRA

BOUND = 1e-5
CHECKPOINTED = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
TILES = "--training.feed_forward_chunk=5"  # where the feed-forward is gated
MESHES = {"one": (1, 1, 1), "cp 2": (1, 1, 2), "dp_shard 2 x cp 2": (1, 2, 2)}
MESHES["dp_replicate 2 x cp 2"] = (2, 1, 2)
FOUR = "dp_shard 2 x cp 2"


def worst_error(degrees, overrides, name, tokens, lora, changes):
    """The largest relative error of a sample's gradient, and of all samples' sum, unclipped."""
    args = arguments(name, tokens, lora, **changes)
    samples = data(3, args=args)
    expected = reference_gradients(eager(args), *samples)
    ours, worst = small(args, degrees, *overrides), 0.0
    for drawn in [0], [1], [2], [0, 1, 2]:  # the last on all data-parallel ranks at once
        found, _ = clipped_sum(ours, *samples, drawn=np.array(drawn))
        summed = reference_sum((expected[sample] for sample in drawn), 1e6)
        worst = max(worst, relative_error(found, summed))
    return worst


def error(name, mesh, *overrides, tokens=T, lora=None, **changes):
    degrees = MESHES[mesh]
    case = degrees, overrides, name, tokens, lora, changes
    return max(on_ranks(int(np.prod(degrees)), worst_error, *case))


@pytest.mark.parametrize("name", KINDS)
def test_gradients(name):
    assert error(name, FOUR) < BOUND


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_each_mesh(name):
    """Prints a row of docs/models.md."""
    errors = [error(name, mesh) for mesh in MESHES]
    print(f"| {name} | {' | '.join(f'{one:.1e}' for one in errors)} |")
    assert max(errors) < BOUND


def checkpointed_and_in_chunks(name):
    """Without chunks where the output layer has a bias."""
    return (*CHECKPOINTED, TILES, *([] if name == "phi" else ["--training.loss_chunk_tokens=7"]))


@pytest.mark.thorough_cases(*OTHERS, "phi*", "*_moe*", "deep*")
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_and_in_chunks_on_contiguous_shards(name):
    """Also soft caps and scales of logits, which the chunks must know; tied, if it was not."""
    tied = FAMILIES[name][1].get("tie_word_embeddings", False)
    contiguous = "--parallelism.context_parallel_load_balancer=None"
    how = (*checkpointed_and_in_chunks(name), contiguous)
    assert error(name, FOUR, *how, tie_word_embeddings=not tied) < BOUND


@pytest.mark.thorough_cases(*OTHERS, "phi*", "granite", "*_moe*")
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_all_layers_in_samples_shorter_than_the_window(name):
    lora = LoRA(3, 6.0, (ALL_LINEAR,))
    assert error(name, FOUR, *checkpointed_and_in_chunks(name), tokens=16, lora=lora) < BOUND


def errors_in_bf16(degrees, name):
    """Relative distances from transformers in bf16: of ours, and of fp64. Of three samples the
    largest, or with experts the second: a rounding may send a token to another expert."""
    args = arguments(name)
    samples = data(3, args=args)
    exact, rounded = (
        reference_gradients(eager(args, dtype), *samples)
        for dtype in (torch.float64, torch.bfloat16)
    )
    how = ("--training.mixed_precision_param=bfloat16", *checkpointed_and_in_chunks(name))
    ours = small(args, degrees, *how)
    found = [clipped_sum(ours, *samples, drawn=np.array([sample]))[0] for sample in range(3)]
    place = -1 if args.share_of_experts == 1 else -2
    return [sorted(map(relative_error, of, rounded))[place] for of in (found, exact)]


@pytest.mark.thorough_cases(*OTHERS, "qwen*", "phi*", "granite", "gpt*", "deep*")
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16(name):
    """No farther from transformers than rounding takes that; a lost reduction is 0.7 off."""
    for ours, rounding in on_ranks(2, errors_in_bf16, MESHES["cp 2"], name):
        assert ours < 1.5 * rounding < 0.5


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


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("name", ["llama, dynamic", "phi3, longrope"])
def test_a_sample_has_one_gradient_whatever_its_padding(name, cp):
    """Lengths below and beyond the trained one: that of training counts."""
    for found in on_ranks(cp, _padded, name, cp):
        first, *others = found
        assert max(relative_error(other, first) for other in others) < 1e-5


def _padded(name, cp):
    args = arguments(name)
    ours, samples = small(args, (1, 1, cp)), data(1, args=arguments(name, 24))
    found = list(reference_gradients(eager(args), *samples))
    for length in (24, 40, T):
        tokens, labels = (F.pad(x, (0, length - 24), value=-100) for x in samples)
        found.append(clipped_sum(ours, tokens.clamp(min=0), labels)[0])
    return found


@pytest.mark.parametrize("lora", [None, LoRA(3, 6.0, ("q_proj",))])
def test_frozen_weights_that_transformers_keeps_in_fp32(lora):
    """They are stored and computed with as they are, beside others in bf16."""
    for computed in on_ranks(2, _computed_with, lora):
        frozen = {"weight": lora is not None, "moe_statics.e_score_correction_bias": True}
        for name, is_frozen in frozen.items():
            assert computed[name] == (torch.float32 if is_frozen else torch.bfloat16), name


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
