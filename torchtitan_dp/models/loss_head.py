"""The output layer and the loss in one, in chunks of tokens: the logits are never all there.

A Llama 3's 128k logits a token, in fp32, outgrow everything else at long contexts. Here those of
one chunk exist at a time. With one sample a microbatch the chunk's gradients are computed along
with its loss, so that nothing is done twice; per-sample gradients of several samples recompute the
chunk in backward, which keeps one sample's weight gradient at a time. To FSDP2 both are one layer,
called once: one gather and one reduction a microbatch.

Guarantee:
    Loss b, and the gradient formed for it, depend on sample b alone.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.gradients.layers import PerSampleLayer, register_per_sample
from torchtitan_dp.gradients.rows import RowLayout


class LossHead(nn.Linear):
    """Wraps an output layer that, given labels, returns `models.loss.per_sample_loss` of its
    logits."""

    chunk_tokens: int

    @classmethod
    def over(cls, output: nn.Linear, chunk_tokens: int) -> "LossHead":
        """Make a loss head that takes the place of `output`, with its weight."""
        assert output.bias is None
        head = cls(output.in_features, output.out_features, bias=False, device="meta")
        head.weight = output.weight
        head.chunk_tokens = chunk_tokens
        return head

    def forward(
        self,
        h_BTD: torch.Tensor,
        labels_BT: torch.Tensor | None = None,
        targets_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits; with labels, fp32 losses of shape (B,), see `per_sample_loss`."""
        if labels_BT is None:
            return super().forward(h_BTD)
        return _OneSample.apply(  # type: ignore[no-any-return]
            h_BTD, labels_BT, targets_B, self.weight, self.chunk_tokens, torch.is_grad_enabled()
        )


def _chunk(
    h_ND: torch.Tensor, labels_N: torch.Tensor, weight_VD: torch.Tensor, scale_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the fp32 losses of some tokens, and the gradient of their logits in the logits'
    dtype.

    Args:
        scale_N: fp32: what each token's loss is multiplied by. Ignored tokens count 0.
    """
    logits_NV = h_ND @ weight_VD.T
    log_p_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    ignored_N = labels_N == IGNORE_INDEX
    label_N1 = labels_N.masked_fill(ignored_N, 0)[:, None]
    loss_N = -log_p_NV.gather(1, label_N1)[:, 0].masked_fill(ignored_N, 0.0) * scale_N
    grad_NV = log_p_NV.exp_()
    grad_NV.scatter_add_(1, label_N1, torch.full_like(label_N1, -1, dtype=torch.float32))
    scale_N1 = scale_N.masked_fill(ignored_N, 0.0)[:, None]
    return loss_N, torch.mul(grad_NV, scale_N1, out=logits_NV)  # into memory that is there


def _add_product_(out_VD: torch.Tensor, grad_NV: torch.Tensor, h_ND: torch.Tensor) -> None:
    """Add grad^T h to `out`, in fp32."""
    if h_ND.dtype == out_VD.dtype:
        out_VD.addmm_(grad_NV.T, h_ND)
    else:
        out_VD.add_(grad_NV.T @ h_ND)


class _OneSample(torch.autograd.Function):
    """Computes gradients along with the loss; of several samples only if the weight is not
    trained."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        h_BTD: torch.Tensor,
        labels_BT: torch.Tensor,
        targets_B: torch.Tensor,
        weight_VD: torch.Tensor,
        chunk_tokens: int,
        differentiate: bool,
    ) -> torch.Tensor:
        h_needed, _, _, weight_needed, _, _ = ctx.needs_input_grad
        merges = differentiate and weight_needed and len(h_BTD) > 1
        assert not merges, "samples would be merged before they are clipped"
        loss_B = torch.zeros(len(h_BTD), dtype=torch.float32, device=h_BTD.device)
        scale_B = 1 / targets_B.clamp(min=1).float()
        grad_h_BTD = torch.empty_like(h_BTD) if differentiate and h_needed else None
        grad_weight_VD = (
            torch.zeros_like(weight_VD, dtype=torch.float32)
            if differentiate and weight_needed
            else None
        )
        for sample, (h_TD, labels_T) in enumerate(zip(h_BTD, labels_BT, strict=True)):
            for tokens in _chunks(len(h_TD), chunk_tokens):
                scale_N = scale_B[sample].expand(tokens.stop - tokens.start)
                loss_N, grad_NV = _chunk(h_TD[tokens], labels_T[tokens], weight_VD, scale_N)
                loss_B[sample] += loss_N.sum()
                if grad_h_BTD is not None:
                    torch.mm(grad_NV, weight_VD, out=grad_h_BTD[sample, tokens])
                if grad_weight_VD is not None:
                    _add_product_(grad_weight_VD, grad_NV, h_TD[tokens])
        ctx.gradients = grad_h_BTD, grad_weight_VD
        ctx.weight_dtype = weight_VD.dtype
        return loss_B

    @staticmethod
    def backward(ctx: Any, grad_loss_B: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (grad_h, grad_weight), ctx.gradients = ctx.gradients, None
        if grad_h is not None:
            grad_h.mul_(grad_loss_B[:, None, None])
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss_B).to(ctx.weight_dtype)
        return grad_h, None, None, grad_weight, None, None


class _SeveralSamples(torch.autograd.Function):
    """Computes the chunks again in backward, where each sample's weight gradient goes to the
    layer's sink."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        layer: PerSampleLayer,
        h_BTD: torch.Tensor,
        labels_BT: torch.Tensor,
        targets_B: torch.Tensor,
        weight_VD: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(h_BTD, labels_BT, targets_B, weight_VD)
        assert isinstance(layer, LossHead)
        return layer.plain_forward(h_BTD, labels_BT, targets_B)

    @staticmethod
    def backward(ctx: Any, grad_loss_B: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        h_BTD, labels_BT, targets_B, weight_VD = ctx.saved_tensors
        layer = ctx.layer
        scale_B = grad_loss_B / targets_B.clamp(min=1)
        grad_h_BTD = torch.empty_like(h_BTD)

        def write(layout: RowLayout, whole: torch.Tensor, samples: slice) -> None:
            whole.zero_()
            for place, sample in enumerate(range(samples.start, samples.stop)):
                h_TD, labels_T = h_BTD[sample], labels_BT[sample]
                for tokens in _chunks(len(h_TD), layer.chunk_tokens):
                    scale_N = scale_B[sample].expand(tokens.stop - tokens.start)
                    _, grad_NV = _chunk(h_TD[tokens], labels_T[tokens], weight_VD, scale_N)
                    torch.mm(grad_NV, weight_VD, out=grad_h_BTD[sample, tokens])
                    for rows, out_BRD in layout.chunks(whole):
                        _add_product_(out_BRD[place], grad_NV[:, rows], h_TD[tokens])

        layer.sink.form_grad_samples(layer.parameter_names["weight"], len(h_BTD), write)
        return None, grad_h_BTD, None, None, None


register_per_sample(LossHead, _SeveralSamples)


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
