"""One loss per sample, of that sample alone; to look at, one per token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.context_parallel import prepare_context_parallel_input

from torchtitan_dp.distributed.attention import LoadBalancer


def per_sample_loss(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, targets_B: torch.Tensor
) -> torch.Tensor:
    """Compute this rank's part of each sample's mean next-token cross-entropy.

    Args:
        logits_BTV: logits of this rank's tokens, any floating dtype; the loss is fp32.
        labels_BT: int64 targets of the same tokens, shifted before sharding; `IGNORE_INDEX` where
            there is none.
        targets_B: each sample's number of targets over the whole sequence, on all ranks of the
            context-parallel group. A sample without targets has loss 0, and gradient exactly 0.

    Returns:
        fp32 of shape (B,); summed over the context-parallel ranks it is the sample's mean loss.

    Guarantee:
        A sample's loss depends on that sample alone: not on other samples, nor on the mesh.
    """
    return token_losses(logits_BTV, labels_BT).sum(dim=1) / targets_B.clamp(min=1)


def token_losses(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Compute each token's cross-entropy, fp32 (B, T); 0 where the label is `IGNORE_INDEX`."""
    B, T, V = logits_BTV.shape
    return F.cross_entropy(
        logits_BTV.reshape(B * T, V).float(),
        labels_BT.reshape(B * T),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view(B, T)


class TokenLosses(NamedTuple):
    """The losses of a rank's tokens, and their places in whole samples."""

    loss_BT: torch.Tensor  # fp32, 0 without a label
    is_target_BT: torch.Tensor  # bool
    position_BT: torch.Tensor  # integers, from 0


@dataclass(frozen=True)
class SampleLosses:
    """The loss of a model on whole samples, which are sharded over `cp_mesh`."""

    model: nn.Module
    device: torch.device
    cp_mesh: DeviceMesh | None
    load_balancer: LoadBalancer

    def __call__(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return this rank's parts, fp32 (B,). Inputs are int64 whole samples, the same on all
        cp ranks."""
        labels_BT = labels_BT.to(self.device)
        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)
        tokens_BT, labels_BT, positions = self._local(tokens_BT, labels_BT)
        loss_B: torch.Tensor = self.model(
            tokens_BT, labels=labels_BT, targets=targets_B, **positions
        )
        return loss_B

    def of_tokens(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> TokenLosses:
        """Return the losses of this rank's tokens, without gradients. Inputs as above."""
        tokens_BT, labels_BT, positions = self._local(tokens_BT, labels_BT)
        loss_BT = self.model(tokens_BT, labels=labels_BT, **positions)
        in_order_T = torch.arange(labels_BT.shape[1], device=self.device)
        position_BT = positions.get("positions", in_order_T).expand_as(labels_BT)
        return TokenLosses(loss_BT, labels_BT != IGNORE_INDEX, position_BT)

    def _local(
        self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Take this rank's part of whole samples; `positions` are given where it is not all."""
        tokens_BT, labels_BT = tokens_BT.to(self.device), labels_BT.to(self.device)
        if self.cp_mesh is None:
            return tokens_BT, labels_BT, {}
        return prepare_context_parallel_input(
            tokens_BT, labels_BT, {}, self.cp_mesh, self.device, self.load_balancer
        )
