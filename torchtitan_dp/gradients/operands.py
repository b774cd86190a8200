"""What a layer's per-sample gradients are made of, and how they are written where FSDP2 has them.

A layer's backward knows two factors of them, which are far smaller than they are at short contexts:
its input and its output's gradient. Whoever takes them (`layers.Sink`) may have the gradients
written at once, or later, or find their norms without (`ghost_norm`).

Guarantee:
    What is written for sample b depends on row b of the tensors alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_dp.gradients.products import write_product_
from torchtitan_dp.gradients.rows import RowLayout

# A layer whose microbatch of per-sample gradients is larger is formed one sample at a time.
TRANSIENT_BYTES = 2**28

# Writes the per-sample gradients of a slice of the microbatch into `(cp, b, dp_shard, rows, …)`.
Write = Callable[[RowLayout, torch.Tensor, slice], None]


def add_to(gradients: dict[str, torch.Tensor], name: str, more: torch.Tensor) -> None:
    """Add to a parameter's gradients those of another layer that shares it, in place. A tied weight
    has two layers' gradients, of which the sum is one sample's gradient.
    """
    if name in gradients:
        gradients[name].add_(more)
    else:
        gradients[name] = more


@dataclass(frozen=True)
class Products:
    """Stands for a matrix's gradients: for sample b, factor_b left_TP^T right_TD."""

    left: torch.Tensor  # (B, T, P): the output's gradient
    right: torch.Tensor  # (B, T, D): the input, of the same dtype
    factor_B: torch.Tensor | None = None  # fp32; None for 1

    def __call__(self, layout: RowLayout, whole: torch.Tensor, samples: slice) -> None:
        """Write them: in one product for each sample and dp_shard rank where rows are not padded,
        or in one for all samples where their rows lie in one piece."""
        left_BPT, right_BTD = self.left[samples].mT, self.right[samples]
        padded = layout.rows * layout.dp_shard * layout.cp != layout.shape[0]
        if padded or layout.in_one_piece(whole):
            for rows, out_BRD in layout.chunks(whole):
                write_product_(out_BRD, left_BPT[:, rows], right_BTD)
        else:
            for sample, (left_PT, right_TD) in enumerate(zip(left_BPT, right_BTD, strict=True)):
                in_chunks = left_PT.unflatten(0, (layout.dp_shard, layout.cp, layout.rows))
                for dp_shard_rank, left_CRT in enumerate(in_chunks):
                    right_CTD = right_TD.expand(layout.cp, -1, -1)
                    write_product_(whole[:, sample, dp_shard_rank], left_CRT, right_CTD)
        if self.factor_B is not None:
            whole.mul_(self.factor_B[samples].view(-1, *(1 for _ in whole.shape[2:])))


@dataclass(frozen=True)
class Rows:
    """Stands for an embedding's gradients: row left_bt has what is right_btD, added up over t."""

    left: torch.Tensor  # int64 (B, T): tokens
    right: torch.Tensor  # (B, T, D): the output's gradient

    def __call__(self, layout: RowLayout, whole: torch.Tensor, samples: slice) -> None:
        """Write them."""
        position_BT = layout.positions(self.left[samples])
        rows_ND = whole.zero_().view(-1, whole.shape[-1])
        source_ND = self.right[samples].reshape(-1, whole.shape[-1])
        rows_ND.index_add_(0, position_BT.flatten(), source_ND.to(whole.dtype))


@dataclass(frozen=True)
class Existing:
    """Holds gradients that exist already, `(B, *shape)`."""

    gradients: torch.Tensor

    def __call__(self, layout: RowLayout, whole: torch.Tensor, samples: slice) -> None:
        """Write them."""
        for rows, out in layout.chunks(whole):
            out.copy_(self.gradients[samples, rows])
