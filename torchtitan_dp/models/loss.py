"""Losses: of samples, each of that sample alone; of tokens, to look at; and with their gradients.

`LossHead` is the output layer and the loss in one, in chunks of tokens: the logits are never all
there, which in fp32 outgrow everything else at long contexts. A chunk's gradients are computed
along with its loss: as many FLOPs as without chunks. To FSDP2 this is one layer, called once.

With several samples the weight's per-sample gradients are formed in the forward pass as well, and
their sums over cp start there: the loss head is the last in forward and the first in backward, so
that this costs no memory. The order of collectives is the same on all ranks: the head's
reduce-scatters, then those of backward, which first multiplies by the gradient of each loss.

Guarantee:
    A token's loss and gradient depend on its own logits, label and scale alone, and a sample's loss
    on that sample alone: not on other samples, nor on the mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import JobConfig
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.gradients.fsdp import RowLayout
from torchtitan_dp.gradients.labels import label
from torchtitan_dp.gradients.layers import PerSampleLayer, register_per_sample
from torchtitan_dp.gradients.operands import Products, add_product_, tiles, write_product_
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

    def __call__(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return this rank's parts, fp32 (B,), of int64 whole samples, the same on all cp ranks."""
        labels_BT = labels_BT.to(self.device)
        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)
        tokens_BT, labels_BT, positions = self._local(tokens_BT, labels_BT)
        return self.model(tokens_BT, labels=labels_BT, targets=targets_B, **positions)

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

    One operator, so that counters of operations see what CUDA runs: one kernel. On CPU, blocks of
    rows fit a core's cache. The fp32 logits of all rows never exist.

    Args:
        logits_NV: any floating dtype; computed in fp32.
        labels_N: int64; tokens of `IGNORE_INDEX` have loss 0 and, for finite logits, gradient 0.
        scale_N: fp32 factors of the tokens' losses.
    """
    if logits_NV.is_cuda:
        return compile_kernel(_by_comparison)(logits_NV, labels_N, scale_N)
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
    torch.mul(grad_NV, scale_N.masked_fill(ignored_N, 0.0)[:, None], out=logits_NV)
    return loss_N


def _by_comparison(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    """Compare all columns with the labels: no lookup, so that all of it is one kernel."""
    wide_NV = logits_NV.float()
    ignored_N = labels_N == IGNORE_INDEX
    is_label_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == labels_N[:, None]
    most_N1 = wide_NV.amax(-1, keepdim=True)
    log_total_N1 = (wide_NV - most_N1).exp().sum(-1, keepdim=True).log()
    at_label_N = torch.where(is_label_NV, wide_NV, 0.0).sum(-1)
    loss_N = ((most_N1 + log_total_N1)[:, 0] - at_label_N).masked_fill(ignored_N, 0.0) * scale_N
    p_NV = (wide_NV - most_N1 - log_total_N1).exp()
    scale_N1 = scale_N.masked_fill(ignored_N, 0.0)[:, None]
    logits_NV.copy_(torch.where(is_label_NV, p_NV - 1.0, p_NV) * scale_N1)
    return loss_N


class LossHead(nn.Linear):
    """An output layer that, given labels, returns losses in place of logits."""

    chunk_tokens: int
    transform: Callable[[Tensor], Tensor] | None = None
    """What a family makes of the products (N, V), such as a soft cap; None for nothing."""

    @classmethod
    def over(cls, output: nn.Linear, chunk_tokens: int) -> "LossHead":
        """Make a loss head that takes the place of `output`, with its weight."""
        if output.bias is not None:
            raise ValueError("training.loss_chunk_tokens: the output layer has a bias; set it to 0")
        head = cls(output.in_features, output.out_features, bias=False, device="meta")
        head.weight = output.weight
        head.chunk_tokens = chunk_tokens
        return head

    def forward(
        self, h_BTD: Tensor, labels_BT: Tensor | None = None, targets_B: Tensor | None = None
    ) -> Tensor:
        """Return logits; with labels and targets, fp32 `per_sample_loss` (B,); with labels alone,
        and without gradients, fp32 `token_losses` (B, T)."""
        if labels_BT is None:
            return super().forward(h_BTD)
        if targets_B is None:
            return self._token_losses(h_BTD, labels_BT)
        return _OneSample.apply(  # type: ignore[no-any-return]
            h_BTD, labels_BT, targets_B, self.weight, self, torch.is_grad_enabled()
        )

    def chunk(
        self,
        h_ND: Tensor,
        labels_N: Tensor,
        weight_VD: Tensor,
        scale_N: Tensor,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the fp32 losses of some tokens, times fp32 scales, and the gradient of their
        products with the weight in the products' dtype, written to `out` if given."""
        with label("loss_head"):
            if self.transform is None:
                products_NV = torch.mm(h_ND, weight_VD.T, out=out)
                return losses_to_gradients_(products_NV, labels_N, scale_N), products_NV
            with torch.enable_grad():
                products_NV = (h_ND.detach() @ weight_VD.detach().T).requires_grad_()
                logits_NV = self.transform(products_NV)
            grad_NV = logits_NV.detach().clone()
            loss_N = losses_to_gradients_(grad_NV, labels_N, scale_N)
            (grad_NV,) = torch.autograd.grad(logits_NV, products_NV, grad_NV)
            return loss_N, grad_NV if out is None else out.copy_(grad_NV)

    def _token_losses(self, h_BTD: Tensor, labels_BT: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "a token's loss has no gradient here"
        loss_BT = torch.empty_like(labels_BT, dtype=torch.float32)
        for loss_T, h_TD, labels_T in zip(loss_BT, h_BTD, labels_BT, strict=True):
            for tokens in tiles(len(h_TD), self.chunk_tokens):
                scale_N = torch.ones_like(loss_T[tokens])
                of_tokens = h_TD[tokens], labels_T[tokens], self.weight, scale_N
                loss_T[tokens], _ = self.chunk(*of_tokens)
        return loss_BT


def _scales(targets_B: Tensor) -> Tensor:
    """Return the factors that make sums means, fp32; 1 where a sample has no targets."""
    return 1 / targets_B.clamp(min=1).float()


@dataclass(frozen=True)
class _Samples:
    h_BTD: Tensor
    labels_BT: Tensor
    weight_VD: Tensor
    scale_B: Tensor  # fp32 factors of the samples' losses
    head: LossHead
    grad_h_BTD: Tensor | None  # is written to; None if it is not needed

    def loss(
        self,
        sample: int,
        grad_weights: Sequence[tuple[slice, Tensor]] = (),
        grad_TV: Tensor | None = None,
    ) -> Tensor:
        """Compute one sample's scaled loss, and its gradients in the same pass: to ranges of the
        weight's rows, each with its fp32 memory, and to `grad_TV`, of all logits, if they are
        kept."""
        h_TD, labels_T, scale = self.h_BTD[sample], self.labels_BT[sample], self.scale_B[sample]
        assert len(h_TD) > 0, "without tokens no gradient would be written"
        loss = torch.zeros_like(scale)
        for tokens in tiles(len(h_TD), self.head.chunk_tokens):
            scale_N = scale.expand(tokens.stop - tokens.start)
            of_tokens = h_TD[tokens], labels_T[tokens], self.weight_VD, scale_N
            kept = None if grad_TV is None else grad_TV[tokens]
            loss_N, grad_NV = self.head.chunk(*of_tokens, out=kept)
            loss += loss_N.sum()
            if self.grad_h_BTD is not None:
                torch.mm(grad_NV, self.weight_VD, out=self.grad_h_BTD[sample][tokens])
            product = write_product_ if tokens.start == 0 else add_product_
            for rows, out_RD in grad_weights:
                product(out_RD, grad_NV[:, rows].T, h_TD[tokens])
        return loss


class _OneSample(torch.autograd.Function):
    """Computes gradients with the loss; of several samples only if the weight is not trained; then
    backward may run more than once."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        h_BTD: Tensor,
        labels_BT: Tensor,
        targets_B: Tensor,
        weight_VD: Tensor,
        head: LossHead,
        differentiate: bool,
    ) -> Tensor:
        h_needed, _, _, weight_needed, _, _ = ctx.needs_input_grad
        merges = differentiate and weight_needed and len(h_BTD) > 1
        assert not merges, "samples would be merged before they are clipped"
        scale_B = _scales(targets_B)
        grad_h_BTD = torch.empty_like(h_BTD) if differentiate and h_needed else None
        grad_weight_VD, grad_weights = None, []
        if differentiate and weight_needed:
            grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32)
            grad_weights = [(slice(0, len(weight_VD)), grad_weight_VD)]
        samples = _Samples(h_BTD, labels_BT, weight_VD, scale_B, head, grad_h_BTD)
        losses = [samples.loss(sample, grad_weights) for sample in range(len(h_BTD))]
        ctx.save_for_backward(grad_h_BTD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return torch.stack(losses)

    @staticmethod
    def backward(ctx: Any, grad_loss_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_h, grad_weight = ctx.saved_tensors
        if grad_h is not None:
            if grad_weight is None:  # a second backward pass reads it again
                grad_h = grad_h.clone()
            grad_h.mul_(grad_loss_B[:, None, None])
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss_B).to(ctx.weight_dtype)
        return grad_h, None, None, grad_weight, None, None


class _SeveralSamples(torch.autograd.Function):
    """Computes gradients along with the losses, and has the layer's sink form those of the weight,
    a sample at a time where one is large."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: Any, h_BTD: Tensor, labels_BT: Tensor, targets_B: Tensor, weight_VD: Tensor
    ) -> Tensor:
        scale_B = _scales(targets_B)
        grad_h_BTD = torch.empty_like(h_BTD) if ctx.needs_input_grad[1] else None
        loss_B = torch.empty_like(scale_B)
        head = _Samples(h_BTD, labels_BT, weight_VD, scale_B, layer, grad_h_BTD)

        def write(layout: RowLayout, whole: Tensor, samples: slice) -> None:
            chunks = list(layout.chunks(whole))
            for place, sample in enumerate(range(samples.start, samples.stop)):
                outs = [(rows, out_BRD[place]) for rows, out_BRD in chunks]
                loss_B[sample] = head.loss(sample, outs)

        ctx.layer = layer
        ctx.formed = layer.sink.form(layer.parameter_names["weight"], len(h_BTD), write)
        ctx.grad_h_BTD = grad_h_BTD
        return loss_B

    @staticmethod
    def backward(ctx: Any, grad_loss_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (formed, grad_h), ctx.formed, ctx.grad_h_BTD = (ctx.formed, ctx.grad_h_BTD), None, None
        ctx.layer.sink.add(ctx.layer.parameter_names["weight"], formed, grad_loss_B)
        if grad_h is not None:
            grad_h.mul_(grad_loss_B[:, None, None])
        return None, grad_h, None, None, None


class _OutputsKept(torch.autograd.Function):
    """Keeps the gradients of all logits, and hands them to the layer's sink with the input;
    computes them again for a second backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: Any, h_BTD: Tensor, labels_BT: Tensor, targets_B: Tensor, weight_VD: Tensor
    ) -> Tensor:
        scale_B = _scales(targets_B)
        loss_B, grad_BTV = _losses_and_outputs(layer, h_BTD, labels_BT, weight_VD, scale_B)
        ctx.layer, ctx.grad_BTV = layer, grad_BTV
        ctx.save_for_backward(h_BTD, labels_BT, weight_VD, scale_B)
        return loss_B

    @staticmethod
    def backward(ctx: Any, grad_loss_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_BTD, labels_BT, weight_VD, scale_B = ctx.saved_tensors
        layer, grad_BTV, ctx.grad_BTV = ctx.layer, ctx.grad_BTV, None
        if grad_BTV is None:
            _, grad_BTV = _losses_and_outputs(layer, h_BTD, labels_BT, weight_VD, scale_B)
        grad_h_BTD = None
        if ctx.needs_input_grad[1]:
            grad_h_BTD = (grad_BTV @ weight_VD).mul_(grad_loss_B[:, None, None])
        layer.form("weight", len(h_BTD), Products(grad_BTV, h_BTD, grad_loss_B))
        return None, grad_h_BTD, None, None, None


def _losses_and_outputs(
    layer: LossHead, h_BTD: Tensor, labels_BT: Tensor, weight_VD: Tensor, scale_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute fp32 losses (B,), and their gradients by all logits (B, T, V)."""
    grad_BTV = h_BTD.new_empty((*h_BTD.shape[:2], len(weight_VD)))
    samples = _Samples(h_BTD, labels_BT, weight_VD, scale_B, layer, None)
    losses = [samples.loss(sample, grad_TV=grad_TV) for sample, grad_TV in enumerate(grad_BTV)]
    return torch.stack(losses), grad_BTV


def _apply_for_sink(layer: PerSampleLayer, h_BTD: Tensor, *others: Tensor) -> Any:
    kept = layer.sink.keeps_outputs(layer.parameter_names["weight"], h_BTD.shape[1])
    return (_OutputsKept if kept else _SeveralSamples).apply(layer, h_BTD, *others)


register_per_sample(LossHead, _apply_for_sink)
