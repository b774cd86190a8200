"""The model families that can be trained, with all that the rest of the package needs of each.

A family is a folder (`llama3/`) and an entry of `FAMILIES` under its `model.name`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_dp.data.samples.tokenizer import Tokenizer
from torchtitan_dp.models.llama3 import config_json
from torchtitan_dp.models.llama3.adapter import HuggingFaceAdapter
from torchtitan_dp.models.llama3.model import FLAVORS, Llama, LlamaArgs
from torchtitan_dp.models.llama3.parallelize import parallelize_llama, trained_fsdp_modules
from torchtitan_dp.models.lora import LoRA


class ModelArgs(Protocol):
    """The arguments that the package reads of any family."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    lora: LoRA | None

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Return the number of parameters and the FLOPs of a token (TorchTitan's own count)."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        title: its name for people.
        args: the type of its arguments.
        model: builds a model, whose `init_weights` does not depend on the mesh.
        flavors: the sizes that `model.flavor` names.
        parallelize: lays a model over the mesh, in place.
        trained_fsdp_modules: one module of each FSDP2 group that reduces gradients.
        adapter: turns its state dict into Hugging Face's and back.
        read_args: from a `config.json`, its path and the key that names it; refuses in one line.
        new_settings: the `config.json` of its arguments and a tokenizer.
    """

    title: str
    args: type
    model: Callable[[Any], Any]
    flavors: Mapping[str, ModelArgs]
    parallelize: Callable[..., Any]
    trained_fsdp_modules: Callable[[Any], list[FSDPModule]]
    adapter: type
    read_args: Callable[[dict[str, Any], str, str], ModelArgs]
    new_settings: Callable[[Any, Tokenizer], dict[str, Any]]


FAMILIES: dict[str, Family] = {
    "llama3": Family(
        title="Llama",
        args=LlamaArgs,
        model=Llama,
        flavors=FLAVORS,
        parallelize=parallelize_llama,
        trained_fsdp_modules=trained_fsdp_modules,
        adapter=HuggingFaceAdapter,
        read_args=config_json.read_args,
        new_settings=config_json.new_settings,
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
    """Return the arguments of the model that adapters are beside, which a merge has too."""
    args = copy.deepcopy(args)
    args.lora = None
    return args
