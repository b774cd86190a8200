"""Matrix products whose factors are 16 bits wide and whose results are fp32, without temporaries.

A weight's gradient sums over thousands of tokens. Rounding it to 16 bits and copying it would take
3 times the memory traffic and sum rounded terms. Both functions are operators, so that a count of
operations is that of CUDA: one GEMM, which reads its factors and writes (or adds to) its fp32
result.
"""

from typing import Any

import torch
from torch import Tensor


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
def _(out: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@add_product_.register_fake
def _(out: Tensor, left: Tensor, right: Tensor) -> None:
    return None


def accumulates_wide(out: Tensor) -> bool:
    """Return whether a GEMM of 16-bit matrices with a fp32 addend and result exists: on CUDA."""
    return out.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")
