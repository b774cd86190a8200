"""Weights that FSDP2 has gathered: kept from microbatch to microbatch, freed before they change.

Within a step weights do not change, so what the first microbatch gathers (and casts to the dtype of
compute) serves all others. What is gathered is a copy, which no update reaches: FSDP2 gathers anew
only what was freed before.
"""

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def keep_gathered(model: nn.Module) -> None:
    """Keep weights gathered after backward, until `free_gathered`.

    Args:
        model: all of its FSDP2 groups are made with `reshard_after_forward=False`.
    """
    for module in _fsdp_modules(model):
        module.set_reshard_after_backward(False, recurse=False)


def free_gathered(model: nn.Module) -> None:
    """Free all gathered weights, so that the next use gathers the current ones.

    A forward pass without a backward pass also leaves some gathered: the groups that FSDP2 does not
    free after forward.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
