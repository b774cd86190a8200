"""How large the noise is beside what is learned, and which batch and steps make it smaller.

In a step, noise of standard deviation sigma C in each of the d trained parameters is divided by the
expected batch B, so that its norm is about sigma sqrt(d) / B, in units of C. The mean gradient that
it is added to has a norm of at most 1 in these units. Over a run of S steps gradients that agree
add up as S, and noise as sqrt(S): averaged over the run it is sigma sqrt(d) / (B sqrt(S)). That
number decides here. All of it is a heuristic: gradients lie near a few directions and noise in all
d of them, most of which change the loss little, so a model learns although the noise is longer.

`--recommend` weighs by it, at the compute asked for: batch against steps, all weights against
adapters, and independent noise against noise that is correlated over steps.
"""

import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.terms import best_of, noise_by_bands
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.ledger import RunLog
from torchtitan_dp.ledger.spending import inherited
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import trained_count
from torchtitan_dp.models.lora import lora_of
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Mechanism

DROWNS = 5.0
"""Above this much noise over the run, in C, the plan warns: of what the default model learns in 40
steps without noise it learned 70% at 4.1, 44% at 8.1 and 24% at 16. Like all constants here a
heuristic (docs/tuning.md)."""

FEWEST_STEPS = 16  # moments and learning rate need some to settle
LARGEST_RATE = 0.5  # of sampling: beyond it sampling hides hardly anything
WORTH = 0.9
"""A batch is doubled, or noise correlated, where that leaves at most this share of the noise over
the run: steps, and a step's own noise, are worth something too."""

_LOG_WIDTH = 160  # where there is no terminal that a table could be too wide for
_RANKS = (16, 8)  # of the adapters that a full run is compared with, the larger first


@dataclass(frozen=True)
class Noise:
    """The expected norm of the noise in what the optimizer is handed, in units of C."""

    in_step: float
    over_run: float  # of its mean over all steps; settings are ranked by it

    @property
    def drowns(self) -> bool:
        """Whether little can be learned, judged by this number alone."""
        return self.over_run > DROWNS

    def describe(self, trained: int, clipping: str) -> str:
        """Put the noise beside the largest signal that there can be."""
        layers = "" if clipping == "flat" else ", with every group of layers at its bound"
        return (
            f"noise: norm {self.in_step:.3g} C per step, {self.over_run:.3g} C averaged over the "
            f"run, over {trained:,} trained values; a clipped gradient's norm is at most C{layers}"
        )

    def for_programs(self) -> dict[str, float | bool]:
        numbers = {"noise_in_step": self.in_step, "noise_over_run": self.over_run}
        return {**numbers, "drowns": self.drowns}


def noise_of(*, noise_multiplier: float, trained: int, batch: float, steps: int) -> Noise:
    """Compute the noise's norm over C, of d = `trained` parameters.

    >>> noise = noise_of(noise_multiplier=0.485, trained=10**9, batch=64, steps=200)
    >>> round(noise.in_step), round(noise.over_run, 1)
    (240, 16.9)
    """
    in_step = noise_multiplier * math.sqrt(trained) / batch
    return Noise(in_step, in_step / math.sqrt(max(steps, 1)))


def noise_of_run(mechanism: Mechanism, *, trained: int, batch: float, steps: int) -> Noise:
    """Compute the same of a mechanism, whose noise may be correlated over steps."""
    in_step, in_sum = (
        noise_of(noise_multiplier=noise, trained=trained, batch=batch, steps=steps)
        for noise in mechanism.noise_of_run(max(steps, 1))
    )
    return Noise(in_step.in_step, in_sum.over_run)


SigmaOf = Callable[[int, int], float]
"""Finds the noise multiplier of a batch and steps; ValueError, one line, if there is none."""


@dataclass(frozen=True)
class Row:
    """One way to divide the same compute into a batch and steps."""

    global_batch_size: int
    steps: int
    sample_rate: float
    noise_multiplier: float

    @property
    def within_bounds(self) -> bool:  # to recommend it
        return self.steps >= FEWEST_STEPS and self.sample_rate <= LARGEST_RATE

    def noise(self, trained: int) -> Noise:
        sigma = self.noise_multiplier
        return noise_of(
            noise_multiplier=sigma, trained=trained, batch=self.global_batch_size, steps=self.steps
        )


@dataclass(frozen=True)
class Rows:
    """The rows of a compute, by rising batch, the one asked for and the one recommended."""

    rows: tuple[Row, ...]
    asked: Row
    best: Row | None  # None where no batch is within bounds
    least: float  # over the run, for one trained parameter, with all units in each step


