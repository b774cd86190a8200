"""Released models, by the `config.json` that they come with: their sizes, windows and experts."""

import pytest

from torchtitan_dp.models.causal_lm.settings import read_args
from torchtitan_dp.models.families import on_meta, parameter_count
from torchtitan_dp.plan.cost import weights_of

_GEMMA = dict(
    model_type="gemma3_text",
    architectures=["Gemma3ForCausalLM"],
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    query_pre_attn_scalar=168,
    sliding_window=1024,
    sliding_window_pattern=6,
    vocab_size=262208,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_scaling={"factor": 8.0, "rope_type": "linear"},
    max_position_embeddings=131072,
)
_GPT_OSS = dict(
    model_type="gpt_oss",
    architectures=["GptOssForCausalLM"],
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    vocab_size=201088,
    max_position_embeddings=131072,
    rope_theta=150000,
)
_PHI = dict(
    model_type="phi3",
    architectures=["Phi3ForCausalLM"],
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},  # transformers has its own
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=24,
    num_key_value_heads=8,
    partial_rotary_factor=0.75,
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    sliding_window=262144,
    tie_word_embeddings=True,
    vocab_size=200064,
    pad_token_id=199999,
    rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
)
_QWEN = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    sliding_window=131072,
    use_sliding_window=False,
    vocab_size=152064,
)
_MISTRAL = dict(
    model_type="mistral",
    architectures=["MistralForCausalLM"],
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    sliding_window=None,
    vocab_size=32768,
)


@pytest.mark.thorough_cases("Gemma*", "Phi*")
@pytest.mark.parametrize(
    "settings, parameters, windows",
    [
        pytest.param(_GEMMA, 27_009_346_304, [1024] * 5 + [None], id="Gemma 3 27B"),
        pytest.param(_GPT_OSS, 20_914_757_184, [128, None], id="gpt-oss 20B"),
        pytest.param(_PHI, 3_836_021_760, [262144], id="Phi-4 mini"),
        pytest.param(_QWEN, 7_615_616_512, [None], id="Qwen2.5 7B"),
        pytest.param(_MISTRAL, 7_248_023_552, [None], id="Mistral 7B"),
    ],
)
def test_released_models(settings, parameters, windows):
    args = read_args(settings, "config.json", "model.hf_assets_path")
    assert parameter_count(args) == parameters
    assert args.windows()[: len(windows)] == windows
    small = args.with_heads(2, 1, n_layers=2, vocab_size=1009, max_seq_len=64)
    assert len(on_meta(small).layers) == 2
    assert small.head_size == args.head_size


def test_a_token_takes_some_of_the_experts():
    args = read_args(_GPT_OSS, "config.json", "model.hf_assets_path")
    blocks, _ = weights_of(args)
    experts = args.n_layers * 32 * 3 * 2880 * 2880
    assert args.share_of_experts == 1 / 8
    assert blocks.all == pytest.approx(
        parameter_count(args) - 2 * 201088 * 2880 - experts * 7 / 8, rel=2e-2
    )
