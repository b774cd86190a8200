"""The dense models of the Qwen3 family: heads of a size of their own, norms of queries and keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.config_json import SUPPORTED, Reader, settings_of
from torchtitan_dp.models.private import PrivateAdapter, PrivateArgs, PrivateModel
from torchtitan_dp.models.rope import scaled_angles


@dataclass
class QwenArgs(PrivateArgs, Qwen3ModelArgs):
    """The arguments of a dense Qwen3."""

    def __post_init__(self) -> None:
        assert not self.moe_enabled, "experts see each other's samples"
        self.enable_weight_tying = self.tie_embeddings  # TorchTitan's name

    @property
    def head_size(self) -> int:
        return self.head_dim

    def with_heads(self, heads: int, kv_heads: int, **changes: Any) -> Any:
        hidden = max(self.hidden_dim * heads // self.n_heads, 1)
        return super().with_heads(heads, kv_heads, hidden_dim=hidden, **changes)


class Qwen(PrivateModel, Qwen3Model):
    """A dense Qwen3."""

    rotary_name = "rope_cache"
    model_args: QwenArgs

    def rotary_table(self) -> Tensor:
        if self.model_args.rope is None:
            return Qwen3Model._precompute_rope_cache(self)
        angles, factor = scaled_angles(self.model_args)
        cosines, sines = angles.cos() * factor, angles.sin() * factor
        return torch.cat([cosines, cosines, sines, sines], dim=-1)

    _precompute_rope_cache = rotary_table  # the name by which TorchTitan's constructor calls it


def _flavor(layers: int, dim: int, hidden: int, heads: int, **more: Any) -> QwenArgs:
    more = {"n_kv_heads": 8, "vocab_size": 151936, "max_seq_len": 40960, **more}
    return QwenArgs(n_layers=layers, dim=dim, hidden_dim=hidden, n_heads=heads, **more)


FLAVORS: dict[str, QwenArgs] = {
    "debug": _flavor(4, 192, 576, 4, n_kv_heads=2, head_dim=64, vocab_size=264),
    "0.6B": _flavor(28, 1024, 3072, 16, tie_embeddings=True),
    "1.7B": _flavor(28, 2048, 6144, 16, tie_embeddings=True),
    "4B": _flavor(36, 2560, 9728, 32, tie_embeddings=True),
    "8B": _flavor(36, 4096, 12288, 32),
    "14B": _flavor(40, 5120, 17408, 40),
}


class HuggingFaceAdapter(PrivateAdapter, Qwen3StateDictAdapter):
    """Converts to Hugging Face's names, without a tied output layer, and back."""

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's names; a tied output layer is the embedding's tensor."""
        return super().from_hf(dict(hf_state_dict))  # TorchTitan's adds to what it is given


_SUPPORTED = (
    ("model_type", ("qwen3",), "only dense Qwen3s have model.name = 'qwen3'"),
    ("architectures", (None, ["Qwen3ForCausalLM"]), "only Qwen3s that predict tokens"),
    ("use_sliding_window", (None, False), "attention is always over the whole record"),
    *SUPPORTED,
)


def read_args(settings: dict[str, Any], path: str, key: str) -> QwenArgs:
    """Return the arguments of the model of a `config.json`; arguments and errors as `Reader`."""
    read = Reader(settings, path, key, _SUPPORTED)
    for kind in settings.get("layer_types") or ():
        if kind != "full_attention":
            read.refuse("layer_types", kind, "attention is always over the whole record")
    head_dim = read.size("head_dim", 128)
    if head_dim % 2:
        read.refuse("head_dim", head_dim, "must be even, for rotary embeddings")
    shared = read.args(32768, "default", "linear", "yarn")
    return QwenArgs(head_dim=head_dim, hidden_dim=read.size("intermediate_size"), **shared)


def new_settings(args: QwenArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": args.hidden_dim,
        "use_sliding_window": False,
        "sliding_window": None,
        **settings_of(args, tokenizer),
    }
