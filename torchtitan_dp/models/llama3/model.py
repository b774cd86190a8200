"""Llama 3 for private training: TorchTitan's Transformer, tied embeddings, mesh-free init."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_dp.checkpoint.adapters import is_adapter
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.models.lora import LoRA, add_adapters, draw_factor_, lora_of
from torchtitan_dp.models.loss import per_sample_loss
from torchtitan_dp.models.loss_head import LossHead
from torchtitan_dp.models.parameters import canonical_name, copy_slice_, in_threads


@dataclass
class LlamaArgs(TransformerModelArgs):
    """Extends TorchTitan's model arguments by whether the output layer is the embedding
    transposed, and by what is trained beside frozen weights."""

    tie_embeddings: bool = False
    lora: LoRA | None = None
    init_seed: int = 0
    draw_weights: bool = True
    """False: weights are about to be loaded, so `init_weights` draws none (for 8B it takes minutes)
    and sets NaN, which `require_loaded` finds."""
    draw_adapters: bool = True
    """False: those of `lora` are about to be loaded, too. Initial weights need not have any."""

    def update_from_config(self, job_config, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().update_from_config(job_config, **kwargs)
        self.init_seed = job_config.debug.seed or 0
        self.lora = lora_of(job_config)
        # Without privacy nobody asks `require_loaded`.
        start, asked = decide_start(job_config), job_config.privacy.enable
        self.draw_weights = not (asked and start.loads)
        self.draw_adapters = not (asked and start.resumes)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs of a token (TorchTitan's own count, less
        the gradients of what is frozen)."""
        parameters, flops = super().get_nparams_and_flops(model, seq_len)
        embeddings = {id(p) for p in model.tok_embeddings.parameters()}  # type: ignore[union-attr]
        of_products = (p for p in model.parameters() if id(p) not in embeddings)
        return parameters, flops - 2 * sum(p.numel() for p in of_products if not p.requires_grad)


class Llama(Transformer):
    """Extends TorchTitan's Transformer by tied embeddings and initial weights that know no mesh."""

    model_args: LlamaArgs
    freqs_cis: torch.Tensor

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        # Of a block's input; the block is called within.
        self.around_block: Callable[[torch.Tensor], AbstractContextManager[None]] = lambda _: (
            contextlib.nullcontext()
        )
        if model_args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if model_args.lora is not None:
            add_adapters(self, self.layers, model_args.lora)

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        attention_masks: None = None,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits (B, T, V); with labels and targets, `models.loss.per_sample_loss` of them.

        Args:
            positions: int64 (1 or B, T), the same for all samples: where this rank's tokens are.
        """
        if labels is None or targets is None:
            return super().forward(tokens, attention_masks, positions)
        h_BTD = self.tok_embeddings(tokens)
        # Samples have the same positions: gathered once for all layers, not by and for each.
        freqs_cis = self.freqs_cis if positions is None else self.freqs_cis[positions[0]]
        for layer in self.layers.values():
            with self.around_block(h_BTD):
                h_BTD = layer(h_BTD, freqs_cis, attention_masks)
        h_BTD = self.norm(h_BTD)
        if isinstance(self.output, LossHead):
            return self.output(h_BTD, labels, targets)
        return per_sample_loss(self.output(h_BTD), labels, targets)

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Set every parameter to the slice of a whole drawn from (`debug.seed`, its name) alone.

        The distributions are TorchTitan's. Each whole parameter is drawn on the CPU, one at a
        time and thread, so the result is bit-identical on every mesh and rank.
        """
        with torch.device(buffer_device or self.freqs_cis.device):
            self.freqs_cis = self._precompute_freqs_cis()
        args, drawn = self.model_args, {}
        if args.tie_embeddings and not isinstance(self.output.weight, DTensor):
            # Without FSDP2, `to_empty` has made two of one: then an export would lack the second.
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            if args.draw_adapters if is_adapter(name) else args.draw_weights:
                drawn[canonical_name(name)] = parameter
            else:
                parameter.fill_(torch.nan)
        draws = [functools.partial(_drawn, name, p.shape, args) for name, p in drawn.items()]
        for parameter, whole in zip(drawn.values(), in_threads(draws), strict=True):
            copy_slice_(parameter, whole)


@torch.no_grad()  # which a thread does not inherit
def _drawn(name: str, shape: torch.Size, args: LlamaArgs) -> torch.Tensor:
    """Draw the whole parameter of that name, fp32 on the CPU, from a generator of its own."""
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    digest = hashlib.sha256(f"{args.init_seed}/{name}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")  # 32 bits suffice: initial weights are public
    _draw_(whole, name, args, torch.Generator().manual_seed(seed))
    return whole


def _draw_(whole: torch.Tensor, name: str, args: LlamaArgs, generator: torch.Generator) -> None:
    """Fill `whole` as TorchTitan's Llama initializes the parameter of that name."""
    if is_adapter(name):
        draw_factor_(whole, name, generator)
    elif "norm" in name:
        whole.fill_(1.0)
    elif name == "output.weight" or (args.tie_embeddings and name == "tok_embeddings.weight"):
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
