"""The arguments of a causal LM of transformers: its `config.json`.

A setting that would be computed otherwise than transformers does is refused by its key.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchtitan.protocols.model import BaseModelArgs

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.causal_lm.transformers_private import attends_by_name, tied_names
from torchtitan_dp.models.config_json import SIZES, Reader, configuration
from torchtitan_dp.models.private import ModelArgs
from torchtitan_dp.models.rope import Rope

_LAYERS = ("full_attention", "sliding_attention")
# Of the file and of what is generated, not of the model.
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_NOT_OF_THE_MODEL |= {"architectures", "output_router_logits", "_attn_implementation"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FEED_FORWARDS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
PREFIX = "model."
"""Of transformers' own names of parameters in ours."""
LONGER = ("longrope", "dynamic")
"""Rotary embeddings whose frequencies depend on the length of the sample."""

_SUPPORTED = (
    ("quantization_config", (None,), "weights must be floating point; take the unquantized ones"),
    ("is_encoder_decoder", (None, False), "only models that predict tokens from those before"),
    ("is_causal", (None, True), "only models that predict tokens from those before"),
    ("use_bidirectional_attention", (None, False), "only causal attention is built"),
    ("attention_chunk_size", (None,), "attention within chunks is not built"),
    ("text_config", (None,), "only models of text alone are built"),
    ("vision_config", (None,), "only models of text alone are built"),
)


@dataclass
class CausalLMArgs(ModelArgs, BaseModelArgs):
    """A `config.json`, all defaults filled in, and the sizes in it that the package reads."""

    settings: dict[str, Any] = field(default_factory=dict)
    dim: int = 0
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int | None = None
    head_dim: int = 0
    vocab_size: int = 0
    max_seq_len: int = 0

    @classmethod
    def of(cls, config: Any) -> "CausalLMArgs":
        """Return the arguments of a configuration of transformers."""
        heads = config.num_attention_heads
        sizes = {ours: getattr(config, key) for ours, key in SIZES.items() if ours != "n_kv_heads"}
        return cls(
            settings={k: v for k, v in config.to_dict().items() if k not in _NOT_OF_THE_MODEL},
            n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            **sizes,
        )

    @property
    def head_size(self) -> int:
        return self.head_dim

    def tied(self) -> dict[str, str]:
        return {PREFIX + one: PREFIX + same for one, same in tied_names(self.config()).items()}

    @property
    def title(self) -> str:
        return str(self.settings["model_type"])

    def new_settings(self, _: Tokenizer) -> dict[str, Any]:
        settings: dict[str, Any] = self.config().to_dict()
        return settings

    def computed_with(self) -> dict[str, Any]:
        return self.settings

    def rope_parameters(self) -> Rope:
        return self.settings.get("rope_parameters") or {}

    def set_rope(self, rope: Rope, window: int) -> None:
        settings = self.settings | {"rope_parameters": rope, "max_position_embeddings": window}
        try:
            found = configuration(settings).rope_parameters
        except (KeyError, ValueError):  # the family has no such type, or each layer has its own
            found = {}
        if "rope_theta" not in self.rope_parameters() or not rope.items() <= found.items():
            raise ValueError(
                f"rope: transformers' {settings['model_type']} has other terms of rotary "
                "embeddings; leave [rope] out, and edit rope_parameters in config.json"
            )
        self.settings, self.max_seq_len = settings, window

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
        if longer:
            settings["max_position_embeddings"] = tokens // 2
        for rope in longer:
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
        small = CausalLMArgs.of(configuration(settings | known))
        small.max_seq_len, small.lora, small.init_seed = tokens, self.lora, self.init_seed
        return small

    def windows(self) -> list[int | None]:
        window = self.settings.get("sliding_window")
        kinds = self.config().to_dict().get("layer_types")
        if not kinds:
            return [window] * self.n_layers
        return [window if kind == "sliding_attention" else None for kind in kinds]

    @property
    def experts_key(self) -> str | None:
        """The key of the number of experts; None without."""
        for key in (*_EXPERTS, *self.settings):
            number = self.settings.get(key)
            if "expert" in key and type(number) is int and number > 1:
                return key
        return None

    @property
    def share_of_experts(self) -> float:
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


def read_args(settings: dict[str, Any], path: str, key: str) -> CausalLMArgs:
    """Return the arguments of the model of a `config.json`; arguments and errors as `Reader`."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    read = Reader(settings, path, key, _SUPPORTED)
    kind = str(settings.get("model_type"))
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if kind not in CONFIG_MAPPING or name is None:
        none = "this version of transformers has no such causal LM"
        code = " (and code beside the weights is never run)" if "auto_map" in settings else ""
        read.refuse("model_type", kind, none + code)
    if settings.get("architectures") not in (None, [name]):
        read.refuse("architectures", settings["architectures"], f"it must be {name}")
    for size in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if size in settings:
            read.size(size)
    config = read.configuration()
    try:
        args = CausalLMArgs.of(config)
    except (AttributeError, RuntimeError):  # none of that name, or another for each layer
        read.refuse("model_type", kind, "a size has another name, or differs from layer to layer")
    if "num_hidden_layers" not in args.settings:  # other names, of models from before Llama
        read.refuse("model_type", kind, "its sizes have names that are not built")
    if isinstance(wide := args.settings.get("intermediate_size"), list):
        read.refuse("intermediate_size", wide, "only one size for all layers is built")
    if kind == "phimoe" and any(rope.get("rope_type") in LONGER for rope in _ropes(args.settings)):
        read.refuse("model_type", kind, "its rotary embeddings read a rank's largest position")
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in _LAYERS:
            read.refuse("layer_types", layer, f"only {' and '.join(_LAYERS)} are built")
    if not attends_by_name(config):
        read.refuse("model_type", kind, "its attention is its own, not transformers' by name")
    return args
