"""A Qwen3's `config.json`: read as the arguments of our Qwen3, and written from them."""

from typing import Any

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.config_json import SUPPORTED, Reader
from torchtitan_dp.models.qwen3.model import QwenArgs

_SUPPORTED = (
    ("model_type", ("qwen3",), "only dense Qwen3s have model.name = 'qwen3'"),
    ("architectures", (None, ["Qwen3ForCausalLM"]), "only Qwen3s that predict tokens"),
    ("use_sliding_window", (None, False), "attention is always over the whole record"),
    *SUPPORTED,
)


def read_args(settings: dict[str, Any], path: str, key: str) -> QwenArgs:
    """Return the arguments of the model of a `config.json`.

    Args:
        settings, path, key: as for `models.config_json.Reader`.

    Raises:
        ValueError: one line for the user; our Qwen3 cannot compute this model.
    """
    read = Reader(settings, path, key, _SUPPORTED)
    for kind in settings.get("layer_types") or ():
        if kind != "full_attention":
            read.refuse("layer_types", kind, "attention is always over the whole record")
    heads, kv_heads = read.heads()
    head_dim = read.size("head_dim", 128)
    if head_dim % 2:
        read.refuse("head_dim", head_dim, "must be even, for rotary embeddings")
    theta, kind, name, values = read.rope("default", "linear", "yarn")
    return QwenArgs(
        dim=read.size("hidden_size"),
        n_layers=read.size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_dim=read.size("intermediate_size"),
        vocab_size=read.size("vocab_size"),
        norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=read.scaling(kind, name, values),
        max_seq_len=read.size("max_position_embeddings", 32768),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
    )


def new_settings(args: QwenArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `config.json` of a model, in keys that transformers 4 and 5 read."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": float(args.rope_theta),
        "rope_scaling": None if args.rope is None else args.rope.settings(),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
