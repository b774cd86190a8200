"""A start compares a model of transformers with transformers itself, and refuses what differs."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn as nn
from transformers.models.llama.modeling_llama import LlamaModel

from tests import build
from tests.models.causal_lm.families import FAMILIES, TRANSFORMERS, arguments
from tests.processes.ranks import on_ranks
from torchtitan_dp.base.process import Fault
from torchtitan_dp.base.torch_private import context_parallel_handlers
from torchtitan_dp.distributed.attention import configure_ring
from torchtitan_dp.models.causal_lm import attention
from torchtitan_dp.models.causal_lm import model as causal_lm
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.hugging_face import on_meta
from torchtitan_dp.models.loss import shard_of
from torchtitan_dp.selfcheck import proof

ONE, CP, FOUR = (1, 1, 1), (1, 1, 2), (1, 2, 2)
HOW = ("--activation_checkpoint.mode=full", "--training.loss_chunk_tokens=100")
SIX = ("llama", "gemma2", "gemma3", "gpt_oss", "phi3, longrope", "granite")


def _trainer(degrees, name, overrides, lora=None, changes=None):
    """What `prove` takes from a trainer."""
    args = arguments(name, 256, lora, **(changes or {}))
    config = build.config(*TRANSFORMERS, "--training.seq_len=256", *overrides, degrees=degrees)
    dims, groups = build.mesh("cpu", degrees)
    return SimpleNamespace(
        model_parts=[on_meta(args)],
        job_config=config,
        device=torch.device("cpu"),
        parallel_dims=dims,
        clipped_sum=SimpleNamespace(groups=groups),
        metrics_processor=SimpleNamespace(time_last_log=0.0),
    )


def _state():
    handlers = context_parallel_handlers().values()
    return torch.get_rng_state().tolist(), [handler.args for handler in handlers]


def proved(degrees, *case):
    """The line that a start logs on this rank, or with which it ends; and what it changed."""
    trainer = _trainer(degrees, *case)
    configure_ring(shard_of(trainer.parallel_dims, trainer.job_config))
    before, said = _state(), []
    with mock.patch.object(proof.logger, "info", said.append):
        try:
            proof.prove(trainer)
        except Fault as fault:
            said.append(str(fault))
    assert _state() == before
    assert trainer.metrics_processor.time_last_log > 0
    (line,) = (line for line in said if "checked: per-sample" in line or "before step 1" in line)
    print(line)
    return line


def check(degrees, *case):
    lines = on_ranks(int(np.prod(degrees)), proved, degrees, *case)
    for line in lines:
        assert "within" in line, line
        assert float(line.partition("within ")[2].partition(" ")[0]) <= 2e-5
    return lines


@pytest.mark.thorough_cases("llama*", "gemma3*", "phi3*", "granite*")
@pytest.mark.parametrize("degrees", [ONE, CP])
@pytest.mark.parametrize("name", SIX)
def test_it_passes(name, degrees):
    check(degrees, name, HOW)


@pytest.mark.thorough
@pytest.mark.parametrize("degrees", [ONE, CP, FOUR])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_passes_without_chunks_on_contiguous_shards(name, degrees):
    check(degrees, name, ("--parallelism.context_parallel_load_balancer=None",))


def test_adapters_and_clipping_by_layers():
    layers = ("--privacy.clipping=per_layer", "--privacy.clip_function=automatic")
    check(CP, "gemma2", (*HOW, *layers), LoRA(3, 6.0, ("q_proj", "down_proj")))


@pytest.mark.parametrize("layers", [(), ("--privacy.clipping=per_layer",)])
@pytest.mark.parametrize("tokens", [16, 8, 2])
def test_a_run_of_short_samples_is_proved(tokens, layers):
    """Of one layer too: samples of a few tokens have targets, and a gradient."""
    options = (*HOW[:1], f"--training.seq_len={tokens}", *layers)
    check(ONE, "llama", options, None, {"num_hidden_layers": 1})


def test_a_bf16_run_is_proved_in_fp32():
    check(CP, "mistral", (*HOW, "--training.mixed_precision_param=bfloat16"))


def without(term):
    """Attention that does not see a keyword argument."""

    def attend(*args, **terms):
        return _attention(*args, **{**terms, term: None})

    return attention, "attention", attend


@dataclass
class _Copied:
    """A sample of which FSDP2 makes a new one for each block."""

    tokens: int
    shard: Any
    full: Any
    calls: int = 0


_attention = attention.attention
_CausalLM = causal_lm.CausalLM
FAULTS = {  # of the review's table: what stands in the place of a remedy, and for which families
    "the family's own logits in chunks": (
        (_CausalLM, "_own_transform", lambda _: None),
        ("gemma2", "granite"),
    ),
    "the window of a mask": (
        (attention, "band", lambda *_, **__: attention.Band(None)),
        ("qwen2_moe, whose window only the mask has", "mistral"),
    ),
    "the sample's length, not this rank's": (
        (causal_lm, "set_length", lambda *_: None),
        ("phi3, longrope", "llama, dynamic"),
    ),
    "eval mode": (
        (_CausalLM, "train", nn.Module.train),
        ("llama, dropout", "phi3, resid_pdrop", "phimoe"),
    ),
    "an object that FSDP2 does not copy": ((causal_lm, "Sample", _Copied), ("llama",)),
    "buffers": ((_CausalLM, "compute_buffers", lambda *_: None), ("llama",)),
    "sinks": (without("s_aux"), ("gpt_oss",)),
    "soft caps": (without("softcap"), ("gemma2",)),
    "the scale of scores": (without("scaling"), ("granite",)),
}


def faulty(fault, degrees, name):
    kind, _, key = name.partition(", resid")
    changes = {"resid" + key: 0.5} if key else {}
    with mock.patch.object(*FAULTS[fault][0]):
        return proved(degrees, kind, HOW, None, changes)


def with_a_cache():
    forward = LlamaModel.forward

    def caching(model, *args, **terms):
        return forward(model, *args, **{**terms, "use_cache": True})

    with mock.patch.object(LlamaModel, "forward", caching):
        return proved(CP, "llama", HOW)


def with_linear_attention():
    """Which `read_args` refuses."""
    mixed = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
    return proved(CP, "minimax", HOW, None, mixed)


@pytest.mark.thorough_cases(
    "*-granite", "*-mistral", "*-llama, dynamic", "*-llama, dropout", "*-phimoe"
)
@pytest.mark.parametrize(
    "fault, name", [(fault, name) for fault, (_, names) in FAULTS.items() for name in names]
)
def test_it_refuses(fault, name):
    refused(faulty, fault, CP, name)


@pytest.mark.parametrize("way", [with_a_cache, with_linear_attention])
def test_it_refuses_a_model(way):
    refused(way)


def refused(*call):
    lines = on_ranks(2, *call)
    assert len({*lines}) == 1, "ranks end alike"
    assert lines[0].startswith("error: check of the model before step 1: ")


def _one_rank_wrong():
    right = proof.worst_error

    def wrong(*args):
        error = right(*args)
        return error if torch.distributed.get_rank() == 0 else 0.25

    with mock.patch.object(proof, "worst_error", wrong):
        return proved(CP, "llama", HOW)


def test_all_ranks_end_where_one_is_wrong():
    first, second = on_ranks(2, _one_rank_wrong)
    assert first == second
    assert "a tiny llama, with these settings on this mesh, are 0.25 off" in first
    assert "(the limit is 0.0001)" in first
