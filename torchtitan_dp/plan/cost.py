"""What a step is expected to take: microbatches, tokens, floating-point operations."""

import math
from dataclasses import dataclass

import numpy as np

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.models.families import ModelArgs, on_meta


@dataclass(frozen=True)
class StepCost:
    """The expected cost of one step, over the draw."""

    microbatches_per_step: float  # of each data-parallel rank
    tokens_per_step: float  # padding included
    flops_per_step: float  # of the model, forward and backward, without recomputation
    seconds_per_step: float | None  # an estimate, at the rate that was stated
    steps: int

    def describe(self) -> str:
        """Put the cost into words, for people."""
        step = (
            f"expected per step: {self.microbatches_per_step:.1f} microbatches per data-parallel "
            f"rank, {self.tokens_per_step:,.0f} tokens, {self.flops_per_step:.3g} FLOPs"
        )
        if self.seconds_per_step is None:
            return step
        hours = self.seconds_per_step * self.steps / 3600
        return (
            f"{step}; at the stated rate about {self.seconds_per_step:.3g} s, {hours:.3g} h in all"
        )


def step_cost(
    config: JobConfig, args: ModelArgs, *, records: int, rate: float, tflops: float | None = None
) -> StepCost:
    """Work out the cost of a step that draws each of `records` with probability `rate`; `tflops`
    is what each device sustains, in TFLOP/s."""
    seq_len = config.training.seq_len
    dp_replicate, dp_shard, cp = mesh_degrees(config)
    slots = dp_replicate * dp_shard * config.training.local_batch_size
    microbatches = expected_rounds(records, rate, slots)
    # Empty slots are computed too.
    tokens = microbatches * slots * config.data.windows_per_draw * seq_len
    _, flops_per_token = args.get_nparams_and_flops(on_meta(args), seq_len)
    flops, seconds = tokens * flops_per_token, None
    if tflops is not None:
        # With full activation checkpointing the forward pass counts twice.
        computed = flops * (4 / 3 if config.activation_checkpoint.mode == "full" else 1)
        seconds = computed / (tflops * 1e12 * dp_replicate * dp_shard * cp)
    return StepCost(microbatches, tokens, flops, seconds, config.training.steps)


def expected_rounds(records: int, rate: float, slots: int) -> float:
    """Compute E ceil(n / slots) for n ~ Binomial(records, rate).

    >>> expected_rounds(10, 1.0, 4)
    3.0
    """
    from scipy import stats  # a second to import

    mean, deviation = records * rate, math.sqrt(records * rate * (1 - rate))
    first, last = int(mean - 12 * deviation - 1), int(mean + 12 * deviation + 1)
    n = np.arange(max(first, 0), min(last, records) + 1)
    return float((stats.binom.pmf(n, records, rate) * np.ceil(n / slots)).sum())
