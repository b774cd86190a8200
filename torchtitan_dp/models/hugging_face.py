"""The shape of the model, from a Hugging Face folder's `config.json` or a flavor, and its weights.

`config.json` counts if the folder of `model.hf_assets_path` (or of Hugging Face weights to start
from) has one, else `model.flavor`; with the adapters of `[lora]`.
"""

import copy
import dataclasses
import functools
import json
import os
import pickle
import re
from typing import Any

import torch

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    CONFIG_FILE,
    LLAMAS,
    TRANSFORMERS,
    config_file,
    trained,
    weights_folder,
)
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.models.causal_lm.model import CausalLM, HuggingFaceAdapter
from torchtitan_dp.models.causal_lm.settings import ModelArgs, configuration, lora_of, read_args
from torchtitan_dp.models.weight_files import REMEDY, tensors

_TRAINED_DTYPES = ("F32", "BF16", "F16")
_ROOTED = re.compile(r"/|~|\\\\|[A-Za-z]:[\\/]|file:", re.IGNORECASE)
# Of transformers and PEFT: a path that was relative to another working directory looks like a name.
_PATH_KEYS = frozenset(
    {
        *("_name_or_path", "name_or_path", "base_model_name_or_path"),
        *("tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file"),
        *("auto_map", "custom_pipelines"),
    }
)


