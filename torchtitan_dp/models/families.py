"""The model families that can be trained.

A family is a module (`llama3/model.py`) and an entry of `FAMILIES`, by `model.name`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_dp.models.causal_lm import model as causal_lm
from torchtitan_dp.models.causal_lm import settings
from torchtitan_dp.models.llama3 import model as llama3
from torchtitan_dp.models.private import ModelArgs


@dataclass(frozen=True)
class Family:
    """The differences of a family from the others.

    Args:
        args: the type of its arguments.
        model: builds a model, whose `init_weights` does not depend on the mesh.
        flavors: its sizes, by `model.flavor`.
        adapter: converts its state dict to Hugging Face's and back.
        read_args: from a `config.json`, its path and the key that names it; refuses in one line.
        reference: builds a model of the same names that gradients are held against; None for
            `model` itself, in one process.
    """

    args: type
    model: Callable[[Any], Any]
    flavors: Mapping[str, ModelArgs]
    adapter: type
    read_args: Callable[[dict[str, Any], str, str], ModelArgs]
    reference: Callable[[Any], Any] | None = None


FAMILIES: dict[str, Family] = {
    "llama3": Family(
        llama3.LlamaArgs,
        llama3.Llama,
        llama3.FLAVORS,
        llama3.HuggingFaceAdapter,
        llama3.read_args,
    ),
    "transformers": Family(
        settings.CausalLMArgs,
        causal_lm.CausalLM,
        {},
        causal_lm.HuggingFaceAdapter,
        settings.read_args,
        causal_lm.Eager,
    ),
}


def family_of(args: ModelArgs) -> Family:
    """Return the family whose arguments these are."""
    return next(family for family in FAMILIES.values() if type(args) is family.args)


def on_meta(args: ModelArgs) -> Any:
    """Build the model without memory, for its names, shapes and size."""
    with torch.device("meta"):
        return family_of(args).model(copy.deepcopy(args))


def parameter_count(args: ModelArgs) -> int:
    """Count the parameters; a tied weight counts once."""
    return sum(parameter.numel() for parameter in on_meta(args).parameters())


def trained_count(args: ModelArgs) -> int:
    """Count the parameters that are trained."""
    return sum(p.numel() for p in on_meta(args).parameters() if p.requires_grad)


def without_lora(args: ModelArgs) -> ModelArgs:
    """Return the arguments of the model without adapters, which are also those of a merged one."""
    args = copy.deepcopy(args)
    args.lora = None
    return args
