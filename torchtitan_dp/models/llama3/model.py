"""Llama 3 for private training: TorchTitan's Transformer with the parts of every family."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.models.private import PrivateArgs, PrivateModel


@dataclass
class LlamaArgs(PrivateArgs, TransformerModelArgs):
    """The arguments of a Llama."""


class Llama(PrivateModel, Transformer):
    """A Llama."""

    rotary_name = "freqs_cis"
    model_args: LlamaArgs

    def rotary_table(self) -> torch.Tensor:
        return Transformer._precompute_freqs_cis(self)

    def initialize_(self, whole: torch.Tensor, name: str, generator: torch.Generator) -> None:
        args = self.model_args
        if name == "output.weight" or (args.tie_embeddings and name == "tok_embeddings.weight"):
            std = args.dim**-0.5
            nn.init.trunc_normal_(whole, std=std, a=-3 * std, b=3 * std, generator=generator)
        elif name == "tok_embeddings.weight":
            nn.init.normal_(whole, generator=generator)
        elif name.rsplit(".", 2)[-2] in ("wq", "wk", "wv", "w1"):
            nn.init.trunc_normal_(whole, std=0.02, generator=generator)
        else:
            layer = int(name.split(".")[1])
            depth = layer + 1 if args.depth_init else args.n_layers
            std = 0.02 / (2 * depth) ** 0.5
            nn.init.trunc_normal_(whole, std=std, generator=generator)


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
