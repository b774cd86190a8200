"""What `--recommend` weighs: batch against steps, all weights against adapters, bands of noise that
is correlated over steps, and samplings; each as a table, a sentence and JSON."""

import copy
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.checkpoint.terms import best_of, noise_by_bands, shares_of_steps
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.ledger import RunLog
from torchtitan_dp.ledger.spending import inherited
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.flavors import trained_count
from torchtitan_dp.models.lora import lora_of
from torchtitan_dp.plan.samplings import Samplings, weigh_samplings
from torchtitan_dp.plan.signal import DROWNS, FEWEST_STEPS, LARGEST_RATE, Rows, Target, rows_of

_LOG_WIDTH = 160  # where there is no terminal that a table could be too wide for
_TITLE = (  # a table's own is cut to its width
    "      the noise's norm over C, at the compute asked for: in a step, and averaged over the run"
)
_BANDS = "      the same, with noise correlated over steps, at the batch and steps asked for"
_RANKS = (16, 8)  # of the adapters that a full run is compared with, the larger first

WORTH_BANDS = 0.9
"""Correlated noise is recommended where it leaves at most this share of the noise in the exported
weights, a heuristic: a single step is noisier, and the learning rate has to be found anew."""


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


def _table(heads: list[str], rows: Iterable[tuple[list[str], bool, bool]]) -> Table:
    """Tabulate rows: cells, whether it is the one asked for, and the one recommended."""
    table = Table(*(Column(head, justify="right") for head in heads), "")
    for cells, asked, best in rows:
        marks = ["asked"] * asked + ["recommended"] * best
        table.add_row(*cells, ", ".join(marks), style="bold" if best else None)
    return table


@dataclass(frozen=True)
class Variant:
    """A set of trained parameters: all weights, or adapters."""

    rank: int  # of adapters; 0: all weights
    trained: int

    def __str__(self) -> str:
        return f"LoRA r = {self.rank}" if self.rank else "all weights"


@dataclass(frozen=True)
class Bands:
    """Noise by the number of bands, for the batch and steps that were asked for."""

    rows: dict[int, tuple[float, float, float]]  # `noise_by_bands`
    asked: int
    scale: float  # of noise over C to its norm in the mean gradient, of a step
    steps: int

    @property
    def best(self) -> int:
        """The bands that are recommended; 1 where independent noise is as good."""
        best = best_of(self.rows)
        return best if self.rows[best][2] <= WORTH_BANDS * self.rows[1][2] else 1

    def over_run(self, bands: int) -> float:  # of independent noise that leaves as much, averaged
        return self.rows[bands][2] * self.scale / math.sqrt(self.steps)

    def sentence(self) -> str:
        """Return the recommended bands, and what they change."""
        if self.best == 1:
            return "noise correlated over steps: independent noise is as good for this run"
        noise = self.rows[self.best][1] / self.rows[1][1]
        return (
            f"noise correlated over steps: privacy.noise = 'banded', privacy.bands = {self.best}: "
            f"{self.over_run(self.best):.3g} C averaged over the run, where independent noise has "
            f"{self.over_run(1):.3g} C; a step has {noise:.2g} times the noise, and AdamW wants "
            "about that many times the learning rate (docs/tuning.md)"
        )

    def table(self) -> Table:
        rows = (
            (
                [f"{n}", f"{sigma:.4g}", f"{in_step * self.scale:.3g}", f"{self.over_run(n):.3g}"],
                n == self.asked,
                n == self.best,
            )
            for n, (sigma, in_step, _) in self.rows.items()
        )
        return _table(["bands", "sigma", "a step", "the run"], rows)

    def for_programs(self) -> dict[str, Any]:
        return {
            "bands": self.best,
            "reason": self.sentence(),
            "rows": [
                {"bands": bands, "noise_multiplier": sigma, "noise_over_run": self.over_run(bands)}
                for bands, (sigma, *_) in self.rows.items()
            ],
        }


