"""Gaussian noise whose value at a position is the same on every mesh; plain, or secure.

The value depends on (key of the step, parameter's name, position in the whole flattened
parameter) alone, so each rank draws its own shard's noise without communication. Two generators,
each the fast one on its device; their values differ.

- CPU: Philox4x64-10 (numpy) and numpy's ziggurat, in blocks of `BLOCK` positions; block b of draw i
  starts at counter i * 2**128 + b * 2**64, so that no two blocks can meet however many words each
  rejects.
- elsewhere: Threefry4x32-20 in plain torch operations (compiled into one kernel on CUDA), one
  counter a position and draw, and Box-Muller.

Both are of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and are tested
against its published vectors (Random123, kat_vectors).

Secure noise, under keys of its own, is for attacks on the low bits of a noised sum, which can rule
out a sum that an observer suspects, at any epsilon (Mironov, CCS 2012). Each value is the
sum of four fp64 draws over 2 (Holohan & Braghin 2021: a search for the draws behind a value takes
2**159 trials), is added in fp64, and is rounded once to a multiple of `grid(std)`, which depends on
nothing private. It takes about five times as long.

Guarantee:
    - Over distinct (key, name, position), values behave as independent draws from N(0, std^2). All
      128 bits of each generator's key come from HMAC-SHA256(key, generator and name), so noise of
      different steps, parameters and purposes never shares a counter stream, and a position has one
      counter. No default, seeded or DTensor generator is involved, and a key reaches compiled code
      as a tensor, never as a number that a compile cache would keep.
    - Secure: rounding to a fixed grid is post-processing of an exact Gaussian mechanism, with ideal
      draws. With these, the probability of each multiple differs from the ideal one by about one
      part in 2**30, so no value can come of one sum and not of a neighbouring one. This is an
      argument, not a proof: a discrete Gaussian sampled in integers (Canonne, Kamath & Steinke
      2020) is exact, and too slow for every parameter at every step.
    - Assumptions: the ciphers' output is indistinguishable from random. They pass all known
      statistical tests and no attack on them is known, but they are not proven, nor reviewed as
      cryptography is. Plain noise ends at 8.2 standard deviations on CPU (missing mass 2.4e-16 a
      value) and at 9.5 elsewhere.
    - Not resisted: timing, reading this process's memory, the rounding of the clipped sum itself in
      fp32 (`clipping.fp32_sum_excess`), and, by plain noise, attacks on floating point.
"""

import functools
import hmac
import math
import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchtitan_dp.privacy.kernels import BLOCK, compile_kernel, on_threads

DRAWS = 4
"""Draws behind a value of secure noise."""

Add = Callable[[Tensor, Tensor], object]

# Positions handed to the torch cipher at once: bounds the temporaries where it is not compiled.
_CHUNK = 2**22
# Where it is, there are none; positions within a chunk are 32-bit numbers.
_COMPILED_CHUNK = 2**30
_GRID_BITS = 18


@torch.no_grad()
def add_gaussian_noise_(flat: Tensor, *, std: float, key: bytes, name: str, start: int) -> None:
    """Add N(0, std^2) in place to one shard of a parameter's gradient.

    Args:
        flat: fp32, shape (n,): positions [start, start + n) of the whole flattened parameter.
        key: the 32 bytes of this step, from `keys.KeyStream.take`.
        name: the parameter's canonical name, without wrappers' prefixes.
        std: sigma x C, in units of the gradient; 0 adds nothing.
        start: the shard's first position in the whole flattened parameter.

    Raises:
        ValueError: `flat` is not a vector of fp32, or `std` is negative or not finite.
    """
    _check_arguments(flat, std=std, key=key, name=name, start=start)
    if std == 0 or flat.numel() == 0:
        return
    if flat.device.type == "cpu":
        add = functools.partial(Tensor.add_, alpha=std)
        _add_philox(flat, add, cipher_key(key, "philox4x64", name), start)
    else:
        _add_threefry(flat, std, threefry_key(key, name, flat.device), start)


@torch.no_grad()
def add_secure_gaussian_noise_(
    flat: Tensor, *, std: float, key: bytes, name: str, start: int
) -> None:
    """Add secure noise, and round to `grid(std)`; else as `add_gaussian_noise_`, on CPU or CUDA."""
    _check_arguments(flat, std=std, key=key, name=name, start=start)
    if std == 0:
        return
    add_draws(flat, functools.partial(_add_rounded, std=std), key=key, name=name, start=start)


def _check_arguments(flat: Tensor, *, std: float, key: bytes, name: str, start: int) -> None:
    if flat.dtype != torch.float32 or flat.dim() != 1:
        raise ValueError(f"{name}: {flat.dtype} {tuple(flat.shape)}; noise needs a flat fp32 shard")
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"noise for {name}: std = {std} must be finite and not negative")
    assert len(key) == 32, "the key of a step has 32 bytes"
    assert start >= 0


