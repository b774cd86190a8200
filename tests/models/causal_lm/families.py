"""Tiny models of several families, with random weights of which none is trivial."""

from typing import Any

import torch
import torch.nn as nn
from transformers import CONFIG_MAPPING

from tests import build
from torchtitan_dp.models.causal_lm.model import Eager
from torchtitan_dp.models.causal_lm.settings import LoRA, ModelArgs
from torchtitan_dp.models.parameters import copy_slice_, normal_of_name
from torchtitan_dp.selfcheck.small import Small, Terms

WINDOW, T = 20, 64
_SIZES: dict[str, Any] = dict(
    vocab_size=97,  # no mesh divides it
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_BOTH = ["sliding_attention", "full_attention"]
_GEMMA = dict(head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32)
_GEMMA |= dict(tie_word_embeddings=True, pad_token_id=0)  # type: ignore[dict-item]
_LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 8,
    long_factor=[1.0 + i for i in range(8)],
    original_max_position_embeddings=32,
)
_HEADS = dict(head_dim=24)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
_LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, n_group=1)
_ROUTED |= dict(topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
_LATENT = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16)
_LATENT |= dict(v_head_dim=24, num_key_value_heads=4)
_SCALES = dict(embedding_multiplier=3.0, logits_scaling=2.0)
_SCALES |= dict(residual_multiplier=0.5, attention_multiplier=0.2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2, biases, tied": ("qwen2", dict(tie_word_embeddings=True)),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", _HEADS),
    "mistral": ("mistral", dict(sliding_window=WINDOW)),
    "phi3": ("phi3", dict(partial_rotary_factor=0.5)),
    "phi3, longrope": ("phi3", dict(rope_parameters=_LONG, original_max_position_embeddings=32)),
    "llama, dynamic": (
        "llama",
        dict(
            max_position_embeddings=32,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
        ),
    ),
    "llama, dropout": ("llama", dict(attention_dropout=0.5)),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": (
        "gemma3_text",
        {**_GEMMA, "num_hidden_layers": 3, "layer_types": ["sliding_attention", *_BOTH]},
    ),
    "smollm3": (
        "smollm3",
        dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True),
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", _SCALES),
    "cohere2": (
        "cohere2",
        dict(sliding_window=WINDOW, layer_types=_BOTH, tie_word_embeddings=True),
    ),
    "qwen2_moe, whose window only the mask has": (
        "qwen2_moe",
        _EXPERTS
        | dict(moe_intermediate_size=48, shared_expert_intermediate_size=48)
        | dict(sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1),
    ),
    "mixtral": ("mixtral", _LOCAL),
    "ernie4_5_moe": (  # its router is fp32, also in a model of bf16
        "ernie4_5_moe",
        dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_layer_start_index=1),
    ),
    "gpt_oss": ("gpt_oss", _LOCAL | dict(head_dim=16, sliding_window=WINDOW, layer_types=_BOTH)),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "cohere": ("cohere", dict(tie_word_embeddings=True)),
    "ernie4_5": ("ernie4_5", _HEADS),
    "exaone4": ("exaone4", dict(sliding_window=WINDOW, layer_types=_BOTH)),
    "gemma": ("gemma", dict(head_dim=32, tie_word_embeddings=True)),
    "glm4": ("glm4", _HEADS),
    "granite_swa": ("granite_swa", _SCALES | dict(sliding_window=WINDOW, layer_types=_BOTH)),
    "helium": ("helium", dict(head_dim=16)),
    "hunyuan": ("hunyuan_v1_dense", _HEADS),
    "ministral": ("ministral", _HEADS | dict(sliding_window=WINDOW, layer_types=_BOTH)),
    "olmo": ("olmo", dict(clip_qkv=0.5)),
    "olmo3": ("olmo3", dict(sliding_window=WINDOW, layer_types=_BOTH)),
    "phi": ("phi", dict(partial_rotary_factor=0.5)),
    "seed_oss": ("seed_oss", _HEADS),
    "starcoder2": ("starcoder2", dict(sliding_window=WINDOW)),
    "vaultgemma": ("vaultgemma", _GEMMA),
    "deepseek_v3, whose keys are longer than values": ("deepseek_v3", _ROUTED | _LATENT),
    "dots1": ("dots1", _ROUTED | dict(sliding_window=WINDOW, layer_types=_BOTH)),
    "glm4_moe": ("glm4_moe", _ROUTED),  # its router has a buffer
    "granitemoe": ("granitemoe", _LOCAL | _SCALES),
    "olmoe": ("olmoe", _EXPERTS),
    "phimoe": ("phimoe", _LOCAL | dict(sliding_window=WINDOW)),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | _HEADS | dict(moe_intermediate_size=48)),
}
KINDS = (
    *("qwen2, biases, tied", "phi3, longrope", "gemma3", "granite"),
    *("qwen2_moe, whose window only the mask has", "gpt_oss"),
    "deepseek_v3, whose keys are longer than values",
)
"""For each that a family may ask for beside Llama, one: what is tried by default."""
OTHERS = tuple(name for name in FAMILIES if name not in KINDS)
EXPERTS = tuple(n for n, (_, own) in FAMILIES.items() if any("expert" in key for key in own))
TRANSFORMERS = ("--model.name=transformers", "--training.loss_chunk_tokens=0")


def configuration(kind: str, **changes: Any) -> Any:
    """A tiny configuration of transformers."""
    return CONFIG_MAPPING[kind](**{**_SIZES, **changes})


def arguments(name: str, tokens: int = T, lora: LoRA | None = None, **changes: Any) -> ModelArgs:
    """The arguments of a family, or type, for samples of so many tokens."""
    kind, own = FAMILIES.get(name, (name, {}))
    args = ModelArgs.of(configuration(kind, **{**own, **changes}))
    args.max_seq_len, args.lora, args.seq_len = tokens, lora, T
    return args


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give each parameter values of its name alone, none of which is 0 or 1."""
    kind = model.model_args.settings["model_type"]  # type: ignore[union-attr]
    scale = 0.0 if "gemma" in kind else 1.0  # of a norm, which Gemma adds 1 to
    for name, parameter in model.named_parameters():
        whole = 0.08 * normal_of_name(name, parameter.shape)
        if "norm" in name and name.endswith("weight"):
            whole += scale
        copy_slice_(parameter, whole)


def eager(args: ModelArgs, dtype: torch.dtype = torch.float64) -> Eager:
    """transformers' own model with the values of `fill`, rounded to a dtype."""
    with torch.device("cpu"):
        model = Eager(args)
        fill(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def small(
    args: ModelArgs, degrees: tuple[int, int, int], *overrides: str, max_grad_norm: float = 1e6
) -> Small:
    """Our model on a mesh, with the values of `fill`."""
    config = build.config(*TRANSFORMERS, *overrides, degrees=degrees)
    ours = Small(Terms(config, args), torch.device("cpu"), max_grad_norm=max_grad_norm)
    fill(ours.model)
    return ours
