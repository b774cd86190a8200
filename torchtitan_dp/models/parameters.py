"""The parameters of a model: their names, and whether they are trained and loaded."""

import zlib
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_dp.base.torch_private import local_slices


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that compile and activation checkpointing add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by canonical name; a tied one appears once."""
    return {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint has of a model in one process, by name: parameters, a
    tied one once, and persistent buffers."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    names = model.state_dict().keys()
    return parameters | {name: b for name, b in model.named_buffers() if name in names}


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: its shard, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def overflow(tensors: Iterable[Tensor]) -> Tensor:
    """Return 1.0 if this rank's parts of the tensors have a NaN, an infinity, or together a norm
    whose square fp32 does not have, else 0.0; on their device, so that the host does not wait.

    Weights above 1.8e19 are still numbers, but products with them are not.
    """
    norm = nn.utils.get_total_norm([local_part(tensor) for tensor in tensors])
    return (~norm.float().square().isfinite()).float()


def first_overflow(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the canonical name of the first tensor that overflows on this rank, or ""."""
    return next((canonical_name(n) for n, tensor in tensors if overflow([tensor]).item()), "")


def normal_of_name(name: str, shape: torch.Size) -> Tensor:
    """Draw a whole parameter that depends on its name alone, standard normal, on the CPU."""
    seed = zlib.crc32(canonical_name(name).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def copy_slice_(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's slice of a whole tensor into a parameter."""
    own = whole[local_slices(parameter)] if isinstance(parameter, DTensor) else whole
    local_part(parameter).copy_(own)
