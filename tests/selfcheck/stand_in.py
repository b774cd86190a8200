"""The selfcheck of a GPU, on a CPU: what CUDA compiles takes the place of what a CPU runs.

    torchrun … tests/selfcheck/stand_in.py [arguments of the selfcheck]

Four kernels are compiled on CUDA alone. Dynamo's guards, and its limit on the graphs of a function
(`torch._dynamo.config.recompile_limit`), do not depend on the device: with the backend `aot_eager`
they are those of CUDA. Rank 0 writes the number of graphs of each function to `STAND_IN_COUNTS`.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from torchtitan_dp.models import loss, loss_head
from torchtitan_dp.privacy import clipping, noise, secure_noise
from torchtitan_dp.privacy.kernels import compile_kernel

COUNTS: Counter[str] = Counter()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as CUDA's code does, and count the graphs."""

    def backend(graph: Any, inputs: Any) -> Any:
        COUNTS[function.__name__] += 1
        return aot_eager(graph, inputs)

    return compile_kernel(function, backend)


ADD_SCALED = compiled(clipping._add_scaled)
ADD_NORMAL = compiled(noise._add_normal)
NORMAL_SUM = compiled(secure_noise.threefry_normal_sum)
BY_COMPARISON = compiled(loss._by_comparison)


@torch.library.custom_op("stand_in::add_scaled_", mutates_args=("accumulator",))
def add_scaled_(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    clipping._add_rows(ADD_SCALED, accumulator, gradient, factor, rejected)


@torch.library.custom_op("stand_in::losses_to_gradients_", mutates_args=("logits_NV",))
def losses_to_gradients_(logits_NV: Tensor, labels_N: Tensor, scale_N: Tensor) -> Tensor:
    return BY_COMPARISON(logits_NV, labels_N, scale_N)


def words(key: bytes) -> Tensor:
    """A key of the right size for the cipher of CUDA."""
    return torch.from_numpy(np.frombuffer(key[:16], dtype=np.int32).copy())


def add_noise(flat: Tensor, std: float, key: bytes, start: int) -> None:
    size, scale = noise._COMPILED_CHUNK, torch.full((), std)
    firsts = noise.chunk_starts(flat, start, size)
    for part, first in zip(flat.split(size), firsts, strict=True):
        ADD_NORMAL(part, words(key), first, scale)


def add_secure_noise(flat: Tensor, add: Any, key: bytes, start: int) -> None:
    size = secure_noise._CHUNK
    firsts = secure_noise.chunk_starts(flat, start, size)
    for part, first in zip(flat.split(size), firsts, strict=True):
        add(part, NORMAL_SUM(words(key), first, part.numel()))


def install() -> None:
    """Put CUDA's paths in the place of the CPU's."""
    clipping._add_scaled_ = add_scaled_  # type: ignore[assignment]
    noise._add_philox = add_noise
    secure_noise._add_philox = add_secure_noise
    for module in (loss, loss_head):
        module.losses_to_gradients_ = losses_to_gradients_  # type: ignore[attr-defined]


if __name__ == "__main__":
    from torchtitan_dp.selfcheck.__main__ import main

    install()
    try:
        main(sys.argv[1:])
    finally:
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["STAND_IN_COUNTS"], "w", encoding="ascii") as file:
                json.dump(COUNTS, file)