def standard_normal(
    key: bytes, name: str, start: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw the unit noise of positions [start, start + count): fp32, shape (count,)."""
    noise = torch.zeros(count, dtype=torch.float32, device=device)
    add_gaussian_noise_(noise, std=1.0, key=key, name=name, start=start)
    return noise


def grid(std: float) -> float:
    """Return the distance between the values of secure noise: a power of two."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def add_draws(flat: Tensor, add: Add, *, key: bytes, name: str, start: int) -> None:
    """Call `add(part, noise)` once for each part of `flat`, in any order, on several threads.

    `noise` are fp64 sums of `DRAWS` unit normals, hence of standard deviation 2, of the shape of
    `part`, a view of `flat`; `add` may overwrite it. All else is as in `add_gaussian_noise_`.
    """
    if flat.numel() == 0:
        return
    if flat.device.type == "cpu":
        own = cipher_key(key, "philox4x64-secure", name)
        _add_philox(flat, add, own, start, draws=DRAWS, dtype=np.float64)
    else:
        words = threefry_key(key, name, flat.device, "threefry4x32-secure")
        _add_threefry_sums(flat, add, words, start)


def _add_rounded(flat: Tensor, noise: Tensor, *, std: float) -> None:
    """Compute flat + noise * std / 2 in fp64, and round it to the grid."""
    step = grid(std)
    noise.mul_(std / math.sqrt(DRAWS)).add_(flat)
    flat.copy_(noise.div_(step).round_().mul_(step))


def cipher_key(key: bytes, generator: str, name: str) -> bytes:
    """Derive 128 bits for one generator and parameter, independent of those for any other."""
    return hmac.digest(key, f"{generator}/{name}".encode(), "sha256")[:16]


# --- CPU: Philox4x64-10 ---------------------------------------------------------------------------


def _add_philox(
    flat: Tensor, add: Add, key: bytes, start: int, *, draws: int = 1, dtype: type = np.float32
) -> None:
    """Add sums of so many draws of Philox, by `add`, to each block's part of `flat`."""
    stop = start + flat.numel()

    def add_blocks(mine: range) -> None:
        # Setting a generator's state is several times cheaper than making one.
        philox = np.random.Philox(key=int.from_bytes(key, "little"))
        generator, state = np.random.Generator(philox), philox.state  # counter 0, empty buffers
        both: np.ndarray = np.empty((2, BLOCK), dtype)
        draw, total = both
        for block in mine:
            first = block * BLOCK
            low, high = max(start, first), min(stop, first + BLOCK)
            total[: high - first] = 0.0  # what lies after is not drawn
            for i in range(draws):
                state["state"]["counter"][1:3] = block, i
                philox.state = state
                generator.standard_normal(dtype=dtype, out=draw[: high - first])
                total[: high - first] += draw[: high - first]
            values = torch.from_numpy(total)
            add(flat[low - start : high - start], values[low - first : high - first])

    on_threads(add_blocks, range(start // BLOCK, (stop - 1) // BLOCK + 1))


# --- elsewhere: Threefry4x32-20 and Box-Muller ----------------------------------------------------

_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = 0x1BD11BDA


def threefry_key(
    key: bytes, name: str, device: torch.device | str, generator: str = "threefry4x32"
) -> Tensor:
    """Return the cipher's key for one parameter: int32, shape (4,), on `device`."""
    words = struct.unpack("4i", cipher_key(key, generator, name))
    # As arguments of kernels: a copy would wait for the device, or read memory after it is freed.
    return torch.stack([torch.full((), word, dtype=torch.int32, device=device) for word in words])


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    # >> on int32 copies the sign bit: mask it away
    return (x << bits) | ((x >> (32 - bits)) & ((1 << bits) - 1))


def threefry4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, ...]:
    """Apply Threefry4x32 with 20 rounds: four words in, four out, of one shape, all int32 that
    stand for uint32; the key has shape (4,). Sums wrap modulo 2**32, as int32 does in torch."""
    k = [key[0], key[1], key[2], key[3]]
    k.append(k[0] ^ k[1] ^ k[2] ^ k[3] ^ _PARITY)
    x0, x1, x2, x3 = (word + k[i] for i, word in enumerate(counter))
    for round_ in range(20):
        left, right = _ROTATIONS[round_ % 8]
        x0, x2 = x0 + x1, x2 + x3
        x1, x3 = _rotate_left(x1, left) ^ x0, _rotate_left(x3, right) ^ x2
        x1, x3 = x3, x1  # the words' permutation between rounds
        if round_ % 4 == 3:
            i = round_ // 4 + 1
            x0, x1 = x0 + k[i % 5], x1 + k[(i + 1) % 5]
            x2, x3 = x2 + k[(i + 2) % 5], x3 + (k[(i + 3) % 5] + i)
    return x0, x1, x2, x3


def threefry_normal(key: Tensor, start: Tensor, count: int) -> Tensor:
    """Draw unit normals of `count` positions from `start`: fp32, shape (count,), on the key's
    device.

    Args:
        key: from `threefry_key`.
        start: int64, shape (): a tensor, so that compiled code serves every shard.

    The counter is the 64-bit position. Of its four words w, Box-Muller takes

        u = (w0 * 2**32 + w1 + 1/2) / 2**64      radius = sqrt(-2 ln u), at most 9.5
        v = ((w2 mod 2**31) + 1/2) / 2**31       value = ± radius * sin(pi/2 * v)

    with the sign of w2's bit 31. A quarter turn and a sign stand for the whole turn; near 0 the
    values are then as fine as fp32 is. For u > 1/2 the logarithm is taken of 1 - u by log1p, so
    that small radii are exact too. w3 is not used.
    """
    positions = torch.arange(count, dtype=torch.int64, device=key.device) + start
    low, high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    zero = torch.zeros_like(low)
    w0, w1, w2, _ = threefry4x32((low, high, zero, zero), key)
    angle = ((w2 & 0x7FFFFFFF).to(torch.float32) + 0.5) * (math.pi / 2 * 2.0**-31)
    value = _radius(w0, w1, torch.float32) * torch.sin(angle)
    return torch.where(w2 < 0, -value, value)


def threefry_normal_sum(key: Tensor, start: Tensor, count: int) -> Tensor:
    """Draw sums of four unit normals, of `count` positions from `start`: fp64, shape (count,).

    As `threefry_normal`, in fp64 and with all four words w of the counter (position, i):

        v = ((w2 mod 2**31) * 2**32 + w3 + 1/2) / 2**63      value = ± radius * sin(pi/2 * v)
    """
    positions = torch.arange(count, dtype=torch.int64, device=key.device) + start
    low, high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    zero = torch.zeros_like(low)
    wide = torch.float64
    total = torch.zeros(count, dtype=wide, device=key.device)
    for i in range(DRAWS):
        w0, w1, w2, w3 = threefry4x32((low, high, zero + i, zero), key)
        turn = (w2 & 0x7FFFFFFF).to(wide) + (_unsigned(w3, wide) + 0.5) * 2.0**-32
        value = _radius(w0, w1, wide) * torch.sin(turn * (math.pi / 2 * 2.0**-31))
        total = total + torch.where(w2 < 0, -value, value)
    return total


def _radius(w0: Tensor, w1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sqrt(-2 ln u) of u = (w0 * 2**32 + w1 + 1/2) / 2**64."""
    upper = w0 < 0
    # t = min(u, 1 - u): as integers 1 - u is the complement, without rounding
    t_high = torch.where(upper, ~w0, w0).to(dtype)
    t_low = _unsigned(torch.where(upper, ~w1, w1), dtype)
    t = (t_high + (t_low + 0.5) * 2.0**-32) * 2.0**-32
    return torch.sqrt(2.0 * torch.where(upper, -torch.log1p(-t), -torch.log(t)))


def _unsigned(word: Tensor, dtype: torch.dtype) -> Tensor:
    return word.to(dtype) + torch.where(word < 0, 2.0**32, 0.0)


def _add_normal(flat: Tensor, key: Tensor, start: Tensor, std: Tensor) -> None:
    flat.add_(threefry_normal(key, start, flat.numel()) * std)


def _add_threefry(flat: Tensor, std: float, key: Tensor, start: int) -> None:
    """Add in one kernel a chunk, whose arguments lie on the device, which never waits."""
    add, size = _add_normal, _CHUNK
    if flat.device.type == "cuda":
        add, size = compile_kernel(_add_normal), _COMPILED_CHUNK
    scale = torch.full((), std, dtype=torch.float32, device=flat.device)
    for part, first in zip(*_chunks(flat, start, size), strict=True):
        add(part, key, first, scale)


def _add_threefry_sums(flat: Tensor, add: Add, key: Tensor, start: int) -> None:
    on_cuda = flat.device.type == "cuda"
    total = compile_kernel(threefry_normal_sum) if on_cuda else threefry_normal_sum
    for part, first in zip(*_chunks(flat, start, _CHUNK // 2), strict=True):
        add(part, total(key, first, part.numel()))


def _chunks(flat: Tensor, start: int, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return chunks of `size`, and the positions at which they begin: int64, made on the device."""
    starts = torch.arange(start, start + flat.numel(), size, dtype=torch.int64, device=flat.device)
    return flat.split(size), starts
