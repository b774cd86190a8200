"""The arguments of a causal LM of transformers: its `config.json`.

A setting that would be computed otherwise than transformers does is refused by its key.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.nn as nn
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.causal_lm.attention import attends_by_name, tied_names

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_LAYERS = ("full_attention", "sliding_attention")
# Of the file and of what is generated, not of the model.
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_NOT_OF_THE_MODEL |= {"architectures", "output_router_logits", "_attn_implementation"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FEED_FORWARDS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
Rope = dict[str, Any]
"""The value of `rope_parameters`: theta, the scaling's type, and its terms."""
PREFIX = "model."
"""Of transformers' own names of parameters in ours."""
LONGER = ("longrope", "dynamic")
"""Rotary embeddings whose frequencies depend on a length."""

_SUPPORTED = (
    ("quantization_config", (None,), "weights must be floating point; take the unquantized ones"),
    ("is_encoder_decoder", (None, False), "only models that predict tokens from those before"),
    ("is_causal", (None, True), "only models that predict tokens from those before"),
    ("use_bidirectional_attention", (None, False), "only causal attention is built"),
    ("attention_chunk_size", (None,), "attention within chunks is not built"),
    ("text_config", (None,), "only models of text alone are built"),
    ("vision_config", (None,), "only models of text alone are built"),
)


@dataclass(frozen=True)
class LoRA:
    """The layers of a model that have factors, and these factors' size."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # the last parts of linear layers' names, or `ALL_LINEAR`
    freeze_a: bool = False  # B alone is trained

    @property
    def scaling(self) -> float:
        """The factor of the factors' product."""
        return self.alpha / self.rank


def lora_of(config: JobConfig, rank: int | None = None) -> LoRA | None:
    """Return the adapters of `[lora]`, or those of another rank; None for rank 0."""
    lora = config.lora
    rank = lora.rank if rank is None else rank
    return LoRA(rank, lora.alpha, tuple(lora.targets), lora.freeze_a) if rank else None


