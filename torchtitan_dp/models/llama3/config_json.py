"""A Llama's `config.json`: read as the arguments of our Llama, and written from them."""

import copy
from typing import Any

import torch
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.config_json import SUPPORTED, Reader, is_positive
from torchtitan_dp.models.llama3.model import Llama, LlamaArgs

# To TorchTitan, wavelengths below original / high_freq_factor are not scaled: here, all of them.
NO_ROPE_SCALING = RoPEScalingArgs(scaling_factor=1.0, original_max_position_embeddings=2**62)

_SUPPORTED = (
    ("model_type", ("llama",), "only Llamas have model.name = 'llama3'"),
    ("architectures", (None, ["LlamaForCausalLM"]), "only Llamas that predict tokens"),
    *SUPPORTED,
)
_ROPE_KEYS = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def read_args(settings: dict[str, Any], path: str, key: str) -> LlamaArgs:
    """Return the arguments of the model of a `config.json`.

    Args:
        settings, path, key: as for `models.config_json.Reader`.

    Raises:
        ValueError: one line for the user; our Llama cannot compute this model.
    """
    read = Reader(settings, path, key, _SUPPORTED)
    dim, (heads, kv_heads) = read.size("hidden_size"), read.heads()
    if dim % (2 * heads) != 0 or read.size("head_dim", dim // heads) != dim // heads:
        head_dim = settings.get("head_dim")
        read.refuse("head_dim", head_dim, f"must be hidden_size / heads = {dim} / {heads}")
    theta, kind, name, values = read.rope("default", "llama3", "linear", "yarn")
    return LlamaArgs(
        dim=dim,
        n_layers=read.size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        vocab_size=read.size("vocab_size"),
        norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling_args=_llama_scaling(read, kind, name, values),
        rope=read.scaling(kind, name, values),
        max_seq_len=read.size("max_position_embeddings", 2048),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
        **feed_forward_size(dim, read.size("intermediate_size")),
    )


def _llama_scaling(read: Reader, kind: str, name: str, values: dict[str, Any]) -> RoPEScalingArgs:
    """Read Llama 3's own scaling, which TorchTitan computes."""
    if kind != "llama3":
        return copy.copy(NO_ROPE_SCALING)
    for part in _ROPE_KEYS:
        if not is_positive(values.get(part)):
            read.refuse(f"{name}.{part}", values.get(part), "must be a positive number")
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        high, low = values["high_freq_factor"], values["low_freq_factor"]
        read.refuse(f"{name}.high_freq_factor", high, f"must exceed low_freq_factor = {low}")
    return RoPEScalingArgs(**{ours: values[k] for k, ours in _ROPE_KEYS.items()})


def feed_forward_size(dim: int, hidden: int) -> dict[str, Any]:
    """Find the arguments from which TorchTitan's FeedForward computes exactly `hidden`.

    It rounds int(multiplier * int(8 dim / 3)), here within 1 below `hidden`, up to a multiple of
    `multiple_of`.
    """
    return {"multiple_of": hidden, "ffn_dim_multiplier": hidden / int(2 * (4 * dim) / 3)}


def new_settings(args: LlamaArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `config.json` of a model, in the keys that transformers 4 writes and 5 still
    reads."""
    with torch.device("meta"):
        block: Any = Llama(copy.deepcopy(args)).layers["0"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": block.feed_forward.w1.out_features,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.dim // args.n_heads,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": float(args.rope_theta),
        "rope_scaling": _scaling_settings(args),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }


def _scaling_settings(args: LlamaArgs) -> dict[str, Any] | None:
    """Return the value of `rope_scaling`."""
    if args.rope is not None:
        return args.rope.settings()
    if args.rope_scaling_args == NO_ROPE_SCALING:
        return None
    values = {key: getattr(args.rope_scaling_args, ours) for key, ours in _ROPE_KEYS.items()}
    return {"rope_type": "llama3", **values}
