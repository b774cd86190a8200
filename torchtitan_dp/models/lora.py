"""LoRA: small trained factors beside frozen linear layers (Hu et al. 2021, "LoRA", section 4.1).

A target's y = x W^T becomes x W^T + (alpha / r) (x A^T) B^T, with A (r, in) and B (out, r). A is
drawn and B is 0, so that training starts from the model as it was given. `freeze_a` trains B alone
(Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning", section 4).

Guarantee:
    Only factors are trained: `nn.Linear`s of their own, clipped and noised like any. A frozen
    weight has no gradient, no place in the sum and no optimizer state.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.config import ALL_LINEAR
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.parameters import copy_slice_, normal_of_name

FACTORS = ("lora_a", "lora_b")
"""The modules of the factors A and B, beside the weight of the layer that they adapt."""

_Value = TypeVar("_Value")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a factor of LoRA."""
    return name.split(".")[-2:-1] in ([factor] for factor in FACTORS)


def without_adapters(state_dict: Mapping[str, _Value], *others: str) -> dict[str, _Value]:
    """Return a state dict without LoRA's factors, and without parameters of other names."""
    left_out = {*filter(is_adapter, state_dict), *others}
    return {name: value for name, value in state_dict.items() if name not in left_out}


class LoRALinear(nn.Linear):
    """A linear layer, whose weight keeps its name, with two factors beside it."""

    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float

    @classmethod
    def over(cls, layer: nn.Linear, lora: LoRA) -> "LoRALinear":
        """Make a layer that takes the place of `layer`, with its weight and factors beside it."""
        has_bias = layer.bias is not None
        adapted = cls(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        adapted.weight, adapted.bias = layer.weight, layer.bias
        there = layer.weight.device
        adapted.lora_a = nn.Linear(layer.in_features, lora.rank, bias=False, device=there)
        adapted.lora_a.requires_grad_(not lora.freeze_a)
        adapted.lora_b = nn.Linear(lora.rank, layer.out_features, bias=False, device=there)
        adapted.scaling = lora.scaling
        return adapted

    def forward(self, x: Tensor) -> Tensor:
        """Compute (…, out) of (…, in)."""
        return torch.add(super().forward(x), self.lora_b(self.lora_a(x)), alpha=self.scaling)


def add_adapters(model: nn.Module, blocks: nn.Module, lora: LoRA) -> None:
    """Put factors beside the targets in `blocks`, and freeze all else of `model`, in place.

    Raises:
        ValueError: one line for the user; a target is no linear layer of the blocks.
    """
    linear = [  # not a subclass, which may return more (a router)
        (path, layer) for path, layer in blocks.named_modules() if type(layer) is nn.Linear
    ]
    there = {path.rpartition(".")[2] for path, _ in linear}
    targets = there if lora.targets == (ALL_LINEAR,) else lora.targets
    if unknown := [target for target in targets if target not in there]:
        raise ValueError(
            f"lora.targets = {list(lora.targets)}: the model's blocks have no linear layer "
            f"'{unknown[0]}'; use some of {', '.join(sorted(there))}, or {ALL_LINEAR}"
        )
    model.requires_grad_(False)
    for path, layer in linear:
        parent, _, name = path.rpartition(".")
        if name in targets:
            setattr(blocks.get_submodule(parent), name, LoRALinear.over(layer, lora))


def draw_factor_(whole: Tensor, name: str, generator: torch.Generator) -> None:
    """Fill a whole factor as Hu et al. and PEFT: B with 0, A uniformly in ± 1 / sqrt(in)."""
    assert is_adapter(name)
    if f".{FACTORS[1]}." in name:
        whole.zero_()
    else:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def store_frozen(model: nn.Module, dtype: torch.dtype, kept: set[str]) -> None:
    """Store frozen parameters, but those named in `kept`, in the dtype of compute, in place; before
    `fully_shard`, which casts gathered weights to it anyway."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in kept:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the whole weight, fp32 (out, in), of a plain layer equal to an adapted one, of weight
    (out, in), a (r, in) and b (out, r), on one device."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)


@torch.no_grad()
def fill_adapters(model: nn.Module, std: float = 0.02) -> None:
    """Fill each B with values that depend on its name, in place, for checks of gradients: where B
    is 0, the gradient of A is 0 too."""
    for name, parameter in model.named_parameters():
        if is_adapter(name) and f".{FACTORS[1]}." in name:
            copy_slice_(parameter, std * normal_of_name(name, parameter.shape))
