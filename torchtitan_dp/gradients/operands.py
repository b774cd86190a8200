"""The operands of a layer's per-sample gradients, and how these are written in FSDP2's layout.

A layer's backward has two factors, its input and its output's gradient. A gradient method has the
gradients written at once, or later, or finds their norms without them (`norms`). Products of 16-bit
factors have fp32 results, without temporaries: a weight's gradient sums over thousands of tokens.
They are custom operators, so that FLOP counters see on any device what CUDA runs: one GEMM.

Guarantee:
    The gradient written for sample b depends on row b of the tensors alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.gradients.fsdp import RowLayout

# Bounds one layer's unreduced gradients; a larger one's are formed a sample at a time.
TRANSIENT_BYTES = 2**28

# Writes the per-sample gradients of a slice of the microbatch into `(cp, b, dp_shard, rows, …)`.
Write = Callable[[RowLayout, Tensor, slice], None]


def tiles(tokens: int, size: int) -> Iterator[slice]:
    """Cut a rank's tokens into tiles, of which the last may be shorter."""
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def add_to(gradients: dict[str, Tensor], name: str, more: Tensor) -> None:
    """Add, in place, the gradients of another layer that shares the parameter: those of a tied
    weight's layers sum to one sample's gradient."""
    if name in gradients:
        gradients[name].add_(more)
    else:
        gradients[name] = more


@dataclass(frozen=True)
class Products:
    """A matrix's gradients as products: for sample b, factor_b left_TP^T right_TD."""

    left: Tensor  # (B, T, P): the output's gradient
    right: Tensor  # (B, T, D): the input, of the same dtype
    factor_B: Tensor | None = None  # fp32; None for 1

    def __call__(self, layout: RowLayout, whole: Tensor, samples: slice) -> None:
        """Write them: one product for all samples where their rows are contiguous, else one for
        each sample and dp_shard rank, or for each chunk where rows are padded."""
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
        scale_(whole, self.factor_B, samples)


@dataclass(frozen=True)
class Rows:
    """An embedding's gradients: row left_bt is the sum of right_btD over t, times factor_b."""

    left: Tensor  # int64 (B, T): tokens
    right: Tensor  # (B, T, D): the output's gradient
    factor_B: Tensor | None = None  # fp32; None for 1

    def __call__(self, layout: RowLayout, whole: Tensor, samples: slice) -> None:
        position_BT = layout.positions(self.left[samples])
        rows_ND = whole.zero_().view(-1, whole.shape[-1])
        source_ND = self.right[samples].reshape(-1, whole.shape[-1])
        rows_ND.index_add_(0, position_BT.flatten(), source_ND.to(whole.dtype))
        scale_(whole, self.factor_B, samples)


def scale_(whole: Tensor, factor_B: Tensor | None, samples: slice = slice(None)) -> None:
    """Multiply `samples`' gradients, `(cp, b, …)`, by their factors, if there are any, in place."""
    if factor_B is not None:
        whole.mul_(factor_B[samples].view(-1, *(1 for _ in whole.shape[2:])))


@dataclass(frozen=True)
class Existing:
    """Gradients that exist already, `(B, *shape)`."""

    gradients: Tensor

    def __call__(self, layout: RowLayout, whole: Tensor, samples: slice) -> None:
        for rows, out in layout.chunks(whole):
            out.copy_(self.gradients[samples, rows])


@torch.library.custom_op("torchtitan_dp::write_product_", mutates_args=("out",))
def write_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left @ right to `out`.

    Args:
        out: fp32 or of the factors' dtype, (M, N), or (B, M, N) for B products; any strides.
        left, right: of one dtype, (M, K) and (K, N), or (B, M, K) and (B, K, N). They may be
            transposed or expanded views.
    """
    operator: Any = torch.ops.aten.mm if out.dim() == 2 else torch.ops.aten.bmm
    if out.dtype == left.dtype:
        operator.out(left, right, out=out)
    elif accumulates_wide(out):
        operator.dtype_out(left, right, out.dtype, out=out)
    else:
        out.copy_(operator(left, right))


@torch.library.custom_op("torchtitan_dp::add_product_", mutates_args=("out",))
def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `out`, for two matrices of the dtypes of `write_product_`."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif accumulates_wide(out):
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        out.add_(left @ right)


@write_product_.register_fake
@add_product_.register_fake
def _(out: Tensor, left: Tensor, right: Tensor) -> None:
    return None


def accumulates_wide(out: Tensor) -> bool:
    """Return whether a GEMM of 16-bit matrices with a fp32 addend and result exists: on CUDA."""
    return out.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")
