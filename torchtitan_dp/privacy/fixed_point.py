"""The clipped sum in integers: multiples of one small public unit, whose addition rounds nothing.

A sum in fp32 rounds at every addition, and how it rounds depends on all that was added before. So
one sample can change what thousands of others contribute (`summation.fp32_sum_excess` says by how
much). Here each sample is rounded once, by itself, to a multiple of `unit(C)`, and the multiples
are added in int64. That is exact and associative: the order of samples, the ranks that they lie on
and the order in which ranks are reduced change no bit.

Guarantee
---------
Let h = unit(C), y the clipped gradient of a sample, and k = round(y / h).

Sensitivity. y is the product of two fp32 numbers, formed in fp64 without rounding. So each of the P
trainable values is off by at most h / 2, and the norm by at most h sqrt(P) / 2, which is at most
1.5e-7 C for P up to `MAX_VALUES`. `clipping` leaves 2.1e-6 C of room. Hence |h k| <= C. The sum S
of the k's is a sum of integers: to replace a record by an empty one (whose k is 0), to add one or
to leave one out changes S by the k of this record alone, hence h S by at most C, however many
samples there are. A rejected sample (NaN, Inf, padding) adds exactly 0.

This takes y to be a function of its sample alone, as with one sample in a microbatch. With several,
a device may round a row of a product by the rows beside it: on CPU, in fp32, at lengths that are no
multiple of its vectors, a sample moved the sum of four others by 9e-9 of its own part, by which the
room left is enough for some hundred others.

Noise. With ideal draws N of N(0, (sigma C)^2), the step is an exact Gaussian mechanism: since S is
an integer, S + round(N / h) = round((h S + N) / h) (but for ties, of probability 0): the exactly
noised sum, rounded. All that follows is post-processing: the rounding to `secure_noise.grid`, to
fp32, the division by the batch, AdamW. How near to ideal draws are: `secure_noise`.

Wrapping. int64 adds modulo 2^64. The result is still a function of S + round(N / h), so privacy
would not suffer; the update would. It takes 2^21 samples of norm C that all point along one value:
then the sum reaches 2^62 units, and noise stays below 2^61 for sigma up to `MAX_NOISE_MULTIPLIER`.
The expected batch may be half as many samples (`MAX_EXPECTED_BATCH`); both limits are public.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan_dp.privacy.kernels import compile_kernel
from torchtitan_dp.privacy.noise import check_arguments
from torchtitan_dp.privacy.secure_noise import DRAWS, add_draws, grid

_Add = Callable[[Tensor, Tensor, Tensor, Tensor], None]

UNIT_BITS = 40
MAX_VALUES = 10**11  # trainable values of the whole model
MAX_NOISE_MULTIPLIER = 2.0**15
MAX_EXPECTED_BATCH = 2**20  # samples
# Values that are converted at once: bounds the fp64 temporaries, of which the compiled kernel has
# none (it counts in 32 bits); on CPU they fit the cores' cache.
_CHUNK = 2**22
_COMPILED_CHUNK = 2**30
_CPU_CHUNK = 2**16


def unit(max_grad_norm: float, values: int) -> float:
    """Return h, the largest power of two that is at most C / 2^40; it is the same on every rank and
    step.

    Args:
        max_grad_norm: C > 0.
        values: P, the number of trainable values of the whole model, on all ranks.

    >>> unit(1.0, 10**9) == unit(1.9, 10**9) == 2.0**-40
    True
    """
    assert values <= MAX_VALUES, f"{values} values: rounding them to a unit would exceed C"
    return math.ldexp(1.0, math.frexp(max_grad_norm)[1] - 1 - UNIT_BITS)


@torch.no_grad()
def add_clipped_units_(
    accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor, *, unit: float
) -> None:
    """Add one sample's scaled gradient, rounded to multiples of `unit`, in place.

    Args:
        accumulator: int64, shape (D, N).
        gradient: fp32, of the same shape; kept.
        factor, rejected: scalars on the device, of `clipping.clip`. Rejected samples are selected
            away before conversion: NaN has no integer.

    >>> total = torch.zeros(1, 2, dtype=torch.int64)
    >>> gradient, factor = torch.tensor([[3.0, -1.0]]), torch.tensor(0.25)
    >>> add_clipped_units_(total, gradient, factor, torch.tensor(False), unit=0.5)
    >>> total.tolist()  # 0.75 and -0.25, rounded half to even
    [[2, 0]]
    """
    assert accumulator.dtype == torch.int64, accumulator.dtype
    assert gradient.dtype == torch.float32, gradient.dtype
    assert accumulator.shape == gradient.shape, (accumulator.shape, gradient.shape)
    scale = factor.double() * (1 / unit)  # exact: a power of two
    for total_N, gradient_N in zip(accumulator, gradient, strict=True):
        _add_row_(total_N, gradient_N, scale, rejected)


def _add_row_(total: Tensor, gradient: Tensor, scale: Tensor, rejected: Tensor) -> None:
    if gradient.device.type == "cpu":
        _add_units_on_cpu(total, gradient, scale, rejected)
        return
    if gradient.device.type == "cuda":
        _add_in_chunks(
            compile_kernel(_add_units), _COMPILED_CHUNK, total, gradient, scale, rejected
        )
    else:
        _add_in_chunks(_add_units, _CHUNK, total, gradient, scale, rejected)


def _add_in_chunks(
    add_units: _Add, size: int, total: Tensor, gradient: Tensor, scale: Tensor, rejected: Tensor
) -> None:
    """Call `add_units` on contiguous vectors, views of nothing (see `clipping._add_rows`)."""
    if len(total) == 0:
        return
    for total_n, gradient_n in zip(total.split(size), gradient.split(size), strict=True):
        add_units(total_n.data, gradient_n.contiguous().data, scale.data, rejected.data)


def _add_units_on_cpu(total: Tensor, gradient: Tensor, scale: Tensor, rejected: Tensor) -> None:
    """Do as `_add_units`, with temporaries that every chunk uses again."""
    size = min(_CPU_CHUNK, len(total))
    scaled = total.new_empty(size, dtype=torch.float64)
    units = total.new_empty(size)
    for total_n, gradient_n in zip(total.split(size), gradient.split(size), strict=True):
        scaled_n, units_n = scaled[: len(total_n)], units[: len(total_n)]
        scaled_n.copy_(gradient_n).masked_fill_(rejected, 0.0).mul_(scale).round_()
        total_n.add_(units_n.copy_(scaled_n))


def _add_units(total: Tensor, gradient: Tensor, scale: Tensor, rejected: Tensor) -> None:
    """Add round(gradient * scale) as int64; the product of 24 and 24 bits is exact in fp64."""
    total.add_(gradient.masked_fill(rejected, 0.0).double().mul_(scale).round_().to(torch.int64))


@torch.no_grad()
def add_noise_units_(
    flat: Tensor, *, unit: float, std: float, key: bytes, name: str, start: int
) -> None:
    """Add N(0, std^2), rounded to multiples of `unit`, in place.

    Args:
        flat: int64, shape (n,): positions [start, start + n) of the parameter's sum, in units.
        unit: h, of `unit`.
        std, key, name, start: those of `noise.add_gaussian_noise_`.

    Raises:
        ValueError: `flat` is not a vector of int64, or `std` is not finite or too large for it.
    """
    check_arguments(flat, std=std, key=key, name=name, start=start, dtype=torch.int64)
    if std / unit > MAX_NOISE_MULTIPLIER * 2.0 ** (UNIT_BITS + 1):
        raise ValueError(
            f"privacy.noise_multiplier: a standard deviation of {std:.4g} is too large for "
            f"privacy.exact_sum (C times {MAX_NOISE_MULTIPLIER:,.0f}); set it to false, or ask "
            "for less noise"
        )
    if std == 0:
        return
    scale = std / math.sqrt(DRAWS) / unit

    def add(part: Tensor, noise: Tensor) -> None:
        part.add_(noise.mul_(scale).round_().to(torch.int64))

    add_draws(flat, add, key=key, name=name, start=start)


@torch.no_grad()
def units_to_fp32_(flat: Tensor, *, unit: float, std: float) -> Tensor:
    """Return the noised sum as fp32, rounded to `secure_noise.grid(std)`: this is post-processing.

    Args:
        flat: int64, shape (n,), contiguous; its memory is used for the result.
        std: of the noise that was added; 0 rounds to fp32 alone.

    Returns:
        fp32, shape (n,), in the first half of the memory of `flat`: nothing is held twice.

    >>> units_to_fp32_(torch.tensor([3, -5]), unit=0.25, std=0.0)
    tensor([ 0.7500, -1.2500])
    """
    assert flat.dtype == torch.int64, flat.dtype
    step = grid(std) if std > 0 else unit
    out = flat.view(torch.float32)[: flat.numel()]
    # In order: a chunk's results end before the place where the next chunk's integers begin.
    for start in range(0, flat.numel(), _CHUNK):
        here = slice(start, start + _CHUNK)
        out[here].copy_(flat[here].double().mul_(unit / step).round_().mul_(step))
    return out
