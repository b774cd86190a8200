"""Dense Qwen3 for private training: TorchTitan's model with the parts of every family."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_dp.models.private import PrivateArgs, PrivateModel
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

    def rotary_table(self) -> torch.Tensor:
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
