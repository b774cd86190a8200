"""Made-up samples, and the plain loop over them, in fp64 on the CPU, that machines are held to."""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_dp.models.families import ModelArgs, family_of
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.privacy.clip_groups import clip_groups
from torchtitan_dp.privacy.settings import Privacy

# What each sample's loss is multiplied by: the first is not clipped, the second is, the third is
# small, one is no number (it must count nothing), and the rest are as they come.
_WEIGHTS = (1.0, 8.0, 0.125, math.nan, 1.0, 2.0)


@dataclass(frozen=True)
class Samples:
    """Holds a step's samples: N of T tokens, the same on all ranks."""

    tokens_NT: torch.Tensor
    labels_NT: torch.Tensor
    weight_N: torch.Tensor  # fp32: of each sample's loss

    def __len__(self) -> int:
        return len(self.tokens_NT)

    def take(self, slot_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, labels and weights of some samples; slot -1 is padding."""
        padding_B = slot_B < 0
        return (
            self.tokens_NT[slot_B].masked_fill(padding_B[:, None], 0),
            self.labels_NT[slot_B].masked_fill(padding_B[:, None], IGNORE_INDEX),
            self.weight_N[slot_B].masked_fill(padding_B, 1.0),
        )


def make_samples(args: ModelArgs, *, ranks: int, seed: int = 0) -> Samples:
    """Make samples of several lengths, one of them without a target.

    Args:
        ranks: of data parallelism: there are more samples than these, so that some are padded.
    """
    N, T = len(_WEIGHTS) + ranks, args.max_seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens_NT, labels_NT = (
        torch.randint(0, args.vocab_size, (N, T), generator=generator) for _ in range(2)
    )
    for row in range(N):
        end = (T, T - 3, T // 5, T // 2, 0)[row % 5]
        labels_NT[row, end:] = IGNORE_INDEX
    weights = (*_WEIGHTS, *[1.0] * ranks)
    return Samples(tokens_NT, labels_NT, torch.tensor(weights))


@dataclass(frozen=True)
class Reference:
    """Holds what the plain loop finds."""

    max_grad_norm: float  # C, by which some samples are clipped and some are not
    norms: list[float]  # of each sample's whole gradient; NaN where its loss is
    total: dict[str, torch.Tensor]  # the clipped sum, fp64, by name

    @property
    def values(self) -> int:
        return sum(g.numel() for g in self.total.values())


def reference_sum(args: ModelArgs, samples: Samples, privacy: Privacy) -> Reference:
    """Clip the gradient of one sample after the other, as Algorithm 1 says, and add them up.

    Args:
        privacy: what is clipped together, and how.
    """
    with torch.device("cpu"):
        model = family_of(args).model(copy.deepcopy(args))
        model.init_weights()
        fill_adapters(model)
    model.double()
    parameters = trainable_parameters(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms: list[float] = []
    for tokens_T, labels_T, weight in zip(
        samples.tokens_NT, samples.labels_NT, samples.weight_N.tolist(), strict=True
    ):
        model.zero_grad()
        if (labels_T == IGNORE_INDEX).all():
            norms.append(0.0)
            continue
        logits_TV = model(tokens_T[None])[0]
        (weight * F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX)).backward()
        gradient = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradient.values()]).norm().item()
        norms.append(norm)
        if not math.isfinite(norm):
            continue
        groups = clip_groups(gradient, 1.5 * norms[0], privacy.clipping, privacy.clipping_groups)
        for names in groups.members:
            part = torch.stack([gradient[name].norm() for name in names]).norm().item()
            vanilla, C = privacy.clip_function == "vanilla", groups.bound
            factor = C / max(part, C) if vanilla else C / (part + 0.01)
            for name in names:
                total[name].add_(gradient[name], alpha=factor)
    return Reference(1.5 * norms[0], norms, total)


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Measure the difference of two sets of tensors in l2, over the size of the second."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    square = sum((actual[n].double() - e.double()).square().sum() for n, e in expected.items())
    size = sum(e.double().square().sum() for e in expected.values())
    return math.sqrt(square / size)


def rounding(dtype: torch.dtype) -> float:
    """Return how far a step in `dtype` may be from fp64, as a share.

    fp32: 1e-5, a hundred times its rounding. bf16: 2^-6, four times the distance of two of its
    numbers (2^-8), since each of the dozen products of a layer rounds to it.
    """
    return {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
