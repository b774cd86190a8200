"""Algorithm 1 of Abadi et al. 2016 as a plain loop: one process, one sample at a time.

Selfcheck and the tests compare every gradient method with it, on the samples that are made here. It
takes nothing from `gradients/` and `privacy/`: no per-sample gradient, clip group, clip factor or
sum is theirs.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.models.causal_lm.model import Eager
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.parameters import trainable_parameters

Gradient = dict[str, Tensor]
"""A whole gradient, by canonical name of its parameters."""

Samples = tuple[Tensor, Tensor, Tensor]
"""A step's N samples of T tokens, the same on all ranks: int64 (N, T) tokens and labels, and the
fp32 weight of each sample's loss."""


class Reference(NamedTuple):
    """Made-up samples and the loop's results on them, in fp64 on the CPU."""

    samples: Samples
    norms: list[float]  # of each sample's whole gradient; NaN where its loss is
    max_grad_norm: float  # C, such that some samples are clipped and some are not
    total: Gradient  # the clipped sum


_known: dict[str, Reference] = {}  # shared by all methods that must agree with one


def reference_of(args: ModelArgs, count: int, privacy: Any) -> Reference:
    """Return the results on `count` samples, clipped as the section `[privacy]` has it."""
    key = repr((args, count, privacy.clipping, privacy.clip_function))
    if key not in _known:
        samples = make_samples(args, count)
        loop = reference_model(args).double(), *samples
        # Twice, because the gradients of all samples together are many times the model.
        norms = [norm(gradient) for gradient in reference_gradients(*loop)]
        C, group_of = 1.5 * norms[0], group_names(privacy.clipping)
        total = reference_sum(reference_gradients(*loop), C, group_of, privacy.clip_function)
        _known[key] = Reference(samples, norms, C, total)
    return _known[key]


def reference_model(args: ModelArgs) -> Any:
    """Build transformers' own model in one process, on the CPU, with our weights of any mesh."""
    with torch.device("cpu"):
        model = Eager(copy.deepcopy(args))
        model.init_weights()
        fill_adapters(model)
    return model


def reference_gradients(
    model: nn.Module, tokens_NT: Tensor, labels_NT: Tensor, weight_N: Tensor
) -> Iterator[Gradient]:
    """Yield N gradients, in the model's dtype: of each sample's mean loss over its targets, times
    its weight; 0 of one without a target."""
    parameters = trainable_parameters(model)
    for tokens_T, labels_T, weight in zip(tokens_NT, labels_NT, weight_N, strict=True):
        logits_TV, targets = model(tokens_T[None])[0], (labels_T != IGNORE_INDEX).sum().clamp(min=1)
        loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")
        grads = torch.autograd.grad(weight.item() * loss / targets, [*parameters.values()])
        yield dict(zip(parameters, grads, strict=True))


def norm(gradient: Gradient) -> float:
    """Return the l2 norm over all parameters, computed in fp64."""
    return math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))


def group_names(clipping: str) -> Callable[[str], str]:
    """Return a function that names a parameter's clip group (`privacy.clipping`)."""

    def group_of(name: str) -> str:
        parts = name.split(".")
        numbered = [place for place, part in enumerate(parts) if part.isdigit()]
        if clipping == "per_block" and numbered:
            return ".".join(parts[: numbered[0] + 1])
        return "all" if clipping == "flat" else ".".join(parts[:-1])

    return group_of


def reference_sum(
    gradients: Iterable[Gradient],
    max_grad_norm: float,
    group_of: Callable[[str], str] = lambda _: "all",
    clip_function: str = "vanilla",
) -> Gradient:
    """Clip each sample's gradient and add them up, in fp64; one whose norm is not finite counts as
    0. M groups, which `group_of` names, are clipped to C / sqrt(M) each, by min(1, C / norm)
    ("vanilla") or C / (norm + 0.01)."""
    total: Gradient = {}
    for gradient in gradients:
        if not math.isfinite(norm(gradient)):
            continue
        groups: dict[str, Gradient] = {}
        for name, g in gradient.items():
            groups.setdefault(group_of(name), {})[name] = g
        C = max_grad_norm / math.sqrt(len(groups))
        for group in groups.values():
            size = norm(group)
            factor = C / {"vanilla": max(size, C), "automatic": size + 0.01}[clip_function]
            for name, g in group.items():
                total[name] = total.get(name, 0) + factor * g.double()
    return total


def relative_error(actual: Gradient, expected: Gradient) -> float:
    """Return the l2 norm of the difference of all tensors together, over that of `expected`."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    off = {name: actual[name].double() - e.double() for name, e in expected.items()}
    return norm(off) / norm(expected)


def rounding(dtype: torch.dtype) -> float:
    """Return the largest share by which a step in `dtype` may differ from one in fp64: in fp32 a
    hundred times its rounding; in bf16 four times the distance of two of its numbers (2^-8), since
    each of the dozen products of a layer rounds to it."""
    return {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]


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
    # One target at least; that of a first token alone has no gradient of queries.
    early, late, half = (max(end, min(T, 2)) for end in (T // 5, T - 3, T // 2))
    targets = ((0, early), (0, T), (0, late), (0, half), (0, 0), (T - T // 4, T))
    for row in range(count):
        start, end = targets[row % len(targets)]
        labels_NT[row, :start] = labels_NT[row, end:] = IGNORE_INDEX
    return tokens_NT, labels_NT, torch.tensor((_WEIGHTS + (1.0,) * count)[:count])
