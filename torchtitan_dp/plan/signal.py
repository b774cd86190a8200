"""How large the noise is beside what is learned, and which batch and steps make it smaller.

In a step, noise of standard deviation sigma C in each of the d trained parameters is divided by the
expected batch B, so that its norm is about sigma sqrt(d) / B, in units of C. The mean gradient that
it is added to has a norm of at most 1 in these units. Over a run of S steps gradients that agree
add up as S, and noise as sqrt(S): averaged over the run it is sigma sqrt(d) / (B sqrt(S)). That
number decides here. Pure arithmetic: of a run it knows sigma, d, B, S and the sampling rate.

All of it is a heuristic. Gradients lie near a few directions and noise in all d of them, most of
which change the loss little: a model learns although the noise is longer than its gradient.
"""

import functools
import math
from dataclasses import dataclass

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Mechanism, Segment
from torchtitan_dp.process import typed

DROWNS = 5.0
"""Above this much noise over the run, in C, the plan warns. A heuristic: of what the default model
learns in 40 steps without noise it learned 70% at 4.1, 44% at 8.1 and 24% at 16 (docs/tuning.md).
Fine-tuning of GPT-2 on E2E (Li et al. 2022), which is known to work, has 7.4 in a step and 0.37
over the run, by the settings in its code: 42,061 records, batch 1,024, 411 steps, epsilon 8."""

FEWEST_STEPS = 16
"""No fewer are recommended, a heuristic: of the splits that were tried with all weights trained
(docs/results.md) those with 16 steps and more had the less loss the less noise they had over the
run, and those with fewer had more. Moments and learning rate need some steps to settle."""

LARGEST_RATE = 0.5
"""No larger sampling rate is recommended, a heuristic: beyond it sampling hides hardly anything."""

WORTH = 0.9
"""A batch is doubled, at the same compute, as long as that leaves at most this share of the noise
over the run, a heuristic: steps are worth something too."""


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
        per_layer = clipping != "flat"
        most = "C, with every group of layers at its bound" if per_layer else "C"
        return (
            f"noise: norm {self.in_step:.3g} C per step, {self.over_run:.3g} C averaged over the "
            f"run, over {trained:,} trained values; a clipped gradient's norm is at most {most}"
        )

    def warning(self) -> str | None:
        """Return one line where noise seems to drown the signal."""
        if not self.drowns:
            return None
        return (
            f"the noise is {self.over_run:.3g} C even averaged over the run, more than {DROWNS:g} "
            f"C (a heuristic): it may drown what could be learned; {typed('plan')} CONFIG "
            "--recommend shows by which batch and steps there is less, and, of weights that are "
            "loaded, by which adapters"
        )

    def for_programs(self) -> dict[str, float | bool]:
        return {
            "noise_in_step": self.in_step,
            "noise_over_run": self.over_run,
            "drowns": self.drowns,
        }


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


@dataclass(frozen=True)
class Target:
    """The terms that stay when batch and steps are exchanged: the promise, and the units."""

    epsilon: float
    delta: float
    accountant: accounting.Accountant
    units: int  # public, or batch / sample rate
    before: tuple[Segment, ...] = ()  # what initial weights had spent

    def noise_multiplier(self, batch: int, steps: int) -> float:
        """Find the sigma that keeps the promise; ValueError, one line, if there is none."""
        return accounting.noise_for(
            Mechanism(1.0, batch / self.units),
            steps,
            target_epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.accountant,
            before=self.before,
        )


@dataclass(frozen=True)
class Row:
    """One way to divide the same compute into a batch and steps."""

    batch: int
    steps: int
    sample_rate: float
    noise_multiplier: float

    @property
    def passes(self) -> float:
        """The expected number of draws of a unit in the run."""
        return self.sample_rate * self.steps

    @property
    def within_bounds(self) -> bool:  # to recommend it
        return self.steps >= FEWEST_STEPS and self.sample_rate <= LARGEST_RATE

    def noise(self, trained: int) -> Noise:
        sigma = self.noise_multiplier
        return noise_of(noise_multiplier=sigma, trained=trained, batch=self.batch, steps=self.steps)


@dataclass(frozen=True)
class Rows:
    """The rows of a compute, by rising batch, the one asked for and the one recommended."""

    rows: tuple[Row, ...]
    asked: Row
    best: Row | None  # None where no batch is within bounds
    least: float  # over the run, for one trained parameter, whatever is computed

    def least_noise(self, trained: int) -> float:
        """Return the least noise over the run that these units allow: with all in each step."""
        return self.least * math.sqrt(trained)


def rows_of(target: Target, *, batch: int, steps: int, noise_multiplier: float) -> Rows:
    """Work out batches of powers of two times the one asked for, batch x steps staying the same.

    Less noise over the run is what a larger batch gains, and steps are what it costs. The best row
    has the largest batch that is within bounds, and that is worth doubling to. A smaller batch than
    the one asked for is best only where that is out of bounds.

    `noise_multiplier` is the sigma of the row asked for. Where estimated norms need a larger one,
    that of other rows is scaled alike, which is quick, and close. Raises ValueError, one line, if
    the target is out of the accountant's range.
    """
    asked = Row(batch, steps, batch / target.units, noise_multiplier)
    scale = noise_multiplier / target.noise_multiplier(batch, steps)

    @functools.cache
    def row(power: int) -> Row | None:
        if power == 0:
            return asked
        size = round(batch * 2.0**power)
        count = round(batch * steps / size) if size else 0
        if size > target.units or count < 1:
            return None
        try:
            sigma = scale * target.noise_multiplier(size, count)
        except ValueError:  # out of the accountants' range
            return None
        return Row(size, count, size / target.units, sigma)

    def is_worth(row: Row | None, doubled: Row) -> bool:
        return row is not None and doubled.noise(1).over_run <= WORTH * row.noise(1).over_run

    best = 0
    while (more := row(best + 1)) and more.within_bounds and is_worth(row(best), more):
        best += 1
    while (one := row(best)) and not one.within_bounds:
        best -= 1
    shown = [found for p in range(min(best, 0) - 1, max(best, 0) + 2) if (found := row(p))]
    least = scale * target.noise_multiplier(target.units, 1) / target.units
    return Rows(tuple(shown), asked, row(best), least)
