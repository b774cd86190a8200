"""Gaussian noise whose value at a position is the same on every mesh.

The value depends on (key of the step, parameter's name, position in the whole flattened
parameter) alone, so each rank draws its own shard's noise without communication. Two generators,
each the fast one on its device; their values differ.

- CPU: Philox4x64-10 (numpy) and numpy's fp32 ziggurat, in blocks of `BLOCK` positions; block b
  starts at counter b * 2**64, so that no two blocks can meet however many words each rejects.
- elsewhere: Threefry4x32-20 in plain torch operations (compiled into one kernel on CUDA), one
  counter a position, and Box-Muller.

Both are of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and are tested
against its published vectors (Random123, kat_vectors).

Guarantee
---------
Over distinct (key, name, position), values behave as independent draws from N(0, std^2). All 128
bits of each generator's key come from HMAC-SHA256(key, generator and name), so noise of different
steps, parameters and purposes never shares a counter stream, and a position has one counter. No
default, seeded or DTensor generator is involved, and a key reaches compiled code as a tensor,
never as a number that a compile cache would keep.

Assumptions: the ciphers' output is indistinguishable from random. They pass all known statistical
tests and no attack on them is known, but they are not proven, nor reviewed as cryptography is. Not
resisted: timing, and attacks on floating-point noise, which `secure_noise` is for. The tails end at
8.2 standard deviations on CPU (missing mass 2.4e-16 a value) and at 9.5 elsewhere.
"""

import hmac
import math
import struct

import numpy as np
import torch
from torch import Tensor

from torchtitan_dp.privacy.kernels import BLOCK, compile_kernel, on_threads

# Positions handed to the torch cipher at once: bounds the temporaries where it is not compiled.
_CHUNK = 2**22
# Where it is, there are none; positions within a chunk are 32-bit numbers.
_COMPILED_CHUNK = 2**30


@torch.no_grad()
def add_gaussian_noise_(flat: Tensor, *, std: float, key: bytes, name: str, start: int) -> None:
    """Add N(0, std^2) in place to one shard of a parameter's gradient.

    Args:
        flat: fp32, shape (n,): positions [start, start + n) of the whole flattened parameter.
        key: the 32 bytes of this step, from `keys.KeyStream.take`.
        name: the parameter's canonical name, without wrappers' prefixes.

    Raises:
        ValueError: `flat` is not a vector of fp32, or `std` is negative or not finite.

    >>> whole, shard = torch.zeros(5), torch.zeros(2)
    >>> add_gaussian_noise_(whole, std=1.0, key=bytes(32), name="w", start=0)
    >>> add_gaussian_noise_(shard, std=1.0, key=bytes(32), name="w", start=3)
    >>> torch.equal(whole[3:], shard)
    True
    """
    check_arguments(flat, std=std, key=key, name=name, start=start)
    if std == 0 or flat.numel() == 0:
        return
    if flat.device.type == "cpu":
        _add_philox(flat, std, cipher_key(key, "philox4x64", name), start)
    else:
        _add_threefry(flat, std, threefry_key(key, name, flat.device), start)


def check_arguments(flat: Tensor, *, std: float, key: bytes, name: str, start: int) -> None:
    """Refuse arguments that `add_gaussian_noise_` and its secure variant cannot take."""
    if flat.dtype != torch.float32 or flat.dim() != 1:
        raise ValueError(
            f"noise for {name}: got {flat.dtype} of shape {tuple(flat.shape)}; "
            "pass the flattened fp32 shard"
        )
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


def cipher_key(key: bytes, generator: str, name: str) -> bytes:
    """Derive 128 bits for one generator and parameter, independent of those for any other."""
    return hmac.digest(key, f"{generator}/{name}".encode(), "sha256")[:16]


# --- CPU: Philox4x64-10 ---------------------------------------------------------------------------


def _add_philox(flat: Tensor, std: float, key: bytes, start: int) -> None:
    def add_blocks(mine: range) -> None:
        normals, buffer = PhiloxNormals(key), np.empty(BLOCK, dtype=np.float32)
        values = torch.from_numpy(buffer)
        for block in mine:
            here, drawn = of_block(block, start, flat.numel())
            normals.fill(buffer[: drawn.stop], block)
            flat[here].add_(values[drawn], alpha=std)

    on_threads(add_blocks, blocks_of(start, flat.numel()))


class PhiloxNormals:
    """Unit normals by numpy's ziggurat, block by block of one key's positions."""

    def __init__(self, key: bytes) -> None:
        # Setting a generator's state is several times cheaper than making one.
        self._philox = np.random.Philox(key=int.from_bytes(key, "little"))
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state  # fresh: counter 0, empty buffers

    def fill(self, out: np.ndarray, block: int, draw: int = 0) -> None:
        """Draw the first normals of a block, fp32 or fp64, from counter draw * 2**128 +
        block * 2**64."""
        self._state["state"]["counter"][1:3] = block, draw
        self._philox.state = self._state
        self._generator.standard_normal(dtype=out.dtype, out=out)


def blocks_of(start: int, count: int) -> range:
    """Return the blocks that positions [start, start + count), at least one, lie in."""
    return range(start // BLOCK, (start + count - 1) // BLOCK + 1)


def of_block(block: int, start: int, count: int) -> tuple[slice, slice]:
    """Return which of these positions lie in a block, and where in it: what lies after them is
    not drawn."""
    first = block * BLOCK
    low, high = max(start, first), min(start + count, first + BLOCK)
    return slice(low - start, high - start), slice(low - first, high - first)


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
    """Apply Threefry4x32 with 20 rounds: four words in, four out, all int32 that stand for uint32.

    Args:
        counter: four int32 tensors of one shape.
        key: int32, shape (4,).

    Sums wrap modulo 2**32, as int32 does in torch on CPU and CUDA.
    """
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
    value = radius(w0, w1, torch.float32) * torch.sin(angle)
    return torch.where(w2 < 0, -value, value)


def radius(w0: Tensor, w1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sqrt(-2 ln u) of u = (w0 * 2**32 + w1 + 1/2) / 2**64."""
    upper = w0 < 0
    # t = min(u, 1 - u): as integers 1 - u is the complement, without rounding
    t_high = torch.where(upper, ~w0, w0).to(dtype)
    t_low = unsigned(torch.where(upper, ~w1, w1), dtype)
    t = (t_high + (t_low + 0.5) * 2.0**-32) * 2.0**-32
    return torch.sqrt(2.0 * torch.where(upper, -torch.log1p(-t), -torch.log(t)))


def unsigned(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the uint32 that an int32 stands for."""
    return word.to(dtype) + torch.where(word < 0, 2.0**32, 0.0)


def _add_normal(flat: Tensor, key: Tensor, start: Tensor, std: Tensor) -> None:
    flat.add_(threefry_normal(key, start, flat.numel()) * std)


def _add_threefry(flat: Tensor, std: float, key: Tensor, start: int) -> None:
    """Add in one kernel a chunk, whose arguments lie on the device, which never waits."""
    add, size = _add_normal, _CHUNK
    if flat.device.type == "cuda":
        add, size = compile_kernel(_add_normal), _COMPILED_CHUNK
    scale = torch.full((), std, dtype=torch.float32, device=flat.device)
    for part, first in zip(flat.split(size), chunk_starts(flat, start, size), strict=True):
        add(part, key, first, scale)


def chunk_starts(flat: Tensor, start: int, size: int) -> Tensor:
    """List the positions at which chunks of `size` begin: int64, made on the device."""
    return torch.arange(start, start + flat.numel(), size, dtype=torch.int64, device=flat.device)
