"""Llama 3 for private training: TorchTitan's Transformer with the parts of every family."""

from dataclasses import dataclass

import torch
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.models.llama3.tiles import TiledLlamaBlock
from torchtitan_dp.models.private import PrivateArgs, PrivateModel
from torchtitan_dp.models.rope import scaled_angles


@dataclass
class LlamaArgs(PrivateArgs, TransformerModelArgs):
    """The arguments of a Llama."""


class Llama(PrivateModel, Transformer):
    """A Llama."""

    rotary_name = "freqs_cis"
    tiled_block = TiledLlamaBlock
    model_args: LlamaArgs

    def rotary_table(self) -> torch.Tensor:
        if self.model_args.rope is None:
            return Transformer._precompute_freqs_cis(self)
        angles, factor = scaled_angles(self.model_args)
        return torch.polar(torch.full_like(angles, factor), angles)

    _precompute_freqs_cis = rotary_table  # the name by which TorchTitan's constructor calls it


FLAVORS: dict[str, LlamaArgs] = {
    "debug": LlamaArgs(
        dim=192, n_layers=4, n_heads=4, vocab_size=264, multiple_of=64, rope_theta=500000
    ),
    "30M": LlamaArgs(  # for benchmarks on CPU, where tensors should outweigh the interpreter
        dim=512, n_layers=8, n_heads=8, vocab_size=264, multiple_of=256, rope_theta=500000
    ),
    "100M": LlamaArgs(  # the same
        dim=1024, n_layers=8, n_heads=16, vocab_size=264, multiple_of=256, rope_theta=500000
    ),
    "1B": LlamaArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,
        multiple_of=256,
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
        tie_embeddings=True,
    ),
    "3B": LlamaArgs(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim_multiplier=1.0,
        multiple_of=256,
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
        tie_embeddings=True,
    ),
    "8B": LlamaArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.3,
        multiple_of=1024,
        rope_theta=500000,
    ),
}
