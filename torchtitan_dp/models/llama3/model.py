"""Llama 3: TorchTitan's Transformer with the parts of every family, and Hugging Face's formats."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.config_json import Reader, is_positive
from torchtitan_dp.models.feed_forward import Tiling
from torchtitan_dp.models.llama3.tiles import use_tiles
from torchtitan_dp.models.parameters import TIED_OUTPUT
from torchtitan_dp.models.private import PrivateAdapter, PrivateArgs, PrivateModel
from torchtitan_dp.models.rope import scaled_angles


@dataclass
class LlamaArgs(PrivateArgs, TransformerModelArgs):
    """The arguments of a Llama."""


class Llama(PrivateModel, Transformer):
    """A Llama."""

    rotary_name = "freqs_cis"
    model_args: LlamaArgs

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        if model_args.rope is not None:  # TorchTitan's table is another
            self.compute_rotary()

    def rotary_table(self) -> Tensor:
        args = self.model_args
        if args.rope is None:
            sizes = args.head_size, args.max_seq_len
            return precompute_freqs_cis(*sizes, args.rope_theta, args.rope_scaling_args)
        angles, factor = scaled_angles(args)
        return torch.polar(torch.full_like(angles, factor), angles)

    def use_tiles(self, tiling: Tiling) -> None:
        use_tiles(self.layers, tiling)


def _flavor(layers: int, dim: int, heads: int, multiple_of: int, **more: Any) -> LlamaArgs:
    sizes: dict[str, Any] = {"n_layers": layers, "dim": dim, "n_heads": heads}
    return LlamaArgs(multiple_of=multiple_of, rope_theta=500000, **sizes, **more)


def _scaled(**more: Any) -> dict[str, Any]:
    """Return the arguments of Llama 3.2, whose windows are longer."""
    scaling = RoPEScalingArgs(scaling_factor=32.0)
    return {"n_kv_heads": 8, "rope_scaling_args": scaling, "tie_embeddings": True, **more}


FLAVORS: dict[str, LlamaArgs] = {
    "debug": _flavor(4, 192, 4, 64, vocab_size=264),
    # For benchmarks on CPU, where tensors should outweigh the interpreter.
    "30M": _flavor(8, 512, 8, 256, vocab_size=264),
    "100M": _flavor(8, 1024, 16, 256, vocab_size=264),
    "1B": _flavor(16, 2048, 32, 256, **_scaled(ffn_dim_multiplier=1.5)),
    "3B": _flavor(28, 3072, 24, 256, **_scaled(ffn_dim_multiplier=1.0)),
    "8B": _flavor(32, 4096, 32, 1024, n_kv_heads=8, ffn_dim_multiplier=1.3),
}


class HuggingFaceAdapter(PrivateAdapter, Llama3StateDictAdapter):
    """Converts to Hugging Face's names and head layout and back, also tied weights, on any number
    of ranks."""

    model_args: LlamaArgs

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's, without a tied output layer and LoRA's factors.

        Collective over the FSDP mesh, if its ranks do not divide the heads.
        """
        left_out = TIED_OUTPUT if self.model_args.tie_embeddings else None
        kept = {name: value for name, value in state_dict.items() if name != left_out}
        return super().to_hf({n: self._with_whole_heads(n, value) for n, value in kept.items()})

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's; a tied output layer is the embedding's tensor."""
        state_dict: dict[str, Any] = super().from_hf(hf_state_dict)
        if self.model_args.tie_embeddings and "tok_embeddings.weight" in state_dict:
            state_dict[TIED_OUTPUT] = state_dict["tok_embeddings.weight"]
        return state_dict

    def _with_whole_heads(self, name: str, value: Any) -> Any:
        """Replicate wq or wk if a head lies on two ranks: heads are permuted one by one."""
        if not isinstance(value, DTensor) or not name.endswith(("wq.weight", "wk.weight")):
            return value
        heads, mesh = self.model_args.n_heads, value.device_mesh
        if name.endswith("wk.weight"):
            heads = self.model_args.n_kv_heads or heads
        ranks = 1
        for dim, placement in enumerate(value.placements):
            ranks *= mesh.size(dim) if isinstance(placement, Shard) else 1
        return value if heads % ranks == 0 else value.redistribute(mesh, [Replicate()] * mesh.ndim)


# To TorchTitan, wavelengths below original / high_freq_factor are not scaled: here, all of them.
NO_ROPE_SCALING = RoPEScalingArgs(scaling_factor=1.0, original_max_position_embeddings=2**62)

_SUPPORTED = (
    ("model_type", ("llama",), "only Llamas have model.name = 'llama3'"),
    ("architectures", (None, ["LlamaForCausalLM"]), "only Llamas that predict tokens"),
    ("hidden_act", (None, "silu"), "only 'silu' is built"),
    ("attention_bias", (None, False), "biases are not built"),
    ("mlp_bias", (None, False), "biases are not built"),
    ("attention_dropout", (None, 0), "dropout is not built; set it to 0"),
    ("sliding_window", (None,), "attention is always over the whole record"),
    ("quantization_config", (None,), "weights must be floating point; take the unquantized ones"),
)
_ROPE_KINDS = ("default", "llama3", "linear", "yarn")
_ROPE_KEYS = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def read_args(settings: dict[str, Any], path: str, key: str) -> LlamaArgs:
    """Return the arguments of the model of a `config.json`; arguments and errors as `Reader`."""
    read = Reader(settings, path, key, _SUPPORTED)
    args = LlamaArgs(
        rope_scaling_args=_llama_scaling(read),
        **read.args(2048, *_ROPE_KINDS),
        **feed_forward_size(read.size("hidden_size"), read.size("intermediate_size")),
    )
    dim, heads = args.dim, args.n_heads
    if dim % (2 * heads) != 0 or read.size("head_dim", dim // heads) != dim // heads:
        head_dim = settings.get("head_dim")
        read.refuse("head_dim", head_dim, f"must be hidden_size / heads = {dim} / {heads}")
    return args


def _llama_scaling(read: Reader) -> RoPEScalingArgs:
    """Read Llama 3's own scaling, which TorchTitan computes."""
    _, kind, name, values = read.rope(*_ROPE_KINDS)
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
    """Return the `config.json` of a model, as transformers 4 and 5 read it."""
    with torch.device("meta"):
        block: Any = Llama(copy.deepcopy(args)).layers["0"]
    scaling = {key: getattr(args.rope_scaling_args, ours) for key, ours in _ROPE_KEYS.items()}
    own = None if args.rope_scaling_args == NO_ROPE_SCALING else {"rope_type": "llama3", **scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": block.feed_forward.w1.out_features,
        "mlp_bias": False,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.head_size,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": float(args.rope_theta),
        "rope_scaling": own if args.rope is None else args.rope.settings(),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": args.tie_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
