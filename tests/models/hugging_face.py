"""Small Hugging Face folders, as `transformers` writes them, and what it makes of ours."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def write_llama(
    folder: Path,
    *,
    tied: bool,
    rope: dict,
    eps: float,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> Path:
    """A random Llama in several shards (no mesh of 4 divides its key heads), with a tokenizer.

    `shape` changes its size.
    """
    torch.manual_seed(7)
    small = dict(
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # logits of size 1, attention that depends on positions
    )
    config = LlamaConfig(
        **(small | shape),
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        rms_norm_eps=eps,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="50MB" if shape else "60KB")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Characters, and marks."""
    vocabulary = {chr(i): i for i in range(256)} | {"<s>": 256, "</s>": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    marks = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))


def write_qwen(folder: Path, *, tied: bool) -> Path:
    """A random Qwen3, with a tokenizer."""
    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # not hidden_size / heads
        max_position_embeddings=512,
        initializer_range=0.3,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes) -> None:
    """Change keys of `config.json`; None removes one."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def sample_tokens() -> torch.Tensor:
    """int64 (2, 96): longer than the original context of `SCALED`."""
    return torch.randint(0, VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def transformers_logits(folder: Path) -> torch.Tensor:
    """fp32 (2, 96, V), by transformers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(sample_tokens()).logits