def rows_of(
    sigma_of: SigmaOf, *, units: int, batch: int, steps: int, noise_multiplier: float
) -> Rows:
    """Work out batches of powers of two times the one asked for, batch x steps staying the same.

    The best row has the largest batch that is within bounds, and that is worth doubling to. A
    smaller batch than the one asked for is best only where that is out of bounds.

    `units` is public, or batch / sample rate; `noise_multiplier` is of the row asked for. Where
    estimated norms need a larger one, that of other rows is scaled alike, which is quick, and
    close. Raises ValueError, one line, if the target is out of the accountant's range.
    """
    asked = Row(batch, steps, batch / units, noise_multiplier)
    scale = noise_multiplier / sigma_of(batch, steps)

    @functools.cache
    def row(power: int) -> Row | None:
        if power == 0:
            return asked
        size = round(batch * 2.0**power)
        count = round(batch * steps / size) if size else 0
        if size > units or count < 1:
            return None
        try:
            sigma = scale * sigma_of(size, count)
        except ValueError:  # out of the accountants' range
            return None
        return Row(size, count, size / units, sigma)

    def is_worth(row: Row | None, doubled: Row) -> bool:
        return row is not None and doubled.noise(1).over_run <= WORTH * row.noise(1).over_run

    best = 0
    while (more := row(best + 1)) and more.within_bounds and is_worth(row(best), more):
        best += 1
    while (one := row(best)) and not one.within_bounds:
        best -= 1
    shown = [found for p in range(min(best, 0) - 1, max(best, 0) + 2) if (found := row(p))]
    least = scale * sigma_of(units, 1) / units
    return Rows(tuple(shown), asked, row(best), least)


def refuse(config: JobConfig) -> None:
    """Raise ValueError, one line, if nothing can be recommended to this run."""
    privacy = config.privacy
    if not privacy.enable:
        raise ValueError(
            "--recommend with privacy.enable = false: without noise there is nothing to weigh; "
            "leave one of the two out"
        )
    if privacy.target_epsilon is None:
        raise ValueError(
            f"--recommend with privacy.noise_multiplier = {privacy.noise_multiplier}: each batch "
            "needs the noise that keeps one promise; give it, as --privacy.noise_multiplier None "
            "--privacy.target_epsilon 8"
        )
    if RunLog(config.job.dump_folder).count:
        raise ValueError(
            f"--recommend with job.dump_folder = '{config.job.dump_folder}': the run in it has "
            "fixed its terms; name another folder to plan another run"
        )


def recommend(config: JobConfig, plan: Plan, args: ModelArgs, *, loads: bool) -> dict[str, Any]:
    """Print what is recommended, on stderr; return it for programs.

    Adapters are offered beside weights that the run `loads`, never beside drawn ones, which would
    stay random. `refuse` has let the configuration pass. Raises ValueError, one line for the user,
    if the target is out of the accountant's range.
    """
    settings, epsilon = plan.settings, config.privacy.target_epsilon
    assert epsilon is not None
    units, batch = settings.implied_units, settings.expected_batch_size
    before = inherited(plan.ledger.ancestors)

    def sigma_of(batch: int, steps: int) -> float:
        return accounting.noise_for(
            Mechanism(1.0, batch / units),
            steps,
            target_epsilon=epsilon,
            delta=settings.delta,
            accountant=settings.accountant,
            before=before,
        )

    sigma = settings.mechanism.noise_multiplier
    if settings.bands > 1 or settings.sampling == "allocation":  # rows are of Poisson sampling
        sigma = sigma_of(batch, plan.steps)
    rows = rows_of(sigma_of, units=units, batch=batch, steps=plan.steps, noise_multiplier=sigma)
    trained = {config.lora.rank: trained_count(args)}  # the own rank first
    for rank in (0,) if config.lora.rank else _RANKS if loads else ():
        other = copy.deepcopy(args)
        other.lora = lora_of(config, rank)
        trained[rank] = trained_count(other)
    rank, sentence = _recommended(config, rows, trained)
    bands, privacy = None, config.privacy
    correlates = privacy.sampling == "poisson" and not privacy.secure_noise
    if correlates and settings.mechanism.largest_share == 1:
        found = noise_by_bands(config, units, before)
        bands = bands_of(found, trained[config.lora.rank], batch, plan.steps)
    width = None if sys.stderr.isatty() else _LOG_WIDTH
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
    console.print("      the noise's norm over C, at the compute asked for:")
    console.print(Padding.indent(_table(rows, trained, units), 6))
    for line in [sentence, *([bands["reason"]] if bands else [])]:
        console.print(line, markup=False)
    best = rows.best
    return {
        "global_batch_size": best and best.global_batch_size,
        "steps": best and best.steps,
        "sample_rate": best and best.sample_rate,
        "lora_rank": rank,
        "reason": sentence,
        "bands": bands,
        "rows": [
            dataclasses.asdict(row)
            | {"noise_over_run": {_word(r): row.noise(d).over_run for r, d in trained.items()}}
            for row in rows.rows
        ],
    }


