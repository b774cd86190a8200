"""What a model of transformers would lose in silence is refused in one line that names the key."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.build import config
from tests.models.causal_lm.families import FAMILIES, arguments, configuration
from torchtitan_dp.models.causal_lm.attention import Band, Sample, attention
from torchtitan_dp.models.causal_lm.settings import LoRA, read_args
from torchtitan_dp.models.hugging_face import check_weights, on_meta
from torchtitan_dp.train.check import check_attention


def settings(kind="llama", **changes):
    return json.loads(configuration(kind).to_json_string(use_diff=False)) | changes


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config = .*unquantized"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = true"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"attention_chunk_size": 8}, "attention_chunk_size = 8"),
        ({"vision_config": {}}, "vision_config = {}"),
        ({"text_config": {}}, "text_config = {}"),
        ({"model_type": "bert_of_mine"}, 'model_type = "bert_of_mine".*no such causal LM'),
        ({"model_type": "new", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "is never run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "it must be LlamaForCausalLM"),
        ({"model_type": "gemma3n_text"}, "intermediate_size = .*only one size for all layers"),
        (
            {"layer_types": ["full_attention", "linear_attention"], "model_type": "qwen3_next"},
            'layer_types = "linear_attention"',
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"], "model_type": "minimax"},
            'layer_types = "linear_attention"',
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide the 4 heads"),
        ({"intermediate_size": "100"}, "transformers cannot read it"),
        ({"kind": "falcon"}, 'model_type = "falcon": its attention is its own'),
        ({"kind": "stablelm"}, 'model_type = "stablelm": its attention is its own'),
        ({"kind": "gemma4_text"}, 'model_type = "gemma4_text": a size has another name, or diff'),
    ],
)
def test_settings(changes, said):
    with pytest.raises(ValueError, match=said) as refused:
        read_args(settings(**changes), "there/config.json", "model.hf_assets_path")
    assert str(refused.value).startswith("model.hf_assets_path: there/config.json has ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"pad_token_id": 10**6}, {"hidden_act": "of_mine"}])
def test_settings_of_which_transformers_builds_no_model(changes):
    """A file that leaves `pad_token_id` out has that of the family's own vocabulary."""
    args = read_args(settings(**changes), "config.json", "model.hf_assets_path")
    with pytest.raises(
        ValueError, match=r"config\.json: transformers builds no llama of it"
    ) as why:
        on_meta(args)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize("kind", ["Conv1d", "BatchNorm1d"])
def test_modules_that_mix_tokens_or_samples(kind, monkeypatch):
    class Mixing(modeling_llama.LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            sizes = (8, 8, 1) if kind == "Conv1d" else (8,)
            self.mixed = getattr(torch.nn, kind)(*sizes)

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Mixing)
    with pytest.raises(ValueError, match=rf"mlp\.mixed \({kind}\) mixes samples or tokens"):
        on_meta(arguments("llama"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_small_model_has_a_layer_of_each_kind_and_smaller_windows(name):
    """On which selfcheck tries the settings of a large one."""
    given = arguments(name, num_hidden_layers=8, layer_types=None, no_rope_layers=None)
    before = copy.deepcopy(given)
    small = given.with_heads(4, 2, n_layers=2, vocab_size=1009, max_seq_len=32)
    assert given == before
    model = on_meta(small)
    assert len(model.layers) == small.n_layers <= 4
    assert set(small.windows()) == {w and 10 for w in given.windows()}
    assert small.vocab_size == model.tok_embeddings.num_embeddings == 1009
    assert (small.head_dim, small.tie_embeddings) == (given.head_dim, given.tie_embeddings)
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        if "dynamic" in name or "longrope" in name:
            assert small.settings.get(key, 16) == 16  # below the small model's samples


def attend(**terms):
    query, key = (torch.randn(1, heads, 4, 8) for heads in (4, 2))
    mask = terms.pop("mask", Band(None))
    return attention(torch.nn.Module(), query, key, key, mask, **terms)


@pytest.mark.parametrize(
    "terms, said",
    [
        ({"position_bias": torch.ones(1)}, "position_bias, unknown here"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": torch.ones(1, 1, 4, 4)}, "a mask of its own"),
        ({"mask": None}, "a mask of its own"),
        ({"sample": None}, "not given its model's keyword arguments"),
        ({"mask": Band(2), "sliding_window": 3}, "windows of 3 and 2"),
    ],
)
def test_what_attention_is_asked_for(terms, said):
    sample = Sample(None, torch.nn.functional.scaled_dot_product_attention)
    with pytest.raises(ValueError, match=said):
        attend(**{"sample": sample, **terms})
    assert sample.calls == 0


def test_a_family_whose_attention_is_not_transformers():
    """Its own attention would see this rank's tokens alone."""
    with torch.device("cpu"):
        model = on_meta(arguments("llama")).__class__(arguments("llama"))
    for layer in model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match="calls attention 0 times in 2 layers"):
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_a_bias_of_the_output_layer_in_chunks():
    with pytest.raises(ValueError, match=r"training.loss_chunk_tokens: .*has a bias"):
        on_meta(arguments("phi")).use_loss_head(7)


def test_modules_stay_in_eval_mode():
    model = on_meta(arguments("llama, dropout"))
    model.train()
    assert not any(module.training for module in model.modules())


def test_a_file_goes_before_the_flavor(tmp_path):
    assert config(f"--model.hf_assets_path={tmp_path}").model.name == "llama3"
    (tmp_path / "config.json").write_text("{}")
    assert config(f"--model.hf_assets_path={tmp_path}").model.name == "transformers"


def test_files_with_a_key_for_each_expert(tmp_path):
    """As transformers itself saves a Mixtral."""
    args = arguments("mixtral")
    AutoModelForCausalLM.from_config(args.config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"all experts in one tensor.*save_original_format=False"):
        check_weights("there", str(tmp_path), args)


@pytest.mark.parametrize("name, target", [("gpt_oss", "experts"), ("phimoe", "router")])
def test_adapters_of_experts_and_their_routers(name, target):
    with pytest.raises(ValueError, match=re.escape(f"no linear layer '{target}'; use some of")):
        on_meta(arguments(name, lora=LoRA(2, 2.0, (target,))))


def test_a_soft_cap_of_scores_in_longer_samples():
    long = config("--training.seq_len=65536")
    with pytest.raises(ValueError, match="soft cap"):
        check_attention(long, arguments("gemma2", layer_types=["full_attention"] * 2))
