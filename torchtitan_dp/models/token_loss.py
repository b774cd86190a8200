"""Losses of logits and their gradient, which overwrites the logits, in one kernel.

Guarantee:
    A token's loss and gradient depend on its own logits, label and scale alone.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.privacy.kernels import BLOCK, compile_kernel, on_threads


@torch.library.custom_op("torchtitan_dp::losses_to_gradients_", mutates_args=("logits_NV",))
def losses_to_gradients_(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    """Compute the losses of some tokens, and overwrite their logits by the losses' gradients.

    Args:
        logits_NV: any floating dtype; computed in fp32.
        labels_N: int64; tokens of `IGNORE_INDEX` have loss 0 and, for finite logits, gradient 0.
        scale_N: fp32 factors of the tokens' losses.

    Returns:
        fp32 losses, shape (N,).

    One operator, so that counters of operations see what CUDA runs: one kernel, which reads the
    logits (the second time mostly from cache) and writes the gradients. On CPU, blocks of rows fit
    a core's cache. The fp32 logits of all rows never exist.
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
