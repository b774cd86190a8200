"""Small Hugging Face folders, as `transformers` writes them, and what it makes of ours."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import build
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import read_config
from torchtitan_dp.models.causal_lm.model import CausalLM, HuggingFaceAdapter
from torchtitan_dp.models.hugging_face import shape

VOCABULARY = 264
# Wavelengths on both sides of and between the original 64 tokens / 4 and / 1.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
SMALL: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,  # logits of size 1, attention that depends on positions
    vocab_size=VOCABULARY,
)


def write(kind: str, folder: Path, *, tied: bool = False) -> Path:
    """A random Llama or Qwen3, without scaling, and a tokenizer."""
    if kind == "llama":
        return write_llama(folder, tied=tied, rope=PLAIN, eps=1e-6)
    torch.manual_seed(7)
    config = Qwen3Config(
        **SMALL,
        head_dim=16,  # not hidden_size / heads
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return _write(Qwen3ForCausalLM(config), folder, "50MB")


def write_llama(
    folder: Path,
    *,
    tied: bool,
    rope: dict,
    eps: float,
    dtype: torch.dtype = torch.float32,
    **size: Any,
) -> Path:
    """A random Llama in several shards (no mesh of 4 divides its key heads), with a tokenizer."""
    torch.manual_seed(7)
    config = LlamaConfig(
        **(SMALL | size), tie_word_embeddings=tied, rms_norm_eps=eps, rope_parameters=rope
    )
    return _write(LlamaForCausalLM(config).to(dtype), folder, "50MB" if size else "60KB")


def _write(model: Any, folder: Path, shard_size: str) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Characters, and marks."""
    vocabulary = {chr(i): i for i in range(256)} | {"<s>": 256, "</s>": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    marks = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))


def edit_config(folder: Path, **changes) -> Path:
    """Change keys of `config.json`; None removes one."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    kept = {k: v for k, v in settings.items() if v is not None or k not in changes}
    path.write_text(json.dumps(kept))
    return folder


def sample_tokens() -> torch.Tensor:
    """int64 (2, 96): longer than the original context of `SCALED`."""
    return torch.randint(0, VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def transformers_logits(folder: Path, **more: Any) -> torch.Tensor:
    """fp32 (2, 96, V), by transformers."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", **more}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()(sample_tokens()).logits


def given(folder: Path, *overrides: str) -> JobConfig:
    """The configuration of a run that starts from the folder, and ends in one."""
    return build.config(
        *(f"--model.hf_assets_path={folder}", f"--job.dump_folder={folder.parent / 'out'}"),
        *("--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"),
        *overrides,
    )


def ours(config: JobConfig, folder: Path) -> Any:
    """Our model with the folder's weights, and adapters if it has some."""
    args = shape(config)
    model = CausalLM(args)
    model.init_weights()
    weights: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    loaded = HuggingFaceAdapter(args, None).from_hf(weights)
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert unexpected == []
    assert all("lora" in name for name in missing)
    return model.eval()


@torch.no_grad()
def checkpoint_logits(run: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our fp32 logits, of the weights in a checkpoint of a run."""
    model = CausalLM(shape(read_config(str(run))))
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    return model(sample_tokens())
