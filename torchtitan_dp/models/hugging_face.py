"""A Hugging Face folder's `config.json`, read as the shape of our Llama and written from it.

`shape(config)` says what model a configuration trains: the one that `config.json` describes, where
the folder of `model.hf_assets_path` (or of Hugging Face weights to start from) has one, else that
of `model.flavor`. What our Llama cannot compute is refused, in one line.
"""

import copy
import json
import os
from typing import Any, NoReturn

import torch
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.checkpoint.start import weights_folder
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.models.llama3.model import FLAVORS, Llama, LlamaArgs

CONFIG_FILE = "config.json"

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


def config_file(config: JobConfig) -> tuple[str, str] | None:
    """The `config.json` that decides the shape, and the key that names its folder; or None."""
    folders = [(config.model.hf_assets_path, "model.hf_assets_path")]
    if config.checkpoint.initial_load_in_hf:
        folders.append(weights_folder(config))
    for folder, key in folders:
        path = os.path.join(folder, CONFIG_FILE)
        if folder and os.path.isfile(path):
            return path, key
    return None


def shape(config: JobConfig) -> LlamaArgs:
    """The arguments of the model that `config` trains, a copy of its own.

    Raises:
        ValueError: one line for the user; the flavor is unknown, or `config.json` is broken or
            describes what our Llama cannot compute.
    """
    source = config_file(config)
    known = source is not None or config.model.flavor in FLAVORS
    if config.model.name != "llama3" or not known:
        raise ValueError(
            f"model = {config.model.name} {config.model.flavor}: use name 'llama3' and one of the "
            "flavors " + ", ".join(FLAVORS)
        )
    if source is None:
        return copy.deepcopy(FLAVORS[config.model.flavor])
    args = _Reader(*source).args()
    if config.checkpoint.initial_load_in_hf:
        _refuse_another_model(weights_folder(config), source, args)
    return args


def _refuse_another_model(
    weights: tuple[str, str], source: tuple[str, str], args: LlamaArgs
) -> None:
    """Raises ValueError if the weights come with a `config.json` of another model than `args`."""
    folder, key = weights
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(path):
        return
    theirs = _Reader(path, key).args()
    theirs.max_seq_len = args.max_seq_len  # a limit that we do not have
    if theirs != args:
        raise ValueError(
            f"{key} = '{folder}': its {CONFIG_FILE} describes another model than {source[0]}, by "
            f"{source[1]}; name one model in both"
        )


def read_settings(path: str, key: str) -> dict[str, Any]:
    """What a `config.json` says. Raises ValueError if it is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {path} cannot be read ({error}); download it again") from error
    return settings


class _Reader:
    """One `config.json`, refused by name where our Llama cannot follow it."""

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key
        self.settings = read_settings(path, key)

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
        """theta and the scaling, from transformers 5's `rope_parameters` or the keys before it."""
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
    """The arguments from which TorchTitan's FeedForward computes exactly `hidden`.

    It rounds int(multiplier * int(8 dim / 3)), here within 1 below `hidden`, up to a multiple of
    `multiple_of`.
    """
    return {"multiple_of": hidden, "ffn_dim_multiplier": hidden / int(2 * (4 * dim) / 3)}


def on_meta(args: LlamaArgs) -> Llama:
    """The model without memory, for its names, shapes and size."""
    with torch.device("meta"):
        return Llama(copy.deepcopy(args))


def parameter_count(args: LlamaArgs) -> int:
    """A tied weight counts once."""
    return sum(parameter.numel() for parameter in on_meta(args).parameters())


def origin(config: JobConfig) -> str:
    """What decides the shape, for messages."""
    source = config_file(config)
    return f"model.flavor = '{config.model.flavor}'" if source is None else source[0]


def describe(config: JobConfig, args: LlamaArgs) -> str:
    """For people: the model, where its shape comes from and where its weights do."""
    tied = ", tied embeddings" if args.tie_embeddings else ""
    if config.checkpoint.initial_load_in_hf:
        start = weights_folder(config)[0]
    else:
        drawn = f"drawn from debug.seed = {config.debug.seed or 0}"
        start = config.checkpoint.initial_load_path or drawn
    return (
        f"model: {parameter_count(args):,} parameters ({args.n_layers} layers of {args.dim:,}, "
        f"{args.n_heads} heads, {args.vocab_size:,} tokens{tied}) as in {origin(config)}; "
        f"initial weights: {start}"
    )


def export_settings(config: JobConfig, args: LlamaArgs) -> dict[str, Any]:
    """The `config.json` of the trained model: the one that it came with, or one of its shape.

    `torch_dtype` is what weights are saved in: `checkpoint.export_dtype`, unless that is
    "float32" and the given `config.json` says "bfloat16".
    """
    source = config_file(config)
    settings = _new_settings(config, args) if source is None else read_settings(*source)
    named = [key for key in ("dtype", "torch_dtype") if key in settings] or ["torch_dtype"]
    dtype = config.checkpoint.export_dtype
    if dtype == "float32" and settings.get(named[0]) == "bfloat16":
        dtype = "bfloat16"
    return {**settings, **dict.fromkeys(named, dtype)}


def _new_settings(config: JobConfig, args: LlamaArgs) -> dict[str, Any]:
    """In the keys that transformers 4 writes and 5 still reads."""
    scaling = args.rope_scaling_args
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    rope = {key: getattr(scaling, ours) for key, ours in _ROPE_KEYS.items()}
    block: Any = on_meta(args).layers["0"]
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
