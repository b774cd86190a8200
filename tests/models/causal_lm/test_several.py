"""Microbatches of several samples: clipped sums and norms are those of transformers' eager model in
fp64, one sample at a time."""

import numpy as np
import pytest
import torch

from tests.build import (
    clipped_sum,
    config,
    data,
    norm,
    reference_gradients,
    reference_sum,
    relative_error,
)
from tests.models.causal_lm.families import EXPERTS, FAMILIES, T, arguments, eager, small
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.hugging_face import on_meta
from torchtitan_dp.train.check import check_model

CHUNKS = ("--training.loss_chunk_tokens=7", "--activation_checkpoint.mode=full")
WAYS: dict[str, tuple[str, ...]] = {
    "grad_sample": ("grad_sample",),
    "grad_sample, in chunks": ("grad_sample", *CHUNKS),
    "ghost": ("ghost",),
    "ghost, two passes": ("ghost", "--privacy.ghost_passes=two"),
    "ghost, two passes in chunks": ("ghost", "--privacy.ghost_passes=two", *CHUNKS),
    "randomized": ("randomized", "--privacy.projections=16"),
}
EXACT = [way for way in WAYS if way != "randomized"]
MESHES = {"one": (1, 1, 1), "cp 2": (1, 1, 2), "dp_shard 2 x cp 2": (1, 2, 2)}
MODELS = (
    *("llama", "llama, tied", "qwen2, biases, tied", "qwen3", "phi3", "gemma2", "gemma3"),
    *("smollm3", "olmo2", "mistral", "granite", "cohere2"),
)


def errors(degrees, ways, name, lora, bound):
    """Of each way, where it is not within the bound, the error of the sum or of a norm."""
    args = arguments(name, T, lora)
    samples = data(4, args=args)
    expected = reference_gradients(eager(args), *samples)
    norms = [norm(gradient) for gradient in expected]
    C = sorted(norms)[2] * 0.9  # half of the samples are clipped
    total, found = reference_sum(expected, C * (1 - 1e-5)), {}
    for way in ways:
        method, *more = WAYS[way]
        options = (f"--privacy.gradient_method={method}", "--training.local_batch_size=2")
        ours = small(args, degrees, *options, *more, max_grad_norm=C)
        summed, of_samples = clipped_sum(ours, *samples)
        worst = max(abs(value / norms[i] - 1) for i, value in of_samples.items())
        worst = max(worst, relative_error(summed, total))
        if not worst < bound:
            found[way] = worst
    return found


def check(name, mesh, ways, lora=None, bound=1e-5):
    degrees = MESHES[mesh]
    for found in on_ranks(int(np.prod(degrees)), errors, degrees, ways, name, lora, bound):
        assert found == {}


CASES = [(name, mesh) for name in MODELS for mesh in MESHES]
OTHERS = set(FAMILIES) - {*MODELS, *EXPERTS, "granite_swa"}  # which has sinks, in no layer
CASES += [(name, "cp 2") for name in sorted(OTHERS)]


@pytest.mark.thorough_cases(*(f"{n}-*" for n, _ in CASES if n != "gemma3"), "*-one", "*-dp*")
@pytest.mark.parametrize("name, mesh", CASES)
def test_sums_and_norms(name, mesh):
    biased = name == "phi"  # its output layer, which is not built in chunks
    check(name, mesh, [way for way in EXACT if not (biased and "chunks" in way)])


@pytest.mark.thorough_cases("phi3*")
@pytest.mark.parametrize(
    "name, targets", [("qwen2, biases, tied", ("q_proj", "down_proj")), ("phi3", ("qkv_proj",))]
)
def test_adapters(name, targets):
    """Beside frozen biases, and a frozen head with a transform or none."""
    check(name, "one", ["grad_sample", "ghost, two passes in chunks"], LoRA(3, 6.0, targets))


def test_estimated_norms():
    check("gemma3", "one", ["randomized"], bound=0.3)


@pytest.mark.parametrize(
    "name, path", [("mixtral", "0.mlp.experts"), ("deepseek_v3*", "1.mlp.experts")]
)
def test_experts_take_the_tokens_of_all_samples(name, path):
    name = next(one for one in FAMILIES if one.startswith(name.strip("*")))
    with pytest.raises(ValueError, match=rf"layers\.{path} of .*set it to 'microbatch'"):
        on_meta(arguments(name)).use_per_sample_layers()


def test_parameters_beside_layers():
    """Attention's sinks."""
    args = arguments("gpt_oss")
    args.settings = {k: v for k, v in args.settings.items() if "expert" not in k}
    with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\).* of sinks.*'microbatch'"):
        per_sample_layers(on_meta(args))


def test_a_layer_of_several_tensors():
    model = on_meta(arguments("cohere2"))
    model.use_per_sample_layers()
    with pytest.raises(ValueError, match="PerSampleCohere2LayerNorm takes more than one tensor"):
        model.layers[0].input_layernorm(torch.ones(2, 3, 64), torch.ones(2))


@pytest.mark.parametrize("method", ["grad_sample", "ghost", "randomized"])
def test_a_run_is_refused_before_it_starts(tmp_path, method):
    arguments("mixtral").config().save_pretrained(tmp_path)
    checked = config(f"--model.hf_assets_path={tmp_path}", f"--privacy.gradient_method={method}")
    with pytest.raises(ValueError, match=r"privacy.gradient_method: layers.0.mlp.experts of"):
        check_model(checked, decide_start(checked))
