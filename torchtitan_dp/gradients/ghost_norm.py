"""Norms of per-sample gradients of matrices, from their factors alone: ghost norms.

The gradient of sample b is a sum over its tokens, G_b = sum_t l_t r_t^T, so that

    |G_b|^2 = sum_{t,s} (l_t . l_s) (r_t . r_s):

two products of (T, T) in the place of one of (P, D) (Goodfellow 2015; Li et al. 2021; Bu et al.
2022, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
Privacy"). An embedding's l_t is the unit vector of token t. A parameter with several layers (a tied
weight) has the tokens of all of them, and the pairs across layers are its cross term. The (T, T)
products exist a block of rows at a time.

Under context parallelism each rank pairs its own tokens with those of all ranks, which are gathered
block by block: the bytes of the whole sample's factors, O(T) (P + D), and O(T^2) (P + D) FLOPs,
shared by the ranks. LongShield avoids this (section 2).

Guarantee:
    None for privacy: `ghost` caps the added gradients by these norms. The squares are sums of
    products that cancel: computed from the very factors that a gradient is written from,
    in fp32 within blocks and fp64 across them, their error is a share of
    (sum_t |l_t| |r_t|)^2, not of themselves (tests: 1e-6 of a Llama's at random weights).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_dp.collectives import all_gather
from torchtitan_dp.gradients.operands import Products, Rows, accumulates_wide, tiles, write_product_

Factors = Products | Rows


def is_cheaper(tokens: int, shape: torch.Size) -> bool:
    """Return whether a ghost norm is cheaper than a matrix's gradient, by the published rule.

    Args:
        tokens: T of the whole sample, summed over the parameter's layers.
        shape: (P, D).

    The mixed ghost norm (Bu et al. 2022, section 4; used by DP-ZeRO, appendix A.1): 2 T^2 < P D.

    >>> is_cheaper(8_192, torch.Size((128_256, 4_096))), is_cheaper(2_048, torch.Size((1_024, 512)))
    (True, False)
    """
    return 2 * tokens * tokens < shape.numel()


def squared_norms(
    factors: Sequence[Factors], cp: dist.ProcessGroup | None, *, block_elements: int = 2**24
) -> Tensor:
    """Find the squared norms of B samples' gradients of one parameter.

    Args:
        factors: those of each of the parameter's layers, for this rank's tokens, as many on each
            rank.
        block_elements: bound on the elements of a (B, rows, T) product, and of a block of factors
            from all ranks, of at least one token.

    Returns:
        fp64 (B,): this rank's part. The sum over `cp` is the square, up to rounding, which can
        leave it below 0. NaN and Inf of a sample's factors stay visible, as NaN or Inf.

    Collectives: with `cp`, all-gathers of blocks of factors.
    """
    total_B = torch.zeros(len(factors[0].left), dtype=torch.float64, device=factors[0].left.device)
    for place, columns in enumerate(factors):
        if cp is not None:
            for block in _from_all_ranks(columns, cp, block_elements):
                for number, rows in enumerate(factors[: place + 1]):
                    total_B += (1 if number == place else 2) * _pairs(rows, block, block_elements)
            continue
        total_B += _pairs_with_itself(columns, block_elements)
        for rows in factors[:place]:
            total_B += 2 * _pairs(rows, columns, block_elements)
    return total_B


def _pairs(rows: Factors, columns: Factors, block_elements: int) -> Tensor:
    """Sum over all pairs of a token of `rows` and one of `columns`: fp64 (B,)."""
    total_B = torch.zeros(len(rows.left), dtype=torch.float64, device=rows.left.device)
    at_once = max(block_elements // (len(rows.left) * columns.left.shape[1]), 1)
    for block in tiles(rows.left.shape[1], at_once):
        total_B += _inner(some_tokens(rows, block), columns)
    return total_B


def _pairs_with_itself(factors: Factors, block_elements: int) -> Tensor:
    """Sum over all pairs of a sample's tokens; each unequal pair is computed once."""
    tokens = factors.left.shape[1]
    total_B = torch.zeros(len(factors.left), dtype=torch.float64, device=factors.left.device)
    # Several blocks even if one has room, to skip products below the diagonal.
    at_once = max(min(block_elements // (len(factors.left) * tokens), -(-tokens // 4)), 1)
    for block in tiles(tokens, at_once):
        rows = some_tokens(factors, block)
        total_B += _inner(rows, rows)
        if block.stop < tokens:
            total_B += 2 * _inner(rows, some_tokens(factors, slice(block.stop, tokens)))
    return total_B


def _inner(rows: Factors, columns: Factors) -> Tensor:
    """Sum (l_t . l_s) (r_t . r_s) over the tokens t of `rows` and s of `columns`: fp64 (B,)."""
    pairs_BRS = _products(rows.right, columns.right).mul_(_lefts(rows, columns))
    total_B = pairs_BRS.flatten(1).sum(1, dtype=torch.float64)
    for factors in (rows, columns):
        if factors.factor_B is not None:
            total_B = total_B * factors.factor_B
    return total_B


def _lefts(rows: Factors, columns: Factors) -> Tensor:
    """Compute l_t . l_s: (B, R, S)."""
    if isinstance(rows, Products) and isinstance(columns, Products):
        return _products(rows.left, columns.left)
    if isinstance(rows, Products):
        of_tokens_BRS = columns.left[:, None].expand(-1, rows.left.shape[1], -1)
        return rows.left.gather(2, of_tokens_BRS).float()
    if isinstance(columns, Products):
        return _lefts(columns, rows).mT
    return (rows.left[:, :, None] == columns.left[:, None]).float()


def _products(rows_BRK: Tensor, columns_BSK: Tensor) -> Tensor:
    """Compute rows @ columns^T in fp32: (B, R, S). Factors of 16 bits are multiplied exactly."""
    shape = (*rows_BRK.shape[:2], columns_BSK.shape[1])
    out_BRS = rows_BRK.new_empty(shape, dtype=torch.float32)
    alike = rows_BRK.dtype == columns_BSK.dtype
    if not alike or (rows_BRK.dtype != torch.float32 and not accumulates_wide(out_BRS)):
        rows_BRK, columns_BSK = rows_BRK.float(), columns_BSK.float()
    write_product_(out_BRS, rows_BRK, columns_BSK.mT)
    return out_BRS


def _from_all_ranks(
    factors: Factors, cp: dist.ProcessGroup, block_elements: int
) -> Iterator[Factors]:
    """Yield all ranks' factors, one rank's block at a time, gathered a block from all ranks."""
    ranks, (samples, tokens) = dist.get_world_size(cp), factors.left.shape[:2]
    a_token = ranks * samples * sum(x[0, 0].numel() for x in (factors.left, factors.right))
    own = factors.factor_B
    scales = [None] * ranks if own is None else all_gather(own, cp)
    for block in tiles(tokens, max(block_elements // a_token, 1)):
        here = some_tokens(factors, block)
        lefts, rights = all_gather(here.left, cp), all_gather(here.right, cp)
        for rank in range(ranks):
            yield replace(here, left=lefts[rank], right=rights[rank], factor_B=scales[rank])


def some_tokens(factors: Factors, tokens: slice) -> Factors:
    """Take some of the tokens of each sample."""
    return replace(factors, left=factors.left[:, tokens], right=factors.right[:, tokens])


class ExactNorms:
    """Finds squared norms of matrices' gradients from their factors. `RandomizedNorms` estimates
    some of them."""

    def __init__(self, cp: dist.ProcessGroup | None) -> None:
        self._cp = cp

    def cap(self, name: str) -> float:
        """Return how large a parameter's added gradient may be, relative to its found norm."""
        return 1.0

    def start_step(self, key: bytes) -> None:
        """Set the key, 32 bytes, of a step's randomness: here nothing is random."""

    def start_microbatch(self, positions: Sequence[int] | None) -> None:
        """Set the units of the coming microbatch, by positions if they are known."""

    def is_cheaper(self, tokens: int, shape: torch.Size) -> bool:
        """Return whether to find a norm from factors, for `tokens` tokens of a whole sample."""
        return is_cheaper(tokens, shape)

    def squared_norms(self, name: str, shape: torch.Size, factors: Sequence[Factors]) -> Tensor:
        """Find squared norms of one parameter (P, D): fp64 (B,), this rank's part of the sum."""
        return squared_norms(factors, self._cp)
