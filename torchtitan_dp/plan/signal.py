"""How large the noise is beside what is learned, and which batch and steps make it smaller.

In a step, noise of standard deviation sigma C in each of the d trained parameters is divided by the
expected batch B, so that its norm is about sigma sqrt(d) / B, in units of C. The mean gradient that
it is added to has a norm of at most 1 in these units. Over a run of S steps gradients that agree
add up as S, and noise as sqrt(S): averaged over the run it is sigma sqrt(d) / (B sqrt(S)). That
number decides here. All of it is a heuristic: gradients lie near a few directions and noise in all
d of them, most of which change the loss little, so a model learns although the noise is longer.

`--recommend` weighs by it, at the compute asked for: batch against steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.ledger import RunLog
from torchtitan_dp.ledger.spending import inherited
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import trained_count
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Mechanism

DROWNS = 5.0
"""Above this much noise over the run, in C, the plan warns: of what the default model learns in 40
steps without noise it learned 70% at 4.1, 44% at 8.1 and 24% at 16. Like all constants here a
heuristic (docs/tuning.md)."""

FEWEST_STEPS = 16  # moments and learning rate need some to settle
LARGEST_RATE = 0.5  # of sampling: beyond it sampling hides hardly anything
WORTH = 0.9
"""A batch is doubled where that leaves at most this share of the noise over the run: steps are
worth something too."""


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

    def over_run(self, trained: int) -> float:
        mechanism = Mechanism(self.noise_multiplier, self.sample_rate)
        return mechanism.noise_norms(trained, self.global_batch_size, self.steps)[1]


def rows_of(
    sigma_of: Callable[[int, int], float], asked: Row, units: int
) -> tuple[list[Row], Row | None]:
    """Work out batches of powers of two times the one asked for, batch x steps staying the same:
    the rows by rising batch, and the best of them, None where no batch is within bounds.

    The best row has the largest batch that is within bounds, and that is worth doubling to. A
    smaller batch than the one asked for is best only where that is out of bounds.

    `sigma_of` finds the noise multiplier of a batch and steps; ValueError if there is none.
    `units` is public, or batch / sample rate. Where estimated norms need a larger noise multiplier
    than `sigma_of` finds, that of other rows is scaled alike, which is quick, and close. Raises
    ValueError, one line, if the target is out of the accountant's range.
    """
    batch, steps = asked.global_batch_size, asked.steps
    scale = asked.noise_multiplier / sigma_of(batch, steps)

    @functools.cache
    def row(power: int) -> Row | None:
        if power == 0:
            return asked
        size = round(batch * 2.0**power)
        count = round(batch * steps / size) if size else 0
        if size > units or count < 1:
            return None
        try:
            return Row(size, count, size / units, scale * sigma_of(size, count))
        except ValueError:  # out of the accountants' range
            return None

    best = 0
    while (less := row(best)) and (more := row(best + 1)) and more.within_bounds:
        if more.over_run(1) > WORTH * less.over_run(1):
            break
        best += 1
    while (one := row(best)) and not one.within_bounds:
        best -= 1
    shown = range(min(best, 0) - 1, max(best, 0) + 2)
    return [found for p in shown if (found := row(p))], row(best)


def refuse(config: JobConfig) -> None:
    """Raise ValueError, one line, if nothing can be recommended to this run."""
    privacy = config.privacy
    if not privacy.enable:
        raise ValueError("--recommend with privacy.enable = false: there is no noise; omit one")
    if privacy.target_epsilon is None:
        raise ValueError(
            f"--recommend with privacy.noise_multiplier = {privacy.noise_multiplier}: give one "
            "epsilon in its place: --privacy.noise_multiplier None --privacy.target_epsilon 8"
        )
    if RunLog(config.job.dump_folder).count:
        raise ValueError(
            f"--recommend with job.dump_folder = '{config.job.dump_folder}': the run in it has "
            "fixed its terms; name another folder to plan another run"
        )


def recommend(config: JobConfig, plan: Plan, args: ModelArgs, out: TextIO) -> dict[str, Any]:
    """Print what is recommended; return it for programs.

    `refuse` has let the configuration pass. Raises ValueError, one line for the user, if the target
    is out of the accountant's range.
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
    if (
        settings.mechanism.period > 1 or settings.sampling == "allocation"
    ):  # rows are of Poisson sampling
        sigma = sigma_of(batch, plan.steps)
    asked = Row(batch, plan.steps, batch / units, sigma)
    rows, best = rows_of(sigma_of, asked, units)
    trained = trained_count(args)
    shown = ["      the noise's norm over C, averaged over the run, at the compute asked for:"]
    shown.append(f"{'batch':>13}{'steps':>9}{'q':>9}{'sigma':>9}{'noise':>13}")
    for row in rows:
        marks = "  asked" * (row is asked) + "  recommended" * (row is best)
        marks += f"  fewer than {FEWEST_STEPS} steps" * (row.steps < FEWEST_STEPS)
        marks += f"  q above {LARGEST_RATE:g}" * (row.sample_rate > LARGEST_RATE)
        sizes = f"{row.global_batch_size:>13,}{row.steps:>9,}{row.sample_rate:>9.3g}"
        shown.append(f"{sizes}{row.noise_multiplier:>9.4g}{row.over_run(trained):>13.3g}{marks}")
    drawn = f"{batch * plan.steps:,} {unit_word(config)}s in all"
    reason = f"recommended: none: {drawn} cannot fill {FEWEST_STEPS} steps; raise training.steps"
    if best is not None:
        keys = f"training.global_batch_size = {best.global_batch_size}"
        keys += f", training.steps = {best.steps}"
        if config.privacy.sample_rate is not None:
            keys += f", privacy.sample_rate = {best.sample_rate:.6g}"
        noise, cure = best.over_run(trained), ""
        if asked.steps < FEWEST_STEPS:
            cure = f", but in only {asked.steps} steps"
        elif not asked.within_bounds:
            cure = f", but at a sampling rate of {asked.sample_rate:.2g}"
        drowns = ""
        if noise > DROWNS:
            lora = "" if config.lora.rank else ", [lora]"
            drowns = f" (above {DROWNS:g} C: more records{lora} or a larger epsilon have less)"
        reason = (
            f"recommended: {keys}: noise {noise:.3g} C averaged over the run{drowns}; the settings "
            f"asked for have {asked.over_run(trained):.3g} C{cure} (Poisson sampling; by "
            f"heuristics, no fewer than {FEWEST_STEPS} steps and no q above {LARGEST_RATE:g})"
        )
    print(*shown, reason, sep="\n", file=out)
    found = dict.fromkeys(field.name for field in dataclasses.fields(Row))
    return (dataclasses.asdict(best) if best else found) | {
        "reason": reason,
        "rows": [
            dataclasses.asdict(row) | {"noise_over_run": row.over_run(trained)} for row in rows
        ],
    }