@dataclass
class ModelArgs(BaseModelArgs):
    """A `config.json`, all defaults filled in, the sizes in it that the package reads, adapters,
    and how weights are initialized."""

    settings: dict[str, Any] = field(default_factory=dict)
    dim: int = 0
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_seq_len: int = 0
    tie_embeddings: bool = False
    seq_len: int = 0
    """`training.seq_len`, which rotary embeddings take that depend on a sample's length."""
    lora: LoRA | None = None
    init_seed: int = 0
    draw_weights: bool = True
    """Whether `init_weights` draws the weights. If not, they are NaN until they are loaded, which
    the load checks (a draw of 8B takes minutes)."""
    draw_adapters: bool = True
    """The same for the factors of `lora`, which initial weights may lack."""

    @classmethod
    def of(cls, config: Any) -> "ModelArgs":
        """Return the arguments of a configuration of transformers."""
        heads = config.num_attention_heads
        sizes = {ours: getattr(config, key) for ours, key in _SIZES.items()}
        return cls(
            settings={k: v for k, v in config.to_dict().items() if k not in _NOT_OF_THE_MODEL},
            n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            **sizes,
        )

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take over what a run's configuration decides beside the model, as TorchTitan asks."""
        self.init_seed = job_config.debug.seed or 0
        self.lora, self.seq_len = lora_of(job_config), job_config.training.seq_len

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Count parameters, and a token's FLOPs as TorchTitan does, without the gradients of frozen
        weights, with a tied output layer's products; of experts, those that it takes."""
        active, total = 0.0, 0
        embedding = model.get_parameter("tok_embeddings.weight")
        for parameter in model.parameters():
            share = self.share_of_experts if parameter.dim() == 3 else 1.0
            if parameter is not embedding or self.tie_embeddings:
                active += share * parameter.numel() * (6 if parameter.requires_grad else 4)
            total += parameter.numel()
        return total, int(active) + 12 * self.n_layers * self.n_heads * self.head_dim * seq_len

    def tied(self) -> dict[str, str]:
        """Return our names of tied parameters, with those of whose tensors they are."""
        if not self.tie_embeddings:
            return {}
        return {PREFIX + one: PREFIX + same for one, same in tied_names(self.config()).items()}

    @property
    def title(self) -> str:
        """The name of the kind of model for people."""
        kind = str(self.settings["model_type"])
        return "Llama" if kind == "llama" else kind

    def new_settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the `config.json`, with a tokenizer's marks, as transformers 4 and 5 read it."""
        settings = self.config().to_diff_dict()
        settings["architectures"] = [causal_lm_of(self.settings["model_type"])]
        settings |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        if "rope_theta" in self.rope_parameters():
            scaling = dict(settings.pop("rope_parameters"))
            settings |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        return settings

    def rope_parameters(self) -> Rope:
        """Return the rotary embeddings, as a `config.json` has them."""
        return self.settings.get("rope_parameters") or {}

    def config(self) -> Any:
        """Return a new configuration of transformers."""
        sizes = {
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_embeddings,
        }
        layers, settings = self.settings["num_hidden_layers"], dict(self.settings)
        for key in _by_layer(settings):
            settings[key] = (settings[key] * -(-self.n_layers // layers))[: self.n_layers]
        known = {key: value for key, value in sizes.items() if key in settings}
        return configuration(settings | known)

    def with_heads(self, heads: int, kv_heads: int, **changes: Any) -> Any:
        """Return the arguments of a small model of the same class and settings, of so many heads.

        It has a layer of each kind, and windows and trained lengths below its `max_seq_len`.
        """
        settings = copy.deepcopy(self.settings)
        tokens, vocabulary = changes["max_seq_len"], changes["vocab_size"]
        kinds = list(zip(*(settings[key] for key in _by_layer(settings)), strict=True))
        chosen = sorted({kinds.index(kind) for kind in kinds})
        chosen += [i for i in range(self.n_layers) if i not in chosen]
        chosen = sorted(chosen[: max(changes["n_layers"], len(set(kinds)))])
        for key in _by_layer(settings):
            settings[key] = [settings[key][layer] for layer in chosen]
        for key in _FEED_FORWARDS:
            if settings.get(key):
                settings[key] = max(2, settings[key] * heads // self.n_heads // 2 * 2)
        for key in _EXPERTS:
            if settings.get(key) and settings.get("num_experts_per_tok"):
                settings[key] = min(settings[key], 2 * settings["num_experts_per_tok"])
        if settings.get("sliding_window"):
            settings["sliding_window"] = min(settings["sliding_window"], max(tokens // 3, 1))
        longer = [rope for rope in _ropes(settings) if rope.get("rope_type") in LONGER]
        for rope in longer:
            settings["max_position_embeddings"] = tokens // 2
            if "original_max_position_embeddings" in rope:
                rope["original_max_position_embeddings"] = tokens // 2
        if settings.get("original_max_position_embeddings"):
            settings["original_max_position_embeddings"] = tokens // 2
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if settings.get(key) is not None:
                settings[key] = 0
        sizes = {
            "num_hidden_layers": len(chosen),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.head_dim * heads,
            "vocab_size": vocabulary,
        }
        known = {key: value for key, value in sizes.items() if key in settings}
        small = ModelArgs.of(configuration(settings | known))
        small.max_seq_len = small.seq_len = tokens
        small.lora, small.init_seed = self.lora, self.init_seed
        return small

    def windows(self) -> list[int | None]:
        """List the tokens that each layer attends to; None for all."""
        window = self.settings.get("sliding_window")
        kinds = self.config().to_dict().get("layer_types")
        if not kinds:
            return [window] * self.n_layers
        return [window if kind == "sliding_attention" else None for kind in kinds]

    @property
    def share_of_experts(self) -> float:
        """The share of the experts that compute a token; 1 without any, or under other names."""
        experts = next((self.settings[k] for k in _EXPERTS if self.settings.get(k)), 0)
        taken = self.settings.get("num_experts_per_tok")
        return taken / experts if taken and experts else 1.0


def _by_layer(settings: dict[str, Any]) -> list[str]:
    """List the keys that have a value for each layer."""
    layers = settings["num_hidden_layers"]
    return [k for k, v in settings.items() if isinstance(v, list) and len(v) == layers]


def _ropes(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings of rotary embeddings: of all layers, or for each kind of layer."""
    found = settings.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in found.values()):
        yield from (value for value in found.values() if isinstance(value, dict))
    else:
        yield found


def causal_lm_of(model_type: str) -> str | None:
    """Return the name of the class of a type's causal LM, if this transformers has one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)


def configuration(settings: dict[str, Any]) -> Any:
    """Build transformers' configuration of a `config.json`."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    if getattr(made, "rope_parameters", None):
        made.standardize_rope_params()  # by keys beside it, as before each table
    return made


def in_one_line(error: Exception) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def read_args(settings: dict[str, Any], path: str, key: str) -> ModelArgs:
    """Return the arguments of the model of a `config.json`, the content of the file at `path`.

    Raises:
        ValueError: one line for the user, with `key`, that names the setting that is not built.
    """
    from transformers import CONFIG_MAPPING

    def refuse(name: str, value: object, why: str) -> NoReturn:
        shown = "missing" if value is None else json.dumps(value)
        raise ValueError(
            f"{key}: {path} has {name} = {shown}: {why}; use another model (for the "
            "tokenizer alone, copy its files into a folder without config.json)"
        )

    for name, values, why in _SUPPORTED:
        if settings.get(name) not in values:
            refuse(name, settings.get(name), why)
    kind = str(settings.get("model_type"))
    if kind not in CONFIG_MAPPING or (model := causal_lm_of(kind)) is None:
        none = "this version of transformers has no such causal LM"
        code = " (and code beside the weights is never run)" if "auto_map" in settings else ""
        refuse("model_type", kind, none + code)
    if settings.get("architectures") not in (None, [model]):
        refuse("architectures", settings["architectures"], f"it must be {model}")
    try:
        config = configuration(settings)
    except Exception as error:  # classes check their settings by errors of many kinds
        refuse("model_type", kind, f"transformers cannot read it ({in_one_line(error)})")
    try:
        args = ModelArgs.of(config)
    except (AttributeError, RuntimeError):  # none of that name, or another for each layer
        refuse("model_type", kind, "a size has another name, or differs from layer to layer")
    if args.n_heads % args.n_kv_heads != 0:
        refuse("num_key_value_heads", args.n_kv_heads, f"must divide the {args.n_heads} heads")
    if "num_hidden_layers" not in args.settings:  # other names, of models from before Llama
        refuse("model_type", kind, "families from before Llama, with other names, are not built")
    if isinstance(wide := args.settings.get("intermediate_size"), list):
        refuse("intermediate_size", wide, "only one size for all layers is built")
    if kind == "phimoe" and any(rope.get("rope_type") in LONGER for rope in _ropes(args.settings)):
        refuse("model_type", kind, "its rotary embeddings read a rank's largest position")
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in _LAYERS:
            refuse("layer_types", layer, f"only {' and '.join(_LAYERS)} are built")
    if not attends_by_name(config):
        refuse("model_type", kind, "its attention is its own, not transformers' by name")
    return args
