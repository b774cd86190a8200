"""What steps of the longest samples take, as a table of the plans' page: FLOPs and hours."""

from dataclasses import dataclass

from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.families import ModelArgs
from torchtitan_dp.plan.cost import StepCost, step_cost

LONG = 262_144  # tokens a sample
PEAK_TFLOPS = 989.0  # of an H100 SXM, bf16, dense
SHARE = 0.4  # of the peak, that a run sustains
_MANY = 1000  # times as many records as a step draws on average

INTRODUCTION = f"""
## What long steps take

Configurations of at least {LONG:,} tokens a sample. Every number is a **prediction**, of no
measured rate: hours are those of {SHARE:.0%} of {PEAK_TFLOPS:g} TFLOP/s a rank, the peak of an H100
SXM in bf16 without sparsity. FLOPs are those of matrix products and of attention as kernels compute
them: half of T² scores under the causal mask, computed again in flash attention's backward; what
activation checkpointing recomputes is included. "samples" is the mean of a step's draw,
`training.global_batch_size`; the run has `training.steps`. At another rate:
`python -m torchtitan_dp.plan --job.config_file FILE --tflops F`.

By the same count, TRL's measured 380 s a sample of 1,048,576 tokens (Qwen3-8B, above) are half of
the peak of its 8 H100.

| configuration | ranks | tokens | FLOPs of a sample | of it attention | samples a step | FLOPs of a step | hours of a step | steps | **hours of the run** |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501  a table's row


@dataclass(frozen=True)
class LongStep:
    """A configuration on so many ranks."""

    name: str
    ranks: int
    seq_len: int
    samples: int
    cost: StepCost

    @classmethod
    def of(cls, name: str, config: JobConfig, args: ModelArgs, ranks: int) -> "LongStep":
        """Predict it, where records are many."""
        samples = config.training.global_batch_size
        rate = SHARE * PEAK_TFLOPS
        cost = step_cost(config, args, records=_MANY * samples, rate=1 / _MANY, tflops=rate)
        return cls(name, ranks, config.training.seq_len, samples, cost)

    def row(self) -> str:
        """Write a row of the table that `INTRODUCTION` begins."""
        cost = self.cost
        assert cost.seconds_per_step is not None, "a rate was stated"
        hours = cost.seconds_per_step / 3600
        cells = [
            f"`{self.name}`",
            f"{self.ranks}",
            f"{self.seq_len:,}",
            f"{cost.flops_per_sample:.2e}",
            f"{cost.attention_share:.0%}",
            f"{self.samples:,}",
            f"{cost.flops_per_step:.2e}",
            f"{hours:,.1f}",
            f"{cost.steps}",
            f"**{hours * cost.steps:,.0f}**",
        ]
        return f"| {' | '.join(cells)} |"


def section(steps: list[LongStep]) -> str:
    """Write the section on steps of long samples, the same one once."""
    rows = {step.row(): None for step in steps if step.seq_len >= LONG}
    return INTRODUCTION + "\n".join(rows) + "\n"
