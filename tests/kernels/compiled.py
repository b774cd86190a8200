"""Every function that the package compiles, with inputs, and with what the CPU computes instead."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_dp.models import feed_forward, loss
from torchtitan_dp.privacy import clipping, noise
from torchtitan_dp.privacy.kernels import compile_kernel

POSITIONS = 2**14
STARTS = (0, 2**31 - 1000, 2**33 + 7)
KEY = noise.threefry_key(bytes(range(32)), "w", "cpu")

Backend = Callable[..., Any]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A compiled function."""

    function: Callable[..., Any]

    variants: Callable[[], Iterator[Inputs]]
    """Yields inputs on the CPU; the first is what it is compiled for."""

    on_cpu: Callable[..., Any] | None = None
    """What the CPU computes instead, of those on which a guarantee, or the loss, rests."""

    compile: Callable[[Backend], Callable[..., Any]] | None = None
    """Compiles it, where the package does not by `compile_kernel`."""

    def compiled(self, backend: Backend) -> Callable[..., Any]:
        """Compile it as the package does, by another backend."""
        return self.compile(backend) if self.compile else compile_kernel(self.function, backend)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def of_noise() -> Iterator[Inputs]:
    for start in STARTS:
        yield normal(POSITIONS), KEY, torch.tensor(start), torch.tensor(0.3)


def of_secure_noise() -> Iterator[Inputs]:
    for start in STARTS:
        yield KEY, torch.tensor(start), POSITIONS // 16


def of_clip() -> Iterator[Inputs]:
    for rejected in (False, True):
        gradient = normal(1, POSITIONS)[0]
        gradient[5::1000] = torch.nan if rejected else 1.0
        yield normal(POSITIONS), gradient, torch.tensor(0.37), torch.tensor(rejected)


def of_loss(dtype: torch.dtype) -> Iterator[Inputs]:
    labels = torch.arange(16) * 60
    labels[3:9] = -100
    yield 4 * normal(16, 1003, dtype=dtype), labels, torch.linspace(0.1, 1, 16)


def in_layers(function: Callable[..., Any], tensors: int) -> Case:
    """Return the case of a function within a block, of so many tensors (B, T, D) in bf16."""
    x_BTD = normal(2, 48, 256, dtype=torch.bfloat16)

    def compile_(backend: Any) -> Callable[..., Any]:
        return vars(feed_forward.Tiling.compiled(16, backend))[function.__name__]

    return Case(function, lambda: iter([(x_BTD,) * tensors]), compile=compile_)


def of_logits(dtype: torch.dtype) -> Case:
    on_cpu = loss.losses_to_gradients_
    return Case(loss._by_comparison, functools.partial(of_loss, dtype), on_cpu)


def clipped(total: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    """Add a sample as clipping means it: rounded once as a product and once as a sum, or not."""
    if not rejected:
        total += gradient * factor


def by_itself(function: Callable[..., Any], variants: Callable[[], Iterator[Inputs]]) -> Case:
    return Case(function, variants, function)


CASES = {
    "noise": by_itself(noise._add_normal, of_noise),
    "secure noise": by_itself(noise.threefry_normal_sum, of_secure_noise),
    "clip": Case(clipping._add_scaled, of_clip, clipped),
    "loss, fp32": of_logits(torch.float32),
    "loss, bf16": of_logits(torch.bfloat16),
    "swiglu": in_layers(feed_forward.swiglu, 2),
    "backward of swiglu": in_layers(feed_forward.swiglu_backward, 3),
}
"""By name. On a CPU noise has another generator, and clipping one operation of other rounding:
noise is compared with the same formulas, uncompiled, and clipping with what it means."""
