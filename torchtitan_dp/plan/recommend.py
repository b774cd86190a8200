"""The plan's noise line and warning, and the table of `--recommend`."""

import copy
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import ExecutedSteps
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.ledger.terms import Plan
from torchtitan_dp.models.families import ModelArgs, trained_count, without_lora
from torchtitan_dp.models.lora import LoRA
from torchtitan_dp.plan.signal import (
    DROWNS,
    FEWEST_STEPS,
    Noise,
    Rows,
    Target,
    noise_of,
    rows_of,
)

_LOG_WIDTH = 160  # where there is no terminal that a table could be too wide for
_TITLE = (  # a table's own is cut to its width
    "      noise norm / C at equal compute: in one step, and averaged over the run"
)
_RANKS = (16, 8)  # of the adapters that a full run is compared with, the larger first


def plan_noise(plan: Plan, trained: int) -> Noise:
    """Return the noise of a run with all its steps on the current terms."""
    settings = plan.settings
    return noise_of(
        noise_multiplier=settings.noise_multiplier,
        trained=trained,
        batch=settings.expected_batch_size,
        steps=plan.steps,
    )


def noise_line(noise: Noise, settings: Settings, trained: int) -> str:
    """Compare the noise with the largest possible gradient, in one line."""
    per_layer = settings.clipping.startswith("per_layer")
    most = "C, reached if every clip group is at its bound" if per_layer else "C"
    return (
        f"noise: {noise.in_step:.3g} C in a step, {noise.over_run:.3g} C averaged over the run, "
        f"over {trained:,} trained parameters; the mean gradient's norm is at most {most}"
    )


def noise_warning(noise: Noise) -> str | None:
    """Return a one-line warning if the noise is above `DROWNS`."""
    if not noise.drowns:
        return None
    return (
        f"noise averaged over the run is {noise.over_run:.3g} C, above {DROWNS:g} C (a heuristic): "
        "training may learn little; python -m torchtitan_dp.plan … --recommend compares batch "
        "sizes, steps and, for loaded weights, adapters"
    )


def refuse(config: JobConfig) -> None:
    """Raise ValueError if nothing can be recommended for this configuration."""
    privacy = config.privacy
    if not privacy.enable:
        raise ValueError(
            "--recommend with privacy.enable = false: there is no noise to compare; omit one of "
            "the two"
        )
    if privacy.target_epsilon is None:
        raise ValueError(
            f"--recommend with privacy.noise_multiplier = {privacy.noise_multiplier}: batch sizes "
            "are compared at one epsilon; set --privacy.noise_multiplier None "
            "--privacy.target_epsilon 8"
        )
    if ExecutedSteps(config.job.dump_folder).count:
        raise ValueError(
            f"--recommend with job.dump_folder = '{config.job.dump_folder}': the run in it has "
            "fixed its terms; to plan another run, name another folder"
        )


@dataclass(frozen=True)
class Variant:
    """A choice of trained parameters: all weights, or adapters of one rank."""

    rank: int  # of adapters; 0: all weights
    trained: int

    def __str__(self) -> str:
        return f"LoRA r = {self.rank}" if self.rank else "all weights"