@dataclass(frozen=True)
class Recommendation:
    """Ways to spend the compute asked for, and the one that is recommended."""

    rows: Rows
    own: Variant  # what the configuration trains
    others: tuple[Variant, ...]
    units: int
    word: str  # for a unit
    rate_is_set: bool  # by `privacy.sample_rate`, which another batch must change too
    bands: Bands | None  # of correlated noise, at the batch and steps asked for
    samplings: Samplings | None  # of the same
    allocates: bool  # whether random allocation is asked for; rows are of Poisson sampling

    @property
    def variant(self) -> Variant:
        """The parameters to train: the configuration's own, unless noise drowns only these."""
        best = self.rows.best
        if best is None or not best.noise(self.own.trained).drowns:
            return self.own
        good = [v for v in self.others if not best.noise(v.trained).drowns]
        return good[0] if good else self.own

    def sentence(self) -> str:
        """Return the recommended settings, and their noise beside that of those asked for."""
        best, asked, own = self.rows.best, self.rows.asked, self.own
        if best is None:
            return (
                f"recommended: none: {asked.batch * asked.steps:,} {self.word}s in all do not "
                f"suffice for {FEWEST_STEPS} steps (a heuristic); raise training.steps"
            )
        keys = f"training.global_batch_size = {best.batch}, training.steps = {best.steps}"
        if self.rate_is_set:
            keys += f", privacy.sample_rate = {best.sample_rate:.6g}"
        if self.variant != own:
            keys += f", lora.rank = {self.variant.rank}"
        noise = best.noise(self.variant.trained)
        remedy = "more records or a larger epsilon have less"
        if not own.rank:
            remedy += ", and so have adapters ([lora]) beside the weights of a model that is loaded"
        drowns = f", still above {DROWNS:g} C: {remedy}" if noise.drowns else ""
        beside = f"where the settings asked for have {asked.noise(own.trained).over_run:.3g} C"
        if best is asked and self.variant == own:
            beside = "as asked for"
        larger = [row for row in self.rows.rows if row.batch > best.batch]
        if larger and not larger[0].within_bounds:
            beside += (
                f" (a batch of {larger[0].batch:,} has less in {larger[0].steps:,} steps, too few "
                f"or too large to learn from: below {FEWEST_STEPS} steps, or q above "
                f"{LARGEST_RATE:g})"
            )
        return (
            f"recommended: {keys}: noise {noise.over_run:.3g} C averaged over the run, {beside}"
            f"{drowns} ({'of Poisson sampling; ' if self.allocates else ''}heuristics: "
            "docs/tuning.md)"
        )

    def table(self) -> Table:
        """List the rows; the last one is the limit of what these units allow."""
        variants = (self.own, *self.others)
        heads = ["batch", "steps", "q", "passes", "sigma", f"a step,\n{self.own}"]
        heads += [f"the run,\n{variant}" for variant in variants]
        rows = (
            (
                [
                    f"{row.batch:,}",
                    f"{row.steps:,}",
                    f"{row.sample_rate:.3g}",
                    f"{row.passes:.3g}",
                    f"{row.noise_multiplier:.4g}",
                    f"{row.noise(self.own.trained).in_step:.3g}",
                    *(f"{row.noise(v.trained).over_run:.3g}" for v in variants),
                ],
                row is self.rows.asked,
                row is self.rows.best,
            )
            for row in self.rows.rows
        )
        table = _table(heads, rows)
        limits = (f"{self.rows.least_noise(v.trained):.3g}" for v in variants)
        table.add_section()
        table.add_row(f"{self.units:,}", "any", "1", "", "", "", *limits, "limit")
        return table

    def show(self) -> None:
        """Print the table and the sentence, on stderr."""
        width = None if sys.stderr.isatty() else _LOG_WIDTH
        console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
        for title, found in ((_TITLE, self), (_BANDS, self.bands)):
            if found is not None:
                table = Padding.indent(found.table(), 6)
                console.print(title, table, found.sentence(), sep="\n", markup=False)
        if self.samplings is not None:
            console.print(self.samplings.sentence(), markup=False)

    def for_programs(self) -> dict[str, Any]:
        best = self.rows.best
        return {
            "global_batch_size": best and best.batch,
            "steps": best and best.steps,
            "sample_rate": best and best.sample_rate,
            "lora_rank": self.variant.rank,
            "reason": self.sentence(),
            "bands": self.bands and self.bands.for_programs(),
            "sampling": self.samplings and self.samplings.for_programs(),
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
    """Weigh batch against steps, and all weights against adapters, at the compute asked for.

    Adapters are offered beside weights that are loaded, never beside drawn ones, which would stay
    random. `refuse` has let the configuration pass.

    Raises:
        ValueError: one line for the user; the target is out of the accountant's range.
    """
    settings, epsilon = plan.settings, config.privacy.target_epsilon
    assert epsilon is not None
    units = settings.implied_units
    terms = settings.delta, settings.accountant, units
    target = Target(epsilon, *terms, inherited(plan.ledger.ancestors))
    allocates, sigma = settings.sampling == "allocation", settings.mechanism.noise_multiplier
    if settings.bands > 1 or allocates:
        sigma = target.noise_multiplier(settings.expected_batch_size, plan.steps)
    batch = settings.expected_batch_size
    rows = rows_of(target, batch=batch, steps=plan.steps, noise_multiplier=sigma)
    ranks = (0,) if config.lora.rank else _RANKS if start.loads else ()
    others = tuple(Variant(rank, trained_count(_with_rank(config, args, rank))) for rank in ranks)
    own = Variant(config.lora.rank, trained_count(args))
    rate_is_set = config.privacy.sample_rate is not None
    bands = weigh_bands(config, plan, own.trained)
    samplings = weigh_samplings(config, plan, sigma)
    word = unit_word(config)
    return Recommendation(rows, own, others, units, word, rate_is_set, bands, samplings, allocates)


def _with_rank(config: JobConfig, args: ModelArgs, rank: int) -> ModelArgs:
    """Return the arguments with adapters of another rank, or without."""
    args = copy.deepcopy(args)
    args.lora = lora_of(config, rank)
    return args


def weigh_bands(config: JobConfig, plan: Plan, trained: int) -> Bands | None:
    """Weigh bands at the batch and steps asked for; None where noise cannot be correlated."""
    privacy, settings = config.privacy, plan.settings
    allocates = privacy.sampling == "allocation"
    if privacy.secure_noise or allocates or settings.mechanism.largest_share > 1:
        return None
    rows = noise_by_bands(config, settings.implied_units, inherited(plan.ledger.ancestors))
    if settings.bands not in rows:
        mechanism = settings.mechanism
        in_step, _ = mechanism.noise_of_run(max(plan.steps, 1))
        in_weights = mechanism.noise_in_weights(shares_of_steps(config))
        rows[settings.bands] = (mechanism.noise_multiplier, in_step, in_weights)
    scale = math.sqrt(trained) / settings.expected_batch_size
    return Bands(dict(sorted(rows.items())), settings.bands, scale, max(plan.steps, 1))
