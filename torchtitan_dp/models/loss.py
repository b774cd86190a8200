"""Losses: of samples, each of that sample alone; of tokens, to look at; and with their gradients.

Guarantee:
    A token's loss and gradient depend on its own logits, label and scale alone, and a sample's loss
    on that sample alone: not on other samples, nor on the mesh.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import JobConfig
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.privacy.kernels import BLOCK, compile_kernel, on_threads


def per_sample_loss(logits_BTV: Tensor, labels_BT: Tensor, targets_B: Tensor) -> Tensor:
    """Compute this rank's part of each sample's mean next-token cross-entropy, fp32 (B,).

    Summed over the cp ranks it is the sample's mean loss.

    Args:
        logits_BTV: of this rank's tokens, any floating dtype.
        labels_BT: int64, shifted before sharding; `IGNORE_INDEX` where there is no target.
        targets_B: each sample's number of targets over all cp ranks. A sample without targets has
            loss 0, and gradient exactly 0.
    """
    return token_losses(logits_BTV, labels_BT).sum(dim=1) / targets_B.clamp(min=1)


def token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Compute each token's cross-entropy, fp32 (B, T); 0 where the label is `IGNORE_INDEX`."""
    B, T, V = logits_BTV.shape
    return F.cross_entropy(
        logits_BTV.reshape(B * T, V).float(),
        labels_BT.reshape(B * T),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view(B, T)


def shard_of(dims: ParallelDims, config: JobConfig) -> Shard:
    """Return this rank's part of each sample, as the configuration has it."""
    mesh, terms = dims.get_optional_mesh("cp"), config.parallelism
    return Shard(
        None if mesh is None else mesh.get_group(),
        balanced=terms.context_parallel_load_balancer == "headtail",
        at_once=terms.context_parallel_rotate_method == "allgather",
    )


class TokenLosses(NamedTuple):
    """The losses of a rank's tokens, and their places in whole samples."""

    loss_BT: Tensor  # fp32, 0 without a label
    is_target_BT: Tensor  # bool
    position_BT: Tensor  # integers, from 0


@dataclass(frozen=True)
class SampleLosses:
    """The loss of a model on whole samples, of which each rank takes its part."""

    model: nn.Module
    device: torch.device
    shard: Shard

    @classmethod
    def on(
        cls, model: nn.Module, device: torch.device, dims: ParallelDims, config: JobConfig
    ) -> "SampleLosses":
        """Return the loss of a model that `dims` shards as `config` has it."""
        return cls(model, device, shard_of(dims, config))

    def __call__(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return this rank's parts, fp32 (B,), of int64 whole samples, the same on all cp ranks."""
        labels_BT = labels_BT.to(self.device)
        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)
        tokens_BT, labels_BT, positions = self._local(tokens_BT, labels_BT)
        loss_B: Tensor = self.model(tokens_BT, labels=labels_BT, targets=targets_B, **positions)
        return loss_B

    def of_tokens(self, tokens_BT: Tensor, labels_BT: Tensor) -> TokenLosses:
        """Return the losses of this rank's tokens, without gradients. Inputs as above."""
        tokens_BT, labels_BT, positions = self._local(tokens_BT, labels_BT)
        loss_BT = self.model(tokens_BT, labels=labels_BT, **positions)
        in_order_T = torch.arange(labels_BT.shape[1], device=self.device)
        position_BT = positions.get("positions", in_order_T).expand_as(labels_BT)
        return TokenLosses(loss_BT, labels_BT != IGNORE_INDEX, position_BT)

    def _local(
        self, tokens_BT: Tensor, labels_BT: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Take this rank's part of whole samples; `positions` are given where it is not all."""
        tokens_BT, labels_BT = tokens_BT.to(self.device), labels_BT.to(self.device)
        if self.shard.group is None:
            return tokens_BT, labels_BT, {}
        order_T = torch.arange(tokens_BT.shape[1], dtype=torch.int32, device=self.device)
        whole = tokens_BT, labels_BT, order_T.expand(tokens_BT.shape)
        tokens_BT, labels_BT, positions_BT = (self.shard.of(x, dim=1) for x in whole)
        return tokens_BT, labels_BT, {"positions": positions_BT}


@torch.library.custom_op("torchtitan_dp::losses_to_gradients_", mutates_args=("logits_NV",))
def losses_to_gradients_(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    """Compute the fp32 losses (N,) of some tokens, and overwrite their logits by the gradients.

    One operator, so that counters of operations see what CUDA runs: one kernel, which reads the
    logits (the second time mostly from cache) and writes the gradients. On CPU, blocks of rows fit
    a core's cache. The fp32 logits of all rows never exist.

    Args:
        logits_NV: any floating dtype; computed in fp32.
        labels_N: int64; tokens of `IGNORE_INDEX` have loss 0 and, for finite logits, gradient 0.
        scale_N: fp32 factors of the tokens' losses.
    """
    if logits_NV.is_cuda:
        return _compiled_by_comparison()(logits_NV, labels_N, scale_N)
    loss_N = torch.empty_like(scale_N, memory_format=torch.contiguous_format)
    rows = max(BLOCK // logits_NV.shape[1], 1)

    def in_blocks(mine: range) -> None:
        for start in mine:
            here = slice(start, start + rows)
            loss_N[here] = _by_index(logits_NV[here], labels_N[here], scale_N[here])

    on_threads(in_blocks, range(0, len(logits_NV), rows))
    return loss_N


@losses_to_gradients_.register_fake
def _(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    return scale_N.new_empty(scale_N.shape)


def _by_index(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    """Look the labels up, which is fast on CPU, where every operation is a loop."""
    log_p_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    ignored_N = labels_N == IGNORE_INDEX
    label_N1 = labels_N.masked_fill(ignored_N, 0)[:, None]
    loss_N = -log_p_NV.gather(1, label_N1)[:, 0].masked_fill(ignored_N, 0.0) * scale_N
    grad_NV = log_p_NV.exp_()
    grad_NV.scatter_add_(1, label_N1, torch.full_like(label_N1, -1, dtype=torch.float32))
    scale_N1 = scale_N.masked_fill(ignored_N, 0.0)[:, None]
    torch.mul(grad_NV, scale_N1, out=logits_NV)
    return loss_N


def _by_comparison(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    """Compare all columns with the labels: no lookup, so that all of it is one kernel."""
    wide_NV = logits_NV.float()
    ignored_N = labels_N == IGNORE_INDEX
    columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_label_NV = columns_V == labels_N[:, None]
    most_N1 = wide_NV.amax(-1, keepdim=True)
    log_total_N1 = (wide_NV - most_N1).exp().sum(-1, keepdim=True).log()
    at_label_N = torch.where(is_label_NV, wide_NV, 0.0).sum(-1)
    loss_N = ((most_N1 + log_total_N1)[:, 0] - at_label_N).masked_fill(ignored_N, 0.0) * scale_N
    p_NV = (wide_NV - most_N1 - log_total_N1).exp()
    scale_N1 = scale_N.masked_fill(ignored_N, 0.0)[:, None]
    logits_NV.copy_(torch.where(is_label_NV, p_NV - 1.0, p_NV) * scale_N1)
    return loss_N


@functools.cache
def _compiled_by_comparison() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return compile_kernel(_by_comparison)
