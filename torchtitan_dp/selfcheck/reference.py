"""Algorithm 1 of Abadi et al. 2016 as a plain loop: one process, one sample at a time.

Selfcheck and the tests compare every gradient method with it, on the samples that are made here. It
takes nothing from `gradients/` and `privacy/`: no per-sample gradient, clip group, clip factor or
sum is theirs.
"""

import copy
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.models.families import ModelArgs, family_of
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.parameters import trainable_parameters

Gradient = dict[str, Tensor]
"""A whole gradient, by canonical name of its parameters."""


def reference_model(args: ModelArgs) -> Any:
    """Build the model in one process, on the CPU, with the weights that it has on any mesh."""
    family = family_of(args)
    with torch.device("cpu"):
        model = (family.reference or family.model)(copy.deepcopy(args))
        model.init_weights()
        fill_adapters(model)
    return model


def reference_gradients(
    model: nn.Module, tokens_NT: Tensor, labels_NT: Tensor, weight_N: Tensor | None = None
) -> Iterator[Gradient]:
    """Backpropagate one sample after the other: its mean loss over its targets, times its weight.

    Yields N gradients in the model's dtype; 0 of a sample without a target.
    """
    parameters = trainable_parameters(model)
    for sample, (tokens_T, labels_T) in enumerate(zip(tokens_NT, labels_NT, strict=True)):
        model.zero_grad()
        if (labels_T != IGNORE_INDEX).any():
            loss = F.cross_entropy(model(tokens_T[None])[0], labels_T, ignore_index=IGNORE_INDEX)
            weight = 1.0 if weight_N is None else weight_N[sample].item()
            (weight * loss).backward()
        yield {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in parameters.items()
        }


def norm(gradient: Gradient) -> float:
    """Return the l2 norm over all parameters, computed in fp64."""
    return math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))


def group_names(clipping: str, patterns: Sequence[str]) -> Callable[[str], str]:
    """Return a function that names a parameter's clip group (`privacy.clipping`, its groups)."""
    if clipping == "flat":
        return lambda _: "all"
    if patterns:
        return lambda name: next(p for p in patterns if fnmatch.fnmatchcase(name, p))
    return lambda name: name.rpartition(".")[0]  # the layer


def reference_sum(
    gradients: Iterable[Gradient],
    max_grad_norm: float,
    group_of: Callable[[str], str] = lambda _: "all",
    clip_function: str = "vanilla",
) -> Gradient:
    """Clip each sample's gradient and add them up, in fp64.

    A gradient whose norm is not finite counts as 0.

    Args:
        max_grad_norm: C.
        group_of: names the clip group of a parameter. M groups are clipped to C / sqrt(M) each.
        clip_function: `privacy.clip_function`: min(1, C / norm) ("vanilla") or C / (norm + 0.01).
    """
    total: Gradient = {}
    for gradient in gradients:
        if not math.isfinite(norm(gradient)):
            continue
        groups: dict[str, Gradient] = {}
        for name, g in gradient.items():
            groups.setdefault(group_of(name), {})[name] = g
        C = max_grad_norm / math.sqrt(len(groups))
        for group in groups.values():
            vanilla = clip_function == "vanilla"
            factor = C / max(norm(group), C) if vanilla else C / (norm(group) + 0.01)
            for name, g in group.items():
                total[name] = total.get(name, 0) + factor * g.double()
    return total


def relative_error(actual: Gradient, expected: Gradient) -> float:
    """Return the l2 norm of the difference of all tensors together, over that of `expected`."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    off = {name: actual[name].double() - e.double() for name, e in expected.items()}
    return norm(off) / norm(expected)


def rounding(dtype: torch.dtype) -> float:
    """Return the largest share by which a step in `dtype` may differ from one in fp64.

    fp32: 1e-5, a hundred times its rounding. bf16: 2^-6, four times the distance of two of its
    numbers (2^-8), since each of the dozen products of a layer rounds to it.
    """
    return {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]


class Samples(NamedTuple):
    """A step's samples: N of T tokens, the same on all ranks."""

    tokens_NT: Tensor
    labels_NT: Tensor
    weight_N: Tensor  # fp32: of each sample's loss


# The first sample is not clipped, the second is, the third is small, the fourth is NaN (it must
# count as 0), and the rest are as they come.
_WEIGHTS = (1.0, 8.0, 0.125, math.nan, 1.0, 2.0)


def make_samples(args: ModelArgs, count: int, seed: int = 0) -> Samples:
    """Make samples as long as a model's longest, with targets in different parts: an early end, an
    answer at the end, and none."""
    T, generator = args.max_seq_len, torch.Generator().manual_seed(seed)
    tokens_NT, labels_NT = (
        torch.randint(0, args.vocab_size, (count, T), generator=generator) for _ in range(2)
    )
    targets = ((0, T // 5), (0, T), (0, T - 3), (0, T // 2), (0, 0), (T - T // 4, T))
    for row in range(count):
        start, end = targets[row % len(targets)]
        labels_NT[row, :start] = labels_NT[row, end:] = IGNORE_INDEX
    weights = (_WEIGHTS + (1.0,) * count)[:count]
    return Samples(tokens_NT, labels_NT, torch.tensor(weights))


def take(tokens_NT: Tensor, labels_NT: Tensor, slot_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a microbatch; slot -1 is padding."""
    padding_B1 = (slot_B < 0)[:, None]
    tokens_BT = tokens_NT[slot_B].masked_fill(padding_B1, 0)
    return tokens_BT, labels_NT[slot_B].masked_fill(padding_B1, IGNORE_INDEX)
