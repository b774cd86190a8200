"""What a step is expected to take: microbatches, tokens, floating-point operations.

FLOPs are those of matrix products and of attention, as kernels compute them. A causal mask halves
attention, and flash attention computes the scores again in backward. (TorchTitan's own count, of
which it logs the `mfu(%)`, halves nothing, computes nothing again and leaves out tied outputs.)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.nn as nn
from scipy import special

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.flavors import skeleton


class Weights(NamedTuple):
    """Values of the matrices that every token is multiplied with."""

    trained: int
    all: int


class SampleFlops(NamedTuple):
    """The FLOPs of one sample's forward and backward pass, on all its ranks together."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class StepCost:
    """The expected cost of one step, over the draw."""

    microbatches_per_step: float  # of each data-parallel rank
    tokens_per_step: float  # at most: with all padding to seq_len
    flops_per_step: float  # as computed, recomputation included
    flops_per_sample: float  # of all its windows
    attention_share: float  # of these
    recomputes: bool

    def describe(self) -> str:
        included = ", recomputation included" if self.recomputes else ""
        return (
            f"expected per step: {self.microbatches_per_step:.1f} microbatches per data-parallel "
            f"rank, {self.tokens_per_step:,.0f} tokens at most, {self.flops_per_step:.3g} FLOPs "
            f"({self.flops_per_sample:.3g} a sample{included})"
        )


def step_cost(config: JobConfig, args: ModelArgs, *, records: int, rate: float) -> StepCost:
    """Work out the cost of a step that draws each of `records` with probability `rate`."""
    seq_len, windows = config.training.seq_len, config.data.windows_per_draw
    dp_replicate, dp_shard, _ = mesh_degrees(config)
    slots = dp_replicate * dp_shard * config.training.local_batch_size
    microbatches = expected_rounds(records, rate, slots)
    samples = microbatches * slots  # empty slots are computed too
    of_window = flops_of(config, args)
    sample = windows * of_window.total
    flops = samples * sample
    return StepCost(
        microbatches,
        samples * windows * seq_len,
        flops,
        sample,
        of_window.attention / of_window.total,
        _recomputes(config),
    )


def flops_of(config: JobConfig, args: ModelArgs) -> SampleFlops:
    """Count the FLOPs of a sample of the configured length, with one backward pass.

    A product takes 2 FLOPs a value and token; in backward another 2 for the gradient of its input,
    and 2 for that of its weight, where that is trained. Attention takes two products of T x T / 2
    scores, and five in backward. All that blocks compute forward is computed once more if it is
    recomputed. Not counted are ghost norms, a second pass, and what `selective` checkpointing
    recomputes; what checkpointing and adapters of the first block spare is counted (less than a
    hundredth of a model of many layers).
    """
    blocks, output = weights_of(args)
    tokens, again = config.training.seq_len, 1 if _recomputes(config) else 0
    of_blocks = (4 + 2 * again) * blocks.all + 2 * blocks.trained
    of_output = 4 * output.all + 2 * output.trained
    # A window of w: w scores of each query but the first w.
    seen = (min(window or tokens, tokens) for window in args.windows())
    scores = sum(w * (tokens - w / 2) for w in seen)
    attention = 2 * args.n_heads * args.head_dim * scores * (2 * (1 + again) + 5)
    return SampleFlops(tokens * (of_blocks + of_output), attention)


def _recomputes(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "full"


def weights_of(args: ModelArgs) -> tuple[Weights, Weights]:
    """Count the values of a model's matrices: of all blocks, and of the output layer. Embeddings
    are looked up, which takes no product."""
    model = skeleton(args)

    # Experts are matrices in one tensor, of which a token takes some. Their biases have two
    # dimensions, too.
    shares = {2: 1.0, 3: args.share_of_experts}

    def count(parameters: Iterable[tuple[str, nn.Parameter]]) -> Weights:
        matrices = [p for name, p in parameters if p.dim() in shares and not name.endswith("bias")]
        sizes = [(int(shares[p.dim()] * p.numel()), p.requires_grad) for p in matrices]
        trained = sum(size for size, is_trained in sizes if is_trained)
        return Weights(trained, sum(size for size, _ in sizes))

    return count(model.layers.named_parameters()), count([("weight", model.output.weight)])


def expected_rounds(records: int, rate: float, slots: int) -> float:
    """Compute E ceil(n / slots) for n ~ Binomial(records, rate).

    >>> expected_rounds(10, 1.0, 4)
    3.0
    """
    mean, deviation = records * rate, math.sqrt(records * rate * (1 - rate))
    first, last = int(mean - 12 * deviation - 1), int(mean + 12 * deviation + 1)
    certain = max(first, 0) // slots  # rounds; another one follows where n exceeds what they hold
    full = np.arange(certain, min(last, records) // slots + 1) * slots
    return certain + float(special.bdtrc(full, records, rate).sum())
