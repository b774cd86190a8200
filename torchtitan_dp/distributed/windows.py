"""A stand-in until the ring has windows: keys gathered over cp, masked by positions."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's part of a sample's sequence."""

    group: dist.ProcessGroup | None = None
    balanced: bool = False


def attend(
    q_BHTF: Tensor,
    k_BKTF: Tensor,
    v_BKTF: Tensor,
    *,
    shard: Shard,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of all ranks."""
    T = q_BHTF.shape[2]
    n, r = 1, 0
    if shard.group is not None:
        n, r = dist.get_world_size(shard.group), dist.get_rank(shard.group)
    every = torch.arange(T * n)
    if shard.balanced and n > 1:
        chunks = every.chunk(2 * n)
        every = torch.cat([torch.cat([chunks[i], chunks[2 * n - 1 - i]]) for i in range(n)])
    mine = every.view(n, T)[r]
    k, v = k_BKTF, v_BKTF
    if n > 1:
        k, v = (torch.cat(dist_nn.all_gather(x.contiguous(), shard.group), dim=2) for x in (k, v))
    k, v = (x.repeat_interleave(q_BHTF.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q_BHTF @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    apart = mine[:, None] - every[None, :]
    seen = (apart >= 0) & (apart < (window or T * n))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        sink = sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores.softmax(-1)[..., : len(every)] @ v
