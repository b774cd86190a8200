"""Gaussian noise of which floating point betrays less: fp64, four draws a value, one fixed grid.

It costs about five times `noise`, and has its form: the value depends on (key of the step,
parameter's name, position) alone, from the same two generators, under keys and counters of its own.

The low bits of a noised sum can rule out a sum that an observer suspects, whatever epsilon says
(Mironov, CCS 2012). Here each value is the sum of four independent fp64 draws over 2 (Holohan &
Braghin 2021: a search for the draws behind a value takes 2**159 trials), is added in fp64, and is
rounded once to a multiple of `grid(std)`, which depends on nothing private.

Guarantee:
    - With ideal draws, rounding to a fixed grid is post-processing of an exact Gaussian mechanism.
    - With these draws, the probability of each multiple of the grid differs from the ideal one by
      about one part in 2**30, so no value can come of one sum and not of a neighbouring one. This
      is an argument, not a proof: a discrete Gaussian sampled in integers (Canonne, Kamath &
      Steinke 2020) is exact, and too slow for every parameter at every step.
    - Not resisted: timing, reading this process's memory, `noise`'s assumptions on its ciphers, and
      the rounding of the clipped sum itself in fp32, which `clipping.fp32_sum_excess` bounds.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchtitan_dp.privacy.kernels import BLOCK, compile_kernel, on_threads
from torchtitan_dp.privacy.noise import (
    PhiloxNormals,
    blocks_of,
    check_arguments,
    chunk_starts,
    cipher_key,
    of_block,
    radius,
    threefry4x32,
    threefry_key,
    unsigned,
)

DRAWS = 4
Add = Callable[[Tensor, Tensor], None]
_GRID_BITS = 18
_CHUNK = 2**21  # positions handed to the torch cipher at once: bounds the temporaries


def grid(std: float) -> float:
    """Return the distance between the values that can come out: a power of two.

    >>> grid(1.0) == grid(1.9) == 2.0**-18
    True
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


@torch.no_grad()
def add_secure_gaussian_noise_(
    flat: Tensor, *, std: float, key: bytes, name: str, start: int
) -> None:
    """Add N(0, std^2) in place to one shard of a parameter's gradient, and round to `grid(std)`.

    Args, Raises: those of `noise.add_gaussian_noise_`. The device must know fp64: CPU or CUDA.

    >>> whole, shard = torch.zeros(5), torch.zeros(2)
    >>> add_secure_gaussian_noise_(whole, std=1.0, key=bytes(32), name="w", start=0)
    >>> add_secure_gaussian_noise_(shard, std=1.0, key=bytes(32), name="w", start=3)
    >>> torch.equal(whole[3:], shard), bool((whole / grid(1.0) % 1 == 0).all())
    (True, True)
    """
    check_arguments(flat, std=std, key=key, name=name, start=start)
    if std == 0:
        return
    add_draws(flat, functools.partial(_add_rounded, std=std), key=key, name=name, start=start)


def add_draws(flat: Tensor, add: Add, *, key: bytes, name: str, start: int) -> None:
    """Call `add(part, noise)` once for each part of `flat`, in any order, on several threads.

    Args:
        flat: shape (n,): positions [start, start + n) of the whole flattened parameter.
        add: adds `noise` to `part`, a view of `flat`, in place. `noise`: fp64, of the same shape,
            sums of `DRAWS` unit normals, hence of standard deviation 2; it may be overwritten.
        key, name, start: those of `noise.add_gaussian_noise_`.
    """
    if flat.numel() == 0:
        return
    if flat.device.type == "cpu":
        _add_philox(flat, add, cipher_key(key, "philox4x64-secure", name), start)
    else:
        words = threefry_key(key, name, flat.device, "threefry4x32-secure")
        _add_threefry(flat, add, words, start)


def _add_rounded(flat: Tensor, noise: Tensor, *, std: float) -> None:
    """Compute flat + noise * std / 2 in fp64, and round it to the grid."""
    step = grid(std)
    noise.mul_(std / math.sqrt(DRAWS)).add_(flat)
    flat.copy_(noise.div_(step).round_().mul_(step))


def _add_philox(flat: Tensor, add: Add, key: bytes, start: int) -> None:
    """Add draws of Philox; block b of draw i starts at counter i * 2**128 + b * 2**64."""

    def add_blocks(mine: range) -> None:
        normals, draw, total = PhiloxNormals(key), np.empty(BLOCK), np.empty(BLOCK)
        for block in mine:
            here, drawn = of_block(block, start, flat.numel())
            total[: drawn.stop] = 0.0
            for i in range(DRAWS):
                normals.fill(draw[: drawn.stop], block, i)
                total[: drawn.stop] += draw[: drawn.stop]
            add(flat[here], torch.from_numpy(total)[drawn])

    on_threads(add_blocks, blocks_of(start, flat.numel()))


def threefry_normal_sum(key: Tensor, start: Tensor, count: int) -> Tensor:
    """Draw sums of four unit normals, of `count` positions from `start`: fp64, shape (count,).

    As `noise.threefry_normal`, in fp64 and with all four words w of the counter (position, i):

        v = ((w2 mod 2**31) * 2**32 + w3 + 1/2) / 2**63      value = ± radius * sin(pi/2 * v)
    """
    positions = torch.arange(count, dtype=torch.int64, device=key.device) + start
    low, high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    zero = torch.zeros_like(low)
    wide = torch.float64
    total = torch.zeros(count, dtype=wide, device=key.device)
    for i in range(DRAWS):
        w0, w1, w2, w3 = threefry4x32((low, high, zero + i, zero), key)
        turn = (w2 & 0x7FFFFFFF).to(wide) + (unsigned(w3, wide) + 0.5) * 2.0**-32
        value = radius(w0, w1, wide) * torch.sin(turn * (math.pi / 2 * 2.0**-31))
        total = total + torch.where(w2 < 0, -value, value)
    return total


def _add_threefry(flat: Tensor, add: Add, key: Tensor, start: int) -> None:
    on_cuda = flat.device.type == "cuda"
    total = compile_kernel(threefry_normal_sum) if on_cuda else threefry_normal_sum
    for part, first in zip(flat.split(_CHUNK), chunk_starts(flat, start, _CHUNK), strict=True):
        add(part, total(key, first, part.numel()))