@dataclass(frozen=True)
class Recommendation:
    """Splits of one compute budget into batch and steps, and the recommended one."""

    rows: Rows
    own: Variant  # what the configuration trains
    others: tuple[Variant, ...]
    units: int
    rate_is_set: bool  # by `privacy.sample_rate`, which another batch must change too

    @property
    def variant(self) -> Variant:
        """The recommended trained parameters: the configuration's own, unless only others have
        noise below `DROWNS`."""
        best = self.rows.best
        if best is None or not best.noise(self.own.trained).drowns:
            return self.own
        good = [v for v in self.others if not best.noise(v.trained).drowns]
        return good[0] if good else self.own

    def summary(self) -> str:
        """Name the recommended settings in one line."""
        best = self.rows.best
        if best is None:
            return f"recommended: none, with fewer than {FEWEST_STEPS} steps; raise training.steps"
        rate = f", privacy.sample_rate = {best.sample_rate:.6g}" if self.rate_is_set else ""
        rank = "" if self.variant == self.own else f", lora.rank = {self.variant.rank}"
        return (
            f"recommended: training.global_batch_size = {best.batch}, training.steps = "
            f"{best.steps}{rate}{rank} (a heuristic: docs/tuning.md)"
        )

    def table(self) -> Table:
        """Build the table; its last row is the limit with all units in each step."""
        variants = (self.own, *self.others)
        heads = ["batch", "steps", "q", "passes", "sigma", f"a step,\n{self.own}"]
        heads += [f"the run,\n{variant}" for variant in variants]
        table = Table(
            *(Column(head, justify="right") for head in heads),
            "",
        )
        for row in self.rows.rows:
            marks = [
                word
                for word, here in (("asked", self.rows.asked), ("recommended", self.rows.best))
                if here is row
            ]
            table.add_row(
                f"{row.batch:,}",
                f"{row.steps:,}",
                f"{row.sample_rate:.3g}",
                f"{row.passes:.3g}",
                f"{row.noise_multiplier:.4g}",
                f"{row.noise(self.own.trained).in_step:.3g}",
                *(f"{row.noise(v.trained).over_run:.3g}" for v in variants),
                ", ".join(marks),
                style="bold" if row is self.rows.best else None,
            )
        limits = (f"{self.rows.least_noise(v.trained):.3g}" for v in variants)
        table.add_section()
        table.add_row(f"{self.units:,}", "any", "1", "", "", "", *limits, "limit")
        return table

    def show(self) -> None:
        """Print the table and the recommended settings on stderr."""
        width = None if sys.stderr.isatty() else _LOG_WIDTH
        console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
        table = Padding.indent(self.table(), 6)
        console.print(_TITLE, table, self.summary(), sep="\n", markup=False)

    def for_programs(self) -> dict[str, Any]:
        """Return the recommendation for the plan's JSON."""
        best = self.rows.best
        return {
            "global_batch_size": best and best.batch,
            "steps": best and best.steps,
            "sample_rate": best and best.sample_rate,
            "lora_rank": self.variant.rank,
            "reason": self.summary(),
            "rows": [
                {
                    "global_batch_size": row.batch,
                    "steps": row.steps,
                    "sample_rate": row.sample_rate,
                    "noise_multiplier": row.noise_multiplier,
                    "noise_over_run": {
                        str(v): row.noise(v.trained).over_run for v in (self.own, *self.others)
                    },
                }
                for row in self.rows.rows
            ],
        }


def recommend(config: JobConfig, plan: Plan, args: ModelArgs, start: Start) -> Recommendation:
    """Compare batch sizes, and all weights with adapters, at the configured compute.

    Adapters are compared for loaded weights only: frozen random weights would stay random.

    Args:
        config: accepted by `refuse`.
        start: how the run starts.

    Raises:
        ValueError: the target is out of the accountant's range.
    """
    settings, epsilon = plan.settings, config.privacy.target_epsilon
    assert epsilon is not None
    units = settings.implied_units
    target = Target(
        epsilon, settings.delta, settings.accountant, units, tuple(plan.ledger.before())
    )
    rows = rows_of(
        target,
        batch=settings.expected_batch_size,
        steps=plan.steps,
        noise_multiplier=settings.noise_multiplier,
    )
    ranks = (0,) if config.lora.rank else _RANKS if start.loads else ()
    others = tuple(Variant(rank, trained_count(_with_rank(config, args, rank))) for rank in ranks)
    own = Variant(config.lora.rank, trained_count(args))
    rate_is_set = config.privacy.sample_rate is not None
    return Recommendation(rows, own, others, units, rate_is_set)


def _with_rank(config: JobConfig, args: ModelArgs, rank: int) -> ModelArgs:
    """Return the arguments with adapters of another rank, or without."""
    if rank == 0:
        return without_lora(args)
    args = copy.deepcopy(args)
    args.lora = LoRA(rank, config.lora.alpha, tuple(config.lora.targets))
    return args
