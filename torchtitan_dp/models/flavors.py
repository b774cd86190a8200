"""The models that can be trained: those of a `config.json`, and Llamas of some sizes by name."""

import copy
import functools
import pickle
from typing import Any

import torch

from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs, configuration


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
    args = copy.deepcopy(args)
    args.lora = None
    return args
