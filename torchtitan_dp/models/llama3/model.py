"""Llama 3: TorchTitan's Transformer with the parts of every family, and Hugging Face's formats."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.config_json import SIZES, Reader
from torchtitan_dp.models.feed_forward import Tiling
from torchtitan_dp.models.llama3.tiles import use_tiles
from torchtitan_dp.models.private import ModelArgs, PrivateAdapter, PrivateModel
from torchtitan_dp.models.rope import Rope, frequencies, rotary_table


@dataclass
class LlamaArgs(ModelArgs, TransformerModelArgs):
    """The arguments of a Llama."""

    rope: Rope | None = None
    """Those of a `config.json` or `[rope]`; None for those of TorchTitan's arguments."""

    title = "Llama"

    def rope_parameters(self) -> Rope:
        if self.rope is not None:
            return self.rope
        scaling = dataclasses.asdict(self.rope_scaling_args)
        factor, theta = scaling.pop("scaling_factor"), float(self.rope_theta)
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scaling}

    def set_rope(self, rope: Rope, window: int) -> None:
        self.rope, self.max_seq_len = rope, window

    def new_settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the `config.json` of a model, as transformers 4 and 5 read it."""
        with torch.device("meta"):
            block: Any = Llama(copy.deepcopy(self)).layers["0"]
        rope = self.rope_parameters()
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{theirs: getattr(self, ours) for ours, theirs in SIZES.items()},
            "num_key_value_heads": self.n_kv_heads or self.n_heads,
            "head_dim": self.head_size,
            "intermediate_size": block.feed_forward.w1.out_features,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
        }


class Llama(PrivateModel, Transformer):
    """A Llama."""

    model_args: LlamaArgs

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        if model_args.rope is not None:  # TorchTitan's table is another
            self.compute_rotary()

    def compute_rotary(self, device: torch.device | None = None) -> None:
        args = self.model_args
        with torch.device(device or self.freqs_cis.device):
            if args.rope is not None:
                positions_T = torch.arange(args.max_seq_len)
                self.freqs_cis = rotary_table(args.rope, args.head_size, positions_T)
            else:
                sizes = args.head_size, args.max_seq_len
                terms = args.rope_theta, args.rope_scaling_args
                self.freqs_cis = precompute_freqs_cis(*sizes, *terms)

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
    """Converts to Hugging Face's names and head layout and back, on any number of ranks."""

    model_args: LlamaArgs

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's. Collective over the FSDP mesh, if its ranks do not divide the
        heads."""
        return super().to_hf({n: self._with_whole_heads(n, v) for n, v in state_dict.items()})

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
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Those whose frequencies do not depend on a sample's length."""


def read_args(settings: dict[str, Any], path: str, key: str) -> LlamaArgs:
    """Return the arguments of the model of a `config.json`; arguments and errors as `Reader`."""
    read = Reader(settings, path, key, _SUPPORTED)
    for name in (*_SIZES, "vocab_size"):
        read.size(name)
    config = read.configuration()
    args = LlamaArgs(
        norm_eps=config.rms_norm_eps,
        rope=_rope(read, config),
        **{ours: getattr(config, theirs) for ours, theirs in SIZES.items()},
        **feed_forward_size(config.hidden_size, config.intermediate_size),
    )
    heads, kv_heads = args.n_heads, config.num_key_value_heads
    if heads % kv_heads != 0:
        read.refuse("num_key_value_heads", kv_heads, f"must divide the {heads} heads")
    if args.dim % (2 * heads) != 0 or config.head_dim != args.head_size:
        why = f"must be hidden_size / heads = {args.dim} / {heads}"
        read.refuse("head_dim", settings.get("head_dim"), why)
    return args


def _rope(read: Reader, config: Any) -> Rope:
    """Return the rotary embeddings of a configuration, if transformers computes a table of them."""
    rope = {k: v for k, v in config.rope_parameters.items() if k != "type" and v is not None}
    for key, built in (("rope_type", _ROPE_TYPES), ("partial_rotary_factor", (None, 1))):
        if rope.get(key) not in built:
            read.refuse(f"rope_parameters.{key}", rope[key], f"only one of {built} is built")
    if rope["rope_type"] == "yarn" and "factor" not in rope:  # null: as the two windows have it
        original = rope["original_max_position_embeddings"]
        rope["factor"] = config.max_position_embeddings / original
    try:
        frequencies(rope, config.head_dim)
    except Exception as error:  # of a term that is missing, or of another type
        read.refuse("rope_parameters", rope, f"transformers cannot compute it ({error!r})")
    return rope


def feed_forward_size(dim: int, hidden: int) -> dict[str, Any]:
    """Find the arguments from which TorchTitan's FeedForward computes exactly `hidden`.

    It rounds int(multiplier * int(8 dim / 3)), here within 1 below `hidden`, up to a multiple of
    `multiple_of`.
    """
    return {"multiple_of": hidden, "ffn_dim_multiplier": hidden / int(2 * (4 * dim) / 3)}
