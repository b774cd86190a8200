"""A Llama's `config.json`: read as the arguments of our Llama, and written from them."""

import copy
import json
from typing import Any, NoReturn

import torch
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.data.samples.tokenizer import Tokenizer
from torchtitan_dp.models.llama3.model import Llama, LlamaArgs

# To TorchTitan, wavelengths below original / high_freq_factor are not scaled: here, all of them.
NO_ROPE_SCALING = RoPEScalingArgs(scaling_factor=1.0, original_max_position_embeddings=2**62)

# Keys of config.json, the values that our Llama computes, and what else they would mean.
_SUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("model_type", ("llama",), "only Llamas can be trained"),
    ("architectures", (None, ["LlamaForCausalLM"]), "only Llamas that predict tokens"),
    ("hidden_act", (None, "silu"), "only 'silu' is built"),
    ("attention_bias", (None, False), "biases are not built"),
    ("mlp_bias", (None, False), "biases are not built"),
    ("attention_dropout", (None, 0), "dropout is not built; set it to 0"),
    ("sliding_window", (None,), "attention is always over the whole record"),
    ("quantization_config", (None,), "weights must be floating point; take the unquantized ones"),
)
_ROPE_KEYS = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def read_args(settings: dict[str, Any], path: str, key: str) -> LlamaArgs:
    """Return the arguments of the model that a `config.json` describes.

    Args:
        settings: the content of the file.
        path, key: the file, and the key that names its folder, for messages.

    Raises:
        ValueError: one line for the user; it describes a model that our Llama cannot compute.
    """
    return _Reader(settings, path, key).args()


class _Reader:
    """Reads one `config.json`, and refuses by name each key that our Llama does not support."""

    def __init__(self, settings: dict[str, Any], path: str, key: str) -> None:
        self.settings, self.path, self.key = settings, path, key

    def args(self) -> LlamaArgs:
        for name, supported, why in _SUPPORTED:
            if self.settings.get(name) not in supported:
                self._refuse(name, self.settings.get(name), why)
        dim, heads = self._size("hidden_size"), self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", heads)
        if dim % (2 * heads) != 0 or self._size("head_dim", dim // heads) != dim // heads:
            head_dim = self.settings.get("head_dim")
            self._refuse("head_dim", head_dim, f"must be hidden_size / heads = {dim} / {heads}")
        if heads % kv_heads != 0:
            self._refuse("num_key_value_heads", kv_heads, f"must divide the {heads} heads")
        theta, scaling = self._rope()
        return LlamaArgs(
            dim=dim,
            n_layers=self._size("num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=kv_heads,
            vocab_size=self._size("vocab_size"),
            norm_eps=float(self.settings.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling_args=scaling,
            max_seq_len=self._size("max_position_embeddings", 2048),
            tie_embeddings=bool(self.settings.get("tie_word_embeddings", False)),
            **feed_forward_size(dim, self._size("intermediate_size")),
        )

    def _rope(self) -> tuple[float, RoPEScalingArgs]:
        """Read theta and the scaling, from transformers 5's `rope_parameters` or the keys before
        it."""
        name = "rope_parameters" if self.settings.get("rope_parameters") else "rope_scaling"
        values = self.settings.get(name) or {}
        if not isinstance(values, dict):
            self._refuse(name, values, "must be an object")
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "llama3"):
            self._refuse(f"{name}.rope_type", kind, "only 'default' and 'llama3' are built")
        for holder, prefix in ((self.settings, ""), (values, f"{name}.")):
            if (part := holder.get("partial_rotary_factor", 1)) != 1:
                self._refuse(f"{prefix}partial_rotary_factor", part, "must be 1")
        theta = values.get("rope_theta", self.settings.get("rope_theta", 10000.0))
        if not _is_positive(theta):
            self._refuse("rope_theta", theta, "must be a positive number")
        if kind == "default":
            return float(theta), copy.copy(NO_ROPE_SCALING)
        for part in _ROPE_KEYS:
            if not _is_positive(values.get(part)):
                self._refuse(f"{name}.{part}", values.get(part), "must be a positive number")
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            high, low = values["high_freq_factor"], values["low_freq_factor"]
            self._refuse(f"{name}.high_freq_factor", high, f"must exceed low_freq_factor = {low}")
        return float(theta), RoPEScalingArgs(**{ours: values[k] for k, ours in _ROPE_KEYS.items()})

    def _size(self, name: str, default: int | None = None) -> int:
        value = self.settings.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._refuse(name, value, "must be a whole number, 1 or more")
        return value

    def _refuse(self, name: str, value: object, why: str) -> NoReturn:
        shown = "missing" if value is None else json.dumps(value)
        raise ValueError(
            f"{self.key}: {self.path} has {name} = {shown}: {why}; use a Llama that has it so (for "
            "the tokenizer alone, copy its files into a folder without config.json)"
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def feed_forward_size(dim: int, hidden: int) -> dict[str, Any]:
    """Find the arguments from which TorchTitan's FeedForward computes exactly `hidden`.

    It rounds int(multiplier * int(8 dim / 3)), here within 1 below `hidden`, up to a multiple of
    `multiple_of`.
    """
    return {"multiple_of": hidden, "ffn_dim_multiplier": hidden / int(2 * (4 * dim) / 3)}


def new_settings(args: LlamaArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `config.json` of a model, in the keys that transformers 4 writes and 5 still
    reads."""
    scaling = args.rope_scaling_args
    rope = {key: getattr(scaling, ours) for key, ours in _ROPE_KEYS.items()}
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
        "rope_scaling": {"rope_type": "llama3", **rope},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