def _llama(layers: int, dim: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    """Return the `config.json` of a Llama, by default of 3.1's rotary embeddings."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": more.pop("factor", 8.0)}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "num_attention_heads": heads,
        "num_key_value_heads": more.pop("kv_heads", heads),
        "intermediate_size": hidden,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": rope | {"original_max_position_embeddings": 8192},
        **more,
    }


_3_2 = {"kv_heads": 8, "factor": 32.0, "tie_word_embeddings": True}
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": _llama(4, 192, 4, 512, vocab_size=264),
    # For benchmarks on CPU, where tensors should outweigh the interpreter.
    "30M": _llama(8, 512, 8, 1536, vocab_size=264),
    "100M": _llama(8, 1024, 16, 2816),
    "1B": _llama(16, 2048, 32, 8192, **_3_2),
    "3B": _llama(28, 3072, 24, 8192, **_3_2),
    "8B": _llama(32, 4096, 32, 14336, kv_heads=8),
}
"""The `config.json` of Llamas, by `model.flavor`."""


def flavor(name: str) -> ModelArgs:
    """Return the arguments of a flavor."""
    return ModelArgs.of(configuration(FLAVORS[name]))


def on_meta(args: ModelArgs) -> CausalLM:
    """Build the model without memory, for its names, shapes and size."""
    with torch.device("meta"):
        return CausalLM(copy.deepcopy(args))


def skeleton(args: ModelArgs) -> CausalLM:
    """Return the model `on_meta`, built once for equal arguments: it is not to be changed."""
    return _skeleton(pickle.dumps(args))


@functools.lru_cache(maxsize=2)
def _skeleton(args: bytes) -> CausalLM:
    return on_meta(pickle.loads(args))


def parameter_count(args: ModelArgs) -> int:
    """Count the parameters; a tied weight counts once."""
    return sum(parameter.numel() for parameter in skeleton(args).parameters())


def trained_count(args: ModelArgs) -> int:
    """Count the parameters that are trained."""
    return sum(p.numel() for p in skeleton(args).parameters() if p.requires_grad)


def without_lora(args: ModelArgs) -> ModelArgs:
    """Return the arguments of the model without adapters, which are also those of a merged one."""
    return dataclasses.replace(copy.deepcopy(args), lora=None)


def shape(config: JobConfig) -> ModelArgs:
    """Return the arguments of the model that `config` trains, a copy of its own. `max_seq_len` is
    the given model's window. ValueError: one line for the user."""
    source, model = config_file(config), config.model
    if source is None and model.name == TRANSFORMERS:
        raise ValueError(
            f"model.hf_assets_path = '{model.hf_assets_path}': model.name = '{TRANSFORMERS}' needs "
            f"a {CONFIG_FILE} there; name a Hugging Face folder"
        )
    if model.name not in (LLAMAS, TRANSFORMERS) or (source is None and model.flavor not in FLAVORS):
        raise ValueError(
            f"model = {model.name} {model.flavor}: use name '{LLAMAS}' and one of the flavors "
            f"{', '.join(FLAVORS)}; or leave model.name out, for the model of any config.json"
        )
    args = flavor(model.flavor) if source is None else read_args(read_settings(*source), *source)
    if source is not None and config.checkpoint.initial_load_in_hf:
        _refuse_other_model(weights_folder(config), source, args)
    args.lora, args.seq_len = lora_of(config), config.training.seq_len
    return args


def _refuse_other_model(weights: tuple[str, str], source: tuple[str, str], args: ModelArgs) -> None:
    """Raise ValueError if the weights come with a `config.json` of another model than `args`."""
    folder, key = weights
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(path):
        return
    theirs = read_args(read_settings(path, key), path, key)
    window = "max_position_embeddings"  # a limit that we do not have
    theirs.settings[window], theirs.max_seq_len = args.settings[window], args.max_seq_len
    if theirs != args:
        raise ValueError(
            f"{key} = '{folder}': {CONFIG_FILE} is of another model than {source[0]} ({source[1]})"
            "; name one model in both"
        )


def read_settings(path: str, key: str) -> dict[str, Any]:
    """Read a `config.json`; raise ValueError if it is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {path} cannot be read ({error}); download it again") from error
    return settings


def origin(config: JobConfig) -> str:
    """Name the source of the shape, for messages."""
    source = config_file(config)
    given = f"model.flavor = '{config.model.flavor}'" if source is None else source[0]
    return f"{given} with lora.rank = {config.lora.rank}" if config.lora.rank else given


def describe(config: JobConfig, args: ModelArgs) -> str:
    """Describe the model, the source of its shape and that of its weights, for the console."""
    of_these = f"{trained_count(args):,} trained: {trained(config)}; " if args.lora else ""
    more = ", tied embeddings" if args.tie_embeddings else ""
    if config_file(config) is not None:
        more += ", without dropout"
    start = f"drawn from debug.seed = {config.debug.seed or 0}"
    if config.checkpoint.initial_load_in_hf:
        start = weights_folder(config)[0]
    return (
        f"model: {args.title} of {parameter_count(args):,} parameters ({args.n_layers} layers of "
        f"{args.dim:,}, {args.n_heads} heads, vocabulary {args.vocab_size:,}{more}), from "
        f"{origin(config)}; {of_these}initial weights: {start}"
    )


def export_settings(config: JobConfig, args: ModelArgs) -> dict[str, Any]:
    """Return the `config.json` of the trained model, without local paths: the given one, or one of
    its shape; `torch_dtype` is `checkpoint.export_dtype`, unless that is "float32" and the given
    `config.json` has "bfloat16"."""
    source = config_file(config)
    if source is None:
        settings = args.new_settings(load_tokenizer(config.model.hf_assets_path))
    else:
        settings = read_settings(*source)
    named = [key for key in ("dtype", "torch_dtype") if key in settings] or ["torch_dtype"]
    dtype = config.checkpoint.export_dtype
    if dtype == "float32" and settings.get(named[0]) == "bfloat16":
        dtype = "bfloat16"
    return without_local_paths(settings | dict.fromkeys(named, dtype))


def check_weights(problem: str, folder: str, args: ModelArgs) -> None:
    """Raise ValueError, `problem` and why, if safetensors are broken or not all the model's."""
    try:
        found = tensors(folder)
    except ValueError as mistake:
        raise ValueError(f"{problem}: {mistake}") from None
    expected = HuggingFaceAdapter(args, None).to_hf(skeleton(args).state_dict())
    for name, tensor in expected.items():
        if name not in found:
            more = "all experts in one tensor: save_pretrained(…, save_original_format=False)"
            more = f", with {more}" if args.share_of_experts < 1 else ""
            raise ValueError(f"{problem}: {name} is in none of its weight files; {REMEDY}{more}")
        size, dtype = found[name]
        if size != tuple(tensor.shape):
            raise ValueError(
                f"{problem}: {name} has shape {list(size)}, but the model's is "
                f"{list(tensor.shape)}; take weights and {CONFIG_FILE} from one model"
                + ", which has none here"
                * (not os.path.exists(os.path.join(folder, CONFIG_FILE)))
            )
        if dtype not in _TRAINED_DTYPES:
            raise ValueError(f"{problem}: {name} is quantized ({dtype}); take bfloat16 or float32")


def is_local_path(value: Any) -> bool:
    """Return whether a value is an absolute path, or one with a separator that exists."""
    if not isinstance(value, str):
        return False
    separated = ("/" in value or os.sep in value) and "\0" not in value
    return bool(_ROOTED.match(value)) or (separated and os.path.exists(value))


def without_local_paths(value: Any) -> Any:
    """Copy a JSON value without paths and the keys for paths, at any depth.

    Guarantee:
        No string of the copy is an absolute path, on Linux, macOS or Windows, nor one that exists
        from the working directory. Keys of objects are kept, and so are texts of which a path is
        only a part. Not for `tokenizer.json`: some of its tokens begin with a slash.
    """
    if isinstance(value, dict):
        return {
            key: without_local_paths(held)
            for key, held in value.items()
            if key not in _PATH_KEYS and not is_local_path(held)
        }
    if isinstance(value, list):
        return [without_local_paths(held) for held in value if not is_local_path(held)]
    return value
