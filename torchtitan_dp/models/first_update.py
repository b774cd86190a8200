"""Whether a run with adapters changes them and nothing else: held at the first update of a start.

No loss curve shows an adapter that is not trained, or a frozen weight that is trained along,
perhaps without clipping and noise.

Guarantee:
    Once a start has made an update at a learning rate above 0, every frozen tensor had the bits
    that it had before, on every rank, and every adapter that had to change did; else the run has
    ended. A tensor is told from another by a 64-bit sum of its bits, weighted by their places: one
    changed value always changes it. Whether the run ends does not depend on records: with noise
    each adapter changes, whatever was drawn.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from torchtitan_dp.checkpoint.adapters import is_adapter
from torchtitan_dp.models.parameters import canonical_name, local_part
from torchtitan_dp.process import Fault

_CHUNK = 2**18  # values at a time, of 8 bytes and some more
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class FirstUpdate:
    """Watches an optimizer until it has made an update, and lets go of it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, noised: bool) -> None:
        """Begin to watch, where the model has adapters; there is nothing to hold otherwise.

        Nobody needs to keep it: the optimizer's hooks do, until it is done.

        Args:
            optimizer: the one that steps the weights; collective over the world when it does.
            noised: whether each gradient that it is handed has noise, so that all must move.
        """
        self._parameters = {canonical_name(name): p for name, p in model.named_parameters()}
        self._noised = noised
        self._before: dict[str, torch.Tensor] = {}
        self._must: dict[str, torch.Tensor] = {}
        self._hooks = []
        if any(map(is_adapter, self._parameters)):
            self._hooks = [
                optimizer.register_step_pre_hook(self._look),
                optimizer.register_step_post_hook(self._compare),
            ]

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        """Take the sums of all tensors, and note which must change."""
        self._before = self._sums()
        self._must = {}
        for name in filter(is_adapter, self._parameters):
            gradient = self._parameters[name].grad
            handed = torch.zeros((), dtype=torch.bool, device=self._device)
            if gradient is not None:
                handed = local_part(gradient).any()
            self._must[name] = handed | self._noised

    def _compare(self, optimizer: Optimizer, *_: Any) -> None:
        """Hold them against what they were, unless the learning rate was 0, as in a rehearsal."""
        if not any(group["lr"] for group in optimizer.param_groups):
            return
        for hook in self._hooks:
            hook.remove()
        after = self._sums()
        changed = torch.stack([after[name] != self._before[name] for name in after])
        never = torch.zeros_like(changed[0])
        must = torch.stack([self._must.get(name, never) for name in after])
        found = torch.stack([changed, must]).int()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # a shard may be empty, or alone have changed
        for name, moved, due in zip(after, *found.tolist(), strict=True):
            if moved and not is_adapter(name):
                raise Fault(_told(f"changed {name}, which lora.rank > 0 freezes"))
            if due and not moved:
                raise Fault(_told(f"left {name} as it was, which lora.rank > 0 trains"))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    @torch.no_grad()
    def _sums(self) -> dict[str, torch.Tensor]:
        return {name: bit_sum(local_part(p)) for name, p in self._parameters.items()}


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits up, as int64 modulo 2^64, each value's times an odd number of its own."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    words = values.detach().contiguous().view(-1).view(_WORDS[values.element_size()])
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        first = 2 * start + 1
        total += chunk.mul_(
            torch.arange(first, first + 2 * len(chunk), 2, device=chunk.device)
        ).sum()
    return total


def _told(what: str) -> str:
    return (
        f"the first update {what}: a fault of this program, and no checkpoint has it; report it "
        "with the configuration, and train with lora.rank = 0 meanwhile"
    )
