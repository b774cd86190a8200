"""Norms of per-sample gradients of matrices, from their factors alone: exact, or estimated.

The gradient of sample b is a sum over its tokens, G_b = sum_t l_t r_t^T, so that

    |G_b|^2 = sum_{t,s} (l_t . l_s) (r_t . r_s):

two products of (T, T) in the place of one of (P, D) (Goodfellow 2015; Li et al. 2021; Bu et al.
2022, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
Privacy"). An embedding's l_t is the unit vector of token t. A parameter with several layers (a tied
weight) has the tokens of all of them, and the pairs across layers are its cross term. The (T, T)
products exist a block of rows at a time. Under context parallelism each rank pairs its own tokens
with those of all ranks, gathered block by block: the bytes of the whole sample's factors.

Estimates are Hutchinson's ("Efficient DP-SGD for LLMs with Randomized Clipping", 2026): for a
matrix S of (P, k), of independent N(0, 1 / k), Y = G^T S = R^T (L S) has E|Y|^2 = |G|^2. It takes
T k (P + D) multiplications and k (T + P + D) numbers. Hutch++ (Meyer, Musco, Musco & Woodruff 2021)
finds an orthonormal basis Q of k columns of a sketch G^T S', and estimates only the part outside
it, |Q^T G^T|^2 + |(1 - Q Q^T) G^T S|^2, with as many projections for S' as for S, three times the
products, and the same accounting: given the head, the tail's estimate has k projections. Ranks sum
(B, D, k) numbers, and no token leaves its rank. Shapes alone (with length buckets, the unit's own
length) decide which layers are estimated.

Guarantee:
    - Exact norms have none for privacy: `ghost` caps the added gradients by them. The squares are
      sums of products that cancel, in fp32 within blocks and fp64 across them: their error is a
      share of (sum_t |l_t| |r_t|)^2, not of themselves (tests: 1e-6 of a Llama's).
    - A sample's projections depend only on (step key, parameter name, unit index): not on other
      units' data, on who else was drawn, or on the mesh. No two units, parameters or steps share
      any, if each step has its own key and draws a unit once: they are independent in the sense of
      `privacy.noise`. They are secret; only through clip factors do they affect anything outside
      the process.
    - If `capped`, `ghost` adds no more of a layer than its estimate. Given a step's key, a unit's
      presence and records then change no other unit's projections, estimates, factors or
      contribution (but for how a device rounds products of other rows of a microbatch: on CPU, in
      fp32, at lengths that are no multiple of its vectors, by 1e-8 of itself), and move the sum by
      at most C for any estimates: steps are accounted for as with exact norms. (Removing
      a unit from the population shifts later indices; that is equivalent to removing the last one,
      because draws and projections do not depend on the units' order.)
    - Otherwise `ghost` adds at most `largest_ratio` times the estimate, and `privacy.losses`
      accounts for that. Both bounds hold for any error of floating point.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_dp.base.collectives import all_gather
from torchtitan_dp.gradients.operands import Products, Rows, accumulates_wide, tiles, write_product_
from torchtitan_dp.privacy.kernels import BLOCK
from torchtitan_dp.privacy.losses import largest_ratio
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.sampling import unit_normals

Factors = Products | Rows
NormEstimator = Literal["hutchinson", "hutch++"]


BLOCK_ELEMENTS = 2**24
"""Bounds the elements of a block, of at least one token: of a (B, rows, T) product, of factors from
all ranks, and of what `project` multiplies at once."""


def squared_norms(factors: Sequence[Factors], cp: dist.ProcessGroup | None) -> Tensor:
    """Find the squared norms of B samples' gradients of one parameter.

    Args:
        factors: those of each of the parameter's layers, for this rank's tokens, as many on each
            rank.

    Returns:
        fp64 (B,): this rank's part. The sum over `cp` is the square, up to rounding, which can
        leave it below 0. NaN and Inf of a sample's factors stay visible, as NaN or Inf.

    Collectives: with `cp`, all-gathers of blocks of factors.
    """
    total_B = torch.zeros(len(factors[0].left), dtype=torch.float64, device=factors[0].left.device)
    for place, columns in enumerate(factors):
        if cp is not None:
            for block in _from_all_ranks(columns, cp):
                for number, rows in enumerate(factors[: place + 1]):
                    total_B += (1 if number == place else 2) * _pairs(rows, block)
            continue
        total_B += _pairs_with_itself(columns)
        for rows in factors[:place]:
            total_B += 2 * _pairs(rows, columns)
    return total_B


def _pairs(rows: Factors, columns: Factors) -> Tensor:
    """Sum over all pairs of a token of `rows` and one of `columns`: fp64 (B,)."""
    total_B = torch.zeros(len(rows.left), dtype=torch.float64, device=rows.left.device)
    at_once = max(BLOCK_ELEMENTS // (len(rows.left) * columns.left.shape[1]), 1)
    for block in tiles(rows.left.shape[1], at_once):
        total_B += _inner(some_tokens(rows, block), columns)
    return total_B


def _pairs_with_itself(factors: Factors) -> Tensor:
    """Sum over all pairs of a sample's tokens; each unequal pair is computed once."""
    tokens = factors.left.shape[1]
    total_B = torch.zeros(len(factors.left), dtype=torch.float64, device=factors.left.device)
    # Several blocks even if one has room, to skip products below the diagonal.
    at_once = max(min(BLOCK_ELEMENTS // (len(factors.left) * tokens), -(-tokens // 4)), 1)
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
        return rows.left.gather(2, columns.left[:, None].expand(-1, rows.left.shape[1], -1)).float()
    if isinstance(columns, Products):
        return _lefts(columns, rows).mT
    return (rows.left[:, :, None] == columns.left[:, None]).float()


def _products(rows_BRK: Tensor, columns_BSK: Tensor) -> Tensor:
    """Compute rows @ columns^T in fp32: (B, R, S). Factors of 16 bits are multiplied exactly."""
    out_BRS = rows_BRK.new_empty((*rows_BRK.shape[:2], columns_BSK.shape[1]), dtype=torch.float32)
    alike = rows_BRK.dtype == columns_BSK.dtype
    if not alike or (rows_BRK.dtype != torch.float32 and not accumulates_wide(out_BRS)):
        rows_BRK, columns_BSK = rows_BRK.float(), columns_BSK.float()
    write_product_(out_BRS, rows_BRK, columns_BSK.mT)
    return out_BRS


def _from_all_ranks(factors: Factors, cp: dist.ProcessGroup) -> Iterator[Factors]:
    """Yield all ranks' factors, one rank's block at a time, gathered a block from all ranks."""
    ranks, (samples, tokens) = dist.get_world_size(cp), factors.left.shape[:2]
    a_token = ranks * samples * sum(x[0, 0].numel() for x in (factors.left, factors.right))
    own = factors.factor_B
    scales = [None] * ranks if own is None else all_gather(own, cp)
    for block in tiles(tokens, max(BLOCK_ELEMENTS // a_token, 1)):
        here = some_tokens(factors, block)
        lefts, rights = all_gather(here.left, cp), all_gather(here.right, cp)
        for rank in range(ranks):
            yield replace(here, left=lefts[rank], right=rights[rank], factor_B=scales[rank])


def some_tokens(factors: Factors, tokens: slice) -> Factors:
    """Take some of the tokens of each sample."""
    return replace(factors, left=factors.left[:, tokens], right=factors.right[:, tokens])


class ExactNorms:
    """Finds squared norms of matrices' gradients from their factors."""

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
        """Return whether to find the norm of a gradient (P, D) from its factors, for T `tokens` of
        the whole sample, summed over the parameter's layers.

        The mixed ghost norm (Bu et al. 2022, section 4; DP-ZeRO, appendix A.1): 2 T^2 < P D.
        """
        return 2 * tokens * tokens < shape.numel()

    def squared_norms(self, name: str, shape: torch.Size, factors: Sequence[Factors]) -> Tensor:
        """Find squared norms of one parameter (P, D): fp64 (B,), this rank's part of the sum."""
        return squared_norms(factors, self._cp)


class RandomizedNorms(ExactNorms):
    """Squared norms for `ghost`: estimates of large layers', exact ones of others."""

    def __init__(
        self,
        projections: int,
        estimator: NormEstimator,
        cp: dist.ProcessGroup | None,
        *,
        capped: bool,
        secure: bool = False,
    ) -> None:
        """Args:
        projections: k; accounting depends on it unless `capped`.
        capped: whether added gradients are capped at their estimated norms.
        secure: whether projections are from a cryptographic generator, on the CPU.
        """
        super().__init__(cp)
        self._secure = secure
        self.k, self.estimator = projections, estimator
        self._largest_ratio = 1.0 if capped else largest_ratio(projections)
        self._estimated: set[str] = set()  # parameters, in this microbatch
        self._cp_size = 1 if cp is None else dist.get_world_size(cp)
        self._key: bytes | None = None
        self._positions: Sequence[int] | None = None  # of the microbatch's units
        self._seen: set[int] = set()  # positions of this rank's units in this step

    def start_step(self, key: bytes) -> None:
        assert len(key) == 32
        self._key = key
        self._seen.clear()

    def start_microbatch(self, positions: Sequence[int] | None) -> None:
        units = [position for position in positions or () if position >= 0]
        count = len(self._seen) + len(units)
        self._seen.update(units)
        assert len(self._seen) == count, "a unit came twice in a step: it would share projections"
        self._positions = positions
        self._estimated.clear()

    def cap(self, name: str) -> float:
        """Return `largest_ratio` for an estimated parameter that is not capped, else 1."""
        return self._largest_ratio if name in self._estimated else 1.0

    def is_cheaper(self, tokens: int, shape: torch.Size) -> bool:
        return self.estimates(tokens, shape) or super().is_cheaper(tokens, shape)

    def estimates(self, tokens: int, shape: torch.Size) -> bool:
        """Return whether a matrix's norm is estimated: k (T + P + D) < min(2 T^2, P D)."""
        return self.k * (tokens + sum(shape)) < min(2 * tokens * tokens, shape.numel())

    def squared_norms(self, name: str, shape: torch.Size, factors: Sequence[Factors]) -> Tensor:
        """Estimate or find squared norms of one parameter, once for each microbatch.

        Collectives, over cp: an all-reduce of B D k numbers, or, for Hutch++, of 2 B D k and of
        B P k; for exact norms those of `squared_norms`.
        """
        tokens = sum(one.left.shape[1] for one in factors) * self._cp_size
        if not self.estimates(tokens, shape):
            return super().squared_norms(name, shape, factors)
        self._estimated.add(name)
        drawn_BPK = self._draw(name, "tail", factors, shape[0])
        if self.estimator == "hutchinson":
            return _squares(self._over_cp(project(factors, drawn_BPK, shape[1]))) / self._cp_size
        sketch_BPK = self._draw(name, "sketch", factors, shape[0])
        both = project(factors, torch.cat([sketch_BPK, drawn_BPK], dim=2), shape[1])
        seen_BDK, y_BDK = self._over_cp(both).chunk(2, dim=2)
        basis_BDK = _orthonormal(seen_BDK)
        head_BPK = self._over_cp(project(factors, basis_BDK, shape[0], back=True))
        y_BDK = y_BDK - basis_BDK @ (basis_BDK.mT @ y_BDK)
        return (_squares(head_BPK) + _squares(y_BDK)) / self._cp_size

    def _draw(self, name: str, purpose: str, factors: Sequence[Factors], rows: int) -> Tensor:
        """Draw the microbatch's projections, of N(0, 1 / k): fp32 (B, rows, k)."""
        assert self._key is not None, "no key: start_step comes before a step's first microbatch"
        assert self._positions is not None, "whose samples these are is not known"
        samples, k, stream = factors[0].left, self.k, f"{name}/{purpose}"
        # Rows begin whole blocks apart, so that a compiled kernel finds each of them aligned.
        shape = len(samples), in_whole_blocks(rows * k)
        drawn_BN = torch.zeros(shape, dtype=torch.float32, device=samples.device)[:, : rows * k]
        for one_N, position in zip(drawn_BN, self._positions, strict=True):
            if self._secure:
                normals_N = unit_normals(self._key, stream, position + 1, rows * k)
                one_N.copy_(torch.from_numpy(normals_N).div_(math.sqrt(k)))
                continue
            start, std = first_number(position, rows * k), 1 / math.sqrt(k)
            add_gaussian_noise_(one_N, std=std, key=self._key, name=stream, start=start)
        return drawn_BN.unflatten(1, (rows, k))

    def _over_cp(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks' tokens. Collective over cp."""
        if self._cp is not None:
            part = part.contiguous()
            dist.all_reduce(part, group=self._cp)
        return part


def first_number(position: int, count: int) -> int:
    """Return where a unit's `count` numbers begin in a parameter's stream: at a block of the
    generator; padding, at -1, has the first place. Starts are below 2^63 for fewer than 2^32 units
    of 2^31 numbers."""
    return (position + 1) * in_whole_blocks(count)


def in_whole_blocks(count: int) -> int:
    """Round a count of numbers up to whole blocks of the generator."""
    return -(-count // BLOCK) * BLOCK


def project(factors: Sequence[Factors], by_BNK: Tensor, size: int, *, back: bool = False) -> Tensor:
    """Multiply B samples' transposed gradients by matrices of their own (with `back`, their
    gradients), without forming any.

    Args:
        factors: one parameter's, (N, size), with `back` (size, N), for this rank's tokens. A side
            is (B, T, n), or tokens (B, T), which stand for unit vectors.

    Returns:
        fp32 (B, size, k): G^T `by`, or G `by`, summed over these tokens.
    """
    samples, rows, k = by_BNK.shape
    at_once = max(BLOCK_ELEMENTS // (samples * (rows + size + k)), 1)
    total_BSK = by_BNK.new_zeros(samples, size, k)
    for layer in factors:
        a, b = (layer.right, layer.left) if back else (layer.left, layer.right)
        part_BSK = torch.zeros_like(total_BSK)
        for block in tiles(a.shape[1], at_once):
            a_block, b_block = a[:, block], b[:, block]
            if a.dim() == 3:
                of_tokens_BTK = a_block.float() @ by_BNK
            else:
                of_tokens_BTK = by_BNK.gather(1, a_block[:, :, None].expand(-1, -1, k))
            if b.dim() == 3:
                part_BSK.baddbmm_(b_block.float().mT, of_tokens_BTK)
            else:
                part_BSK.scatter_add_(1, b_block[:, :, None].expand(-1, -1, k), of_tokens_BTK)
        if layer.factor_B is not None:
            part_BSK.mul_(layer.factor_B[:, None, None])
        total_BSK += part_BSK
    return total_BSK


def _orthonormal(sketch_BDK: Tensor) -> Tensor:
    """Return orthonormal columns that span the sketch's, (B, D, min(D, k)); NaN for a sample whose
    sketch is not finite: LAPACK would refuse the whole microbatch."""
    finite_B11 = torch.isfinite(sketch_BDK).flatten(1).all(1)[:, None, None]
    basis_BDK, _ = torch.linalg.qr(torch.where(finite_B11, sketch_BDK, 0.0))
    return torch.where(finite_B11, basis_BDK, torch.nan)


def _squares(x_BDK: Tensor) -> Tensor:
    """Sum the squares of each sample's numbers: fp64 (B,)."""
    return x_BDK.flatten(1).square().sum(1, dtype=torch.float64)
