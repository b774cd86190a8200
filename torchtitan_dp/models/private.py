"""The parts of a model for private training that are the same in every family.

A family has three classes, each with TorchTitan's own as the second base: arguments with
`ModelArgs`, a model with `PrivateModel`, which adds its rotary embeddings, and with
`PrivateAdapter` the conversion of its weights to Hugging Face's names and back.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.models.feed_forward import Tiling
from torchtitan_dp.models.lora import (
    LoRA,
    add_adapters,
    draw_factor_,
    is_adapter,
    lora_of,
    without_adapters,
)
from torchtitan_dp.models.loss import per_sample_loss, token_losses
from torchtitan_dp.models.loss_head import LossHead
from torchtitan_dp.models.parameters import canonical_name, copy_slice_, in_threads
from torchtitan_dp.models.rope import Rope


class _Sizes:
    """The fields of each family's arguments, as far as the package reads them."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    vocab_size: int
    max_seq_len: int


@dataclass
class ModelArgs(_Sizes):
    """Arguments beside TorchTitan's: tied embeddings, adapters, and how weights are initialized."""

    tie_embeddings: bool = False
    lora: LoRA | None = None
    init_seed: int = 0
    draw_weights: bool = True
    """Whether `init_weights` draws the weights. If not, they are NaN until they are loaded, which
    the load checks (a draw of 8B takes minutes)."""
    draw_adapters: bool = True
    """The same for the factors of `lora`, which initial weights may lack."""

    @property
    def head_size(self) -> int:
        """The size of a head of queries or keys."""
        return int(self.dim // self.n_heads)

    @property
    def share_of_experts(self) -> float:
        """The share of the experts that a token is computed by; 1 without experts, or under names
        that are not known."""
        return 1.0

    def windows(self) -> list[int | None]:
        """List the tokens that each layer attends to; None for all."""
        return [None] * self.n_layers

    @property
    def title(self) -> str:
        """The name of the kind of model for people."""
        raise NotImplementedError

    def new_settings(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the `config.json` of such a model and its tokenizer."""
        raise NotImplementedError

    def tied(self) -> dict[str, str]:
        """Return our names of tied parameters, with those of whose tensors they are."""
        return {"output.weight": "tok_embeddings.weight"}

    def rope_parameters(self) -> Rope:
        """Return the rotary embeddings, as a `config.json` has them."""
        raise NotImplementedError

    def set_rope(self, rope: Rope, window: int) -> None:
        """Set other rotary embeddings, and the positions up to which they serve. Raises ValueError,
        one line for the user, where the family computes others."""
        raise NotImplementedError

    def computed_with(self) -> dict[str, Any]:
        """Return what the model computes with beside its weights and adapters, as JSON has it."""
        others = {"lora", "max_seq_len", "init_seed", "draw_weights", "draw_adapters"}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in others}

    def with_heads(self, heads: int, kv_heads: int, **changes: Any) -> Any:
        """Return the arguments of a narrower model, of so many heads of this one's size."""
        changes |= {"dim": self.head_size * heads, "n_heads": heads, "n_kv_heads": kv_heads}
        return dataclasses.replace(self, **changes)

    def update_from_config(self, job_config, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().update_from_config(job_config, **kwargs)  # type: ignore[misc]
        self.init_seed = job_config.debug.seed or 0
        self.lora = lora_of(job_config)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Count parameters, and a token's FLOPs as TorchTitan does, without the gradients of frozen
        weights, with a tied output layer's products; of experts, those that it takes."""
        active, total = 0.0, 0
        embedding = model.get_parameter("tok_embeddings.weight")
        for parameter in model.parameters():
            share = self.share_of_experts if parameter.dim() == 3 else 1.0
            if parameter is not embedding or self.tie_embeddings:
                active += share * parameter.numel() * (6 if parameter.requires_grad else 4)
            total += parameter.numel()
        scores = 12 * self.n_layers * self.n_heads * self.head_size * seq_len
        return total, int(active) + scores


class PrivateAdapter:
    """Leaves out LoRA's factors and tied parameters, which no file of a whole model has."""

    tied: dict[str, str]
    """Our names of tied parameters, with those of whose tensors they are."""

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        # TorchTitan reads an index there, which only matters for saving.
        super().__init__(model_args, None)  # type: ignore[call-arg]
        self.hf_assets_path = hf_assets_path or None
        self.tied = model_args.tied() if model_args.tie_embeddings else {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's names and layout."""
        kept = without_adapters(state_dict, *self.tied)
        converted: dict[str, Any] = super().to_hf(kept)  # type: ignore[misc]
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's; a tied parameter is the other's tensor."""
        found: dict[str, Any] = super().from_hf(hf_state_dict)  # type: ignore[misc]
        return found | {one: found[same] for one, same in self.tied.items() if same in found}


class PrivateModel(nn.Module):
    """A decoder with per-sample losses, adapters, and initial weights that depend on no mesh."""

    model_args: Any
    tok_embeddings: nn.Embedding
    layers: Any  # the blocks, an nn.ModuleDict
    freqs_cis: Tensor  # rotary embeddings, complex, by position
    draws_at_once: int | None = None
    """Threads of `init_weights`; None for PyTorch's number."""
    norm: nn.Module
    output: nn.Linear

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        # Wraps the call of a block, by the block's input.
        self.around_block: Callable[[Tensor], AbstractContextManager[None]] = lambda _: (
            contextlib.nullcontext()
        )
        if model_args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if model_args.lora is not None:
            add_adapters(self, self.layers, model_args.lora)

    def forward(
        self,
        tokens: Tensor,
        attention_masks: None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Any:
        """Return logits (B, T, V); with labels and targets, their `per_sample_loss`; with labels
        alone, and without gradients, their `token_losses`.

        Args:
            positions: int64 (1 or B, T), of this rank's tokens; the same for all samples.
        """
        if labels is None:
            return super().forward(tokens, attention_masks, positions)  # type: ignore[misc]
        h_BTD = self.tok_embeddings(tokens)
        # Gathered once for all layers: samples have the same positions.
        rotary = self.freqs_cis if positions is None else self.freqs_cis[positions[0]]
        for layer in self.layers.values():
            with self.around_block(h_BTD):
                h_BTD = layer(h_BTD, rotary, attention_masks)
        h_BTD = self.norm(h_BTD)
        if isinstance(self.output, LossHead):
            return self.output(h_BTD, labels, targets)
        return self.losses(self.output(h_BTD), labels, targets)

    def losses(self, logits_BTV: Tensor, labels: Tensor, targets: Tensor | None) -> Tensor:
        """Return losses of whole logits, as `forward` does."""
        if targets is None:
            return token_losses(logits_BTV, labels)
        return per_sample_loss(logits_BTV, labels, targets)

    def outer(self) -> list[nn.Module]:
        """List what has parameters beside blocks, embedding and output layer."""
        return [self.norm]

    def kept_in_fp32(self) -> set[str]:
        """Return the names of parameters that are fp32 also in a model of bf16."""
        return set()

    def attention_modules(self) -> list[nn.Module]:
        """List TorchTitan's modules of attention, on which a ring acts."""
        return [block.attention.inner_attention for block in self.layers.values()]

    def share_samples(self, shard: Shard) -> None:
        """Prepare what is not attention for samples of which this rank has a part."""

    def use_per_sample_layers(self) -> None:
        """Have layers form per-sample gradients, in place. Raises ValueError, one line for the
        user, where samples meet."""
        per_sample_layers(self)

    def use_loss_head(self, chunk_tokens: int) -> None:
        """Compute losses by `LossHead`, in place."""
        self.output = LossHead.over(self.output, chunk_tokens)

    def use_tiles(self, tiling: Tiling) -> None:
        """Compute blocks in tiles of tokens, in place; before activation checkpointing, FSDP2."""
        raise NotImplementedError

    @property
    def in_tiles(self) -> bool:
        """Whether `use_tiles` finds something to compute in tiles."""
        return True

    def offload(self, around: Callable[[Tensor], AbstractContextManager[None]]) -> None:
        """Call each block, checkpointed or not, within `around` of its input."""
        self.around_block = around

    def compute_rotary(self, device: torch.device | None = None) -> None:
        """Set the buffers of rotary embeddings, on their own device by default."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Set each parameter to its slice of a whole drawn from (`debug.seed`, its name) alone.

        The distributions are TorchTitan's. Each whole parameter is drawn on the CPU, one at a
        time and thread, so the result is bit-identical on every mesh and rank.
        """
        self.compute_rotary(buffer_device)
        args, drawn = self.model_args, {}
        if args.tie_embeddings and not isinstance(self.output.weight, DTensor):
            # Without FSDP2, `to_empty` has made two of one: then an export would lack the second.
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            if args.draw_adapters if is_adapter(name) else args.draw_weights:
                drawn[canonical_name(name)] = parameter
            else:
                parameter.fill_(torch.nan)
        draws = [functools.partial(self._drawn, name, p.shape) for name, p in drawn.items()]
        wholes = in_threads(draws, self.draws_at_once)
        for parameter, whole in zip(drawn.values(), wholes, strict=True):
            copy_slice_(parameter, whole)

    @torch.no_grad()  # which a thread does not inherit
    def _drawn(self, name: str, shape: torch.Size) -> Tensor:
        """Draw a whole parameter, fp32 on the CPU, from a generator of its own."""
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        digest = hashlib.sha256(f"{self.model_args.init_seed}/{name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")  # 32 bits suffice: initial weights are public
        generator = torch.Generator().manual_seed(seed)
        if is_adapter(name):
            draw_factor_(whole, name, generator)
        else:
            self._initialize_(whole, name, generator)
        return whole

    def _initialize_(self, whole: Tensor, name: str, generator: torch.Generator) -> None:
        """Draw a whole parameter, in place, from TorchTitan's distribution."""
        args = self.model_args
        if "norm" in name:
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