def _word(rank: int) -> str:
    return f"LoRA r = {rank}" if rank else "all weights"


def _recommended(config: JobConfig, rows: Rows, trained: dict[int, int]) -> tuple[int, str]:
    """Return the rank to train (the configuration's own, unless noise drowns only that), and the
    recommended settings in a sentence."""
    best, asked, own = rows.best, rows.asked, config.lora.rank
    if best is None:
        drawn = asked.global_batch_size * asked.steps
        return own, (
            f"recommended: none: {drawn:,} {unit_word(config)}s in all do not suffice for "
            f"{FEWEST_STEPS} steps (a heuristic); raise training.steps"
        )
    good = [rank for rank, count in trained.items() if not best.noise(count).drowns]
    rank = good[0] if good else own
    keys = f"training.global_batch_size = {best.global_batch_size}, training.steps = {best.steps}"
    if config.privacy.sample_rate is not None:
        keys += f", privacy.sample_rate = {best.sample_rate:.6g}"
    if rank != own:
        keys += f", lora.rank = {rank}"
    noise, drowns = best.noise(trained[rank]), ""
    if noise.drowns:
        drowns = f", still above {DROWNS:g} C: more records or a larger epsilon have less"
        drowns += "" if own else ", and so have adapters ([lora]) beside loaded weights"
    beside = f"where the settings asked for have {asked.noise(trained[own]).over_run:.3g} C"
    if best is asked and rank == own:
        beside = "as asked for"
    poisson = "of Poisson sampling; " if config.privacy.sampling == "allocation" else ""
    return rank, (
        f"recommended: {keys}: noise {noise.over_run:.3g} C averaged over the run, {beside}"
        f"{drowns} ({poisson}heuristics, at least {FEWEST_STEPS} steps and q at most "
        f"{LARGEST_RATE:g}: docs/tuning.md)"
    )


def _table(rows: Rows, trained: dict[int, int], units: int) -> Table:
    own, *_ = trained
    heads = ["batch", "steps", "q", "passes", "sigma", f"a step,\n{_word(own)}"]
    heads += [f"the run,\n{_word(rank)}" for rank in trained]
    table = Table(*(Column(head, justify="right") for head in heads), "")
    for row in rows.rows:
        is_best = row is rows.best
        table.add_row(
            f"{row.global_batch_size:,}",
            f"{row.steps:,}",
            f"{row.sample_rate:.3g}",
            f"{row.sample_rate * row.steps:.3g}",
            f"{row.noise_multiplier:.4g}",
            f"{row.noise(trained[own]).in_step:.3g}",
            *(f"{row.noise(count).over_run:.3g}" for count in trained.values()),
            ", ".join(["asked"] * (row is rows.asked) + ["recommended"] * is_best),
            style="bold" if is_best else None,
        )
    table.add_section()
    limits = (f"{rows.least * math.sqrt(count):.3g}" for count in trained.values())
    table.add_row(f"{units:,}", "any", "1", "", "", "", *limits, "limit")
    return table


def bands_of(
    rows: dict[int, tuple[float, float, float]], trained: int, batch: float, steps: int
) -> dict[str, Any]:
    """Return the recommended bands (1: independent noise) and why; `rows` are `noise_by_bands`'."""
    best, scale = best_of(rows), math.sqrt(trained / max(steps, 1)) / batch
    (_, own_step, own), (_, in_step, noise) = rows[1], rows[best]
    if noise > WORTH * own:
        reason = "noise correlated over steps: independent noise is as good for this run"
        return {"bands": 1, "reason": reason}
    reason = (
        f"noise correlated over steps: privacy.noise = 'banded', privacy.bands = {best}: "
        f"{scale * noise:.3g} C averaged over the run, where independent noise has "
        f"{scale * own:.3g} C; a step has {in_step / own_step:.2g} times the noise, and AdamW "
        "wants about that many times the learning rate (docs/tuning.md)"
    )
    return {"bands": best, "reason": reason}
