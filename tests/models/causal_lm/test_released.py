"""Released models, by the `config.json` that they come with: their sizes, windows and experts."""

import pytest

from scripts.models import CONFIGS
from torchtitan_dp.models.causal_lm.settings import read_args
from torchtitan_dp.models.hugging_face import on_meta, parameter_count


def released(name, model, **changes):
    """The `config.json` of a model of `scripts/models.py`, with changes."""
    return CONFIGS[name] | {"architectures": [f"{model}ForCausalLM"]} | changes


_GEMMA = released("google/medgemma-27b-text-it", "Gemma3", vocab_size=262208)
_GEMMA |= {"sliding_window_pattern": 6}
_GPT_OSS = released("openai/gpt-oss-20b (in bf16)", "GptOss")
_CODE = {"AutoConfig": "configuration_phi3.Phi3Config"}  # transformers has its own
_PHI = released("microsoft/Phi-4-mini-instruct", "Phi3", auto_map=_CODE)
_QWEN = released("Qwen/Qwen2.5-7B", "Qwen2")
_MISTRAL = released("mistralai/Mistral-7B-v0.1", "Mistral", vocab_size=32768, sliding_window=None)


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
    assert small.head_dim == args.head_dim
