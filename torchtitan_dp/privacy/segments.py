"""The steps of a run: as a `Mechanism`, a frozen value, and as the Gaussians that dominate them.

Guarantee:
    - `Mechanism.composition(n)` dominates n steps that begin at a start, for neighbours as in
      `accounting`, given all earlier releases: Poisson-subsampled Gaussians and rounds of random
      allocation. Accountants, and `dp_event`, see nothing else of a mechanism.
    - `merged` changes nothing about what the steps spend: their order is irrelevant, steps that
      draw nobody or are infinitely noisy spend nothing, and Gaussian mechanisms without sampling,
      of exact norms, compose exactly into one, whose 1 / sigma^2 is the sum of theirs.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.privacy.coefficients import (
    INDEPENDENT,
    column_norm,
    noise_in_step,
    noise_in_weights,
)
from torchtitan_dp.privacy.losses import Ratios, largest_ratio, ratios
from torchtitan_dp.privacy.settings import FEWEST, MOST, Privacy

_EVENTS = "dp_accounting.dp_event"
NONE = "none"
"""The mechanism of a run that is trained without privacy, in `privacy.json`."""


@dataclass(frozen=True)
class GaussianSteps:
    """Steps of the Poisson-subsampled Gaussian mechanism, or rounds of random allocation, on the
    same terms.

    Args:
        noise_multiplier: sigma, the noise's standard deviation over C; 0 means no privacy.
        sample_rate: q, the probability with which each unit is drawn at each step.
        steps: their number; of random allocation, the number of rounds.
        ratios: the distribution of what a drawn unit adds, over C; None: at most 1.
        round_steps: t, the steps of a round of random allocation, where q is 1 / t; 1: Poisson.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    ratios: Ratios | None = None
    round_steps: int = 1

    @property
    def least_noise(self) -> float:
        """The noise over the most that a unit can ever add: sigma, where norms are exact."""
        return self.noise_multiplier / (1.0 if self.ratios is None else self.ratios.largest)

    @property
    def bounding_rate(self) -> float:
        """The rate at which Poisson sampling surely spends as much a step or a round: of a round,
        every unit takes part (`losses`)."""
        return self.sample_rate if self.round_steps == 1 else 1.0

    @property
    def order(self) -> tuple[float, float, int, float, int]:
        """The key that steps are sorted by: the least noise first, exact norms first."""
        rarity = 0.0 if self.ratios is None else 1 / self.ratios.largest
        return self.noise_multiplier, self.sample_rate, self.steps, rarity, self.round_steps


def merged(steps: Iterable[GaussianSteps]) -> tuple[GaussianSteps, ...]:
    """Merge steps into the fewest that spend the same, sorted."""
    counts: dict[tuple[float, float, Ratios | None, int], int] = {}
    precision = 0.0  # 1 / sigma^2 of all steps without sampling
    for part in steps:
        sigma, q, ratios = part.noise_multiplier, part.sample_rate, part.ratios
        if part.steps == 0 or q == 0 or sigma == math.inf:
            continue
        if q == 1 and sigma > 0 and ratios is None:
            precision += part.steps / sigma**2
        else:
            terms = sigma, q, ratios, part.round_steps
            counts[terms] = counts.get(terms, 0) + part.steps
    if precision > 0:
        counts[1 / math.sqrt(precision), 1.0, None, 1] = 1
    fewest = [GaussianSteps(sigma, q, n, ratios, t) for (sigma, q, ratios, t), n in counts.items()]
    return tuple(sorted(fewest, key=lambda part: part.order))


@dataclass(frozen=True)
class Mechanism:
    """One optimizer step, by its numbers; `privacy.json` records them.

    Args:
        noise_multiplier: sigma, the noise's standard deviation over C; 0 means no privacy.
        sample_rate: q, the probability that a unit is drawn at a step, on average over steps.
        projections: k, the random projections that norms are estimated from, whose errors epsilon
            counts (`losses`); 0: none.
        capped_projections: k, where a gradient longer than its estimate is scaled down to it, so
            that a unit adds at most C and epsilon is that of exact norms; 0: none.
        norm_estimator: of these norms, or "exact".
        round_steps: t of random allocation (`losses`), where q = 1 / t; 1: each step is drawn
            by itself.
        column: c_0 = 1, …, c_{b-1}, by which a step takes back earlier noise (`banded`): units are
            in b groups, of which each step draws from the next one with probability b q.
        private: False for a step of a run that trains without privacy.

    Raises:
        ValueError: a value is out of its range.
    """

    noise_multiplier: float
    sample_rate: float
    projections: int = 0
    capped_projections: int = 0
    norm_estimator: str = "exact"
    round_steps: int = 1
    column: tuple[float, ...] = INDEPENDENT
    private: bool = True

    def __post_init__(self) -> None:
        t, b, q = self.round_steps, self.period, self.sample_rate
        if not 0 <= q <= 1:
            raise ValueError(f"privacy.sample_rate = {q} is no probability; choose between 0 and 1")
        if not self.noise_multiplier >= 0:
            raise ValueError(f"privacy.noise_multiplier = {self.noise_multiplier}: use 0 or more")
        if t < 1 or (t > 1 and q != 1 / t) or (t > 1 and b > 1):
            raise ValueError(f"rounds of {t} steps at the rate {q}, with {b} bands")
        if self.column[:1] != (1.0,):
            raise ValueError(f"bands with the coefficients {self.column}")
        if b * q > 1:
            raise ValueError(
                f"privacy.bands = {b}: each unit would be drawn with probability {b} x {q:.4g} at "
                f"every {b}th step; use at most {math.floor(1 / q)}"
            )
        if self.projections and not FEWEST <= self.projections <= MOST:
            raise ValueError(f"privacy.projections = {self.projections}: choose {FEWEST} to {MOST}")

    @property
    def name(self) -> str:
        """The value of `mechanism` in `privacy.json`."""
        if not self.private:
            return NONE
        if self.round_steps > 1:
            return "gaussian_of_random_allocation"
        if self.period > 1:
            return "banded_gaussian_of_cyclic_poisson_sampling"
        if self.projections:
            return "poisson_sampled_gaussian_of_randomized_norms"
        return "poisson_sampled_gaussian"

    @property
    def sampling(self) -> str:
        """The value of `sampling` there."""
        if self.round_steps > 1:
            return "allocation"
        return "poisson" if self.period == 1 else "cyclic_poisson"

    def in_whole_periods(self, steps: int) -> int:
        """Round steps up to whole periods of correlated noise, or rounds of random allocation."""
        whole = self.period * self.round_steps  # one of both is 1
        return -(-steps // whole) * whole

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        """Return subsampled Gaussian steps that dominate `steps` steps in a row."""
        whole = -(-steps // (self.period * self.round_steps))  # one of both is 1
        shares = ratios(self.projections) if self.projections else None
        rate = self.draw_rate
        return (GaussianSteps(self.noise_multiplier, rate, whole, shares, self.round_steps),)

    @property
    def period(self) -> int:
        """b, the number of groups of units, of which each step draws from the next one: a unit is
        drawn at every b-th step at most."""
        return len(self.column)

    @property
    def draw_rate(self) -> float:
        """The probability with which a step draws each unit of its group."""
        return self.period * self.sample_rate

    @property
    def largest_share(self) -> float:
        """The most that one unit moves the clipped sum by, over C."""
        return largest_ratio(self.projections) if self.projections else 1.0

    @property
    def noise_of_step(self) -> float:
        """The standard deviation of the noise that a start's first step adds, over C."""
        return self.noise_multiplier * column_norm(self.column)

    def noise_of_run(self, steps: int) -> tuple[float, float]:
        """Return the standard deviation, over C, of the noise of a step in a run of so many, as a
        root mean square, and that of the sum of all steps over sqrt(steps)."""
        if self.period == 1:
            return self.noise_multiplier, self.noise_multiplier
        in_step = self.noise_multiplier * noise_in_step(self.column, steps)
        return in_step, self.noise_in_weights([1.0] * steps)

    def noise_norms(self, parameters: float, batch: float, steps: int) -> tuple[float, float]:
        """Return the expected norm, over C, of the noise in what the optimizer is handed: in a step
        of a run of so many, and in the mean of all its steps.

        >>> in_step, in_mean = Mechanism(0.485, 0.01).noise_norms(10**9, batch=64, steps=200)
        >>> round(in_step), round(in_mean, 1)
        (240, 16.9)
        """
        each, steps = math.sqrt(parameters) / batch, max(steps, 1)
        in_step, in_sum = self.noise_of_run(steps)
        return each * in_step, each * in_sum / math.sqrt(steps)

    def noise_in_weights(self, shares: Sequence[float]) -> float:
        """Return the standard deviation, over C, of independent noise that would leave as much in
        weights in which each step's noise has one of these shares."""
        return self.noise_multiplier * noise_in_weights(self.column, shares)

    def with_noise(self, noise_multiplier: float) -> "Mechanism":
        """Return this mechanism with another sigma."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def fields(self) -> dict[str, Any]:
        """Return the keys of `privacy.json` that record this mechanism."""
        own = dataclasses.asdict(self) | {"mechanism": self.name, "bands": self.period}
        left_out = ["private"] + ["round_steps"] * (self.round_steps == 1)
        left_out += ["bands", "column"] * (self.period == 1)
        return {key: value for key, value in own.items() if key not in left_out}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Mechanism":
        """Build the mechanism that the keys of a `privacy.json`, or of one of its parts, record.

        Raises:
            KeyError, TypeError, ValueError: they record none that this version knows.
        """
        own = {one.name for one in dataclasses.fields(cls)} - {"round_steps", "column", "private"}
        found = cls(
            **{key: fields[key] for key in own},
            round_steps=fields.get("round_steps", 1),
            column=tuple(fields.get("column", INDEPENDENT)),
            private=fields["mechanism"] != NONE,
        )
        if (found.name, found.period) != (fields["mechanism"], fields.get("bands", 1)):
            raise ValueError(f"the mechanism {fields['mechanism']} has the numbers of {found.name}")
        return found


def mechanism_of(
    privacy: Privacy,
    *,
    noise_multiplier: float,
    sample_rate: float,
    estimates_norms: bool,
    column: Sequence[float] = INDEPENDENT,
) -> Mechanism:
    """Return the mechanism that the configuration asks for.

    Args:
        sample_rate: q; with random allocation a round has 1 / q steps, rounded, and one that is
            all of it is a step of every unit, as without sampling.
        estimates_norms: whether the gradient method estimates norms.
        column: of correlated noise, with as many bands.
    """
    t = max(round(1 / sample_rate), 1) if privacy.sampling == "allocation" else 1
    k, accounted = privacy.projections, privacy.underestimates == "accounted"
    return Mechanism(
        noise_multiplier,
        1 / t if privacy.sampling == "allocation" else sample_rate,
        projections=k if estimates_norms and accounted else 0,
        capped_projections=k if estimates_norms and not accounted else 0,
        norm_estimator=privacy.norm_estimator if estimates_norms else "exact",
        round_steps=t,
        column=tuple(column),
    )


@dataclass(frozen=True)
class Segment:
    """`steps` optimizer steps of one mechanism, in a row.

    Raises:
        ValueError: their number is negative.
    """

    mechanism: Mechanism
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"training.steps = {self.steps} is negative; choose 0 or more")


def composition(segments: Iterable[Segment]) -> tuple[GaussianSteps, ...]:
    """Return the fewest subsampled Gaussian steps that dominate all segments, sorted."""
    return merged(part for s in segments for part in s.mechanism.composition(s.steps))


def dp_event(parts: Sequence[GaussianSteps]) -> dict[str, Any] | None:
    """Return merged steps as a `dp_accounting.DpEvent`, the fields of `to_named_tuple` in a dict: a
    `ComposedDpEvent` of a `SelfComposedDpEvent` for all steps on the same terms, noise in units of
    C; None if a step has no noise. dp-accounting has no event of random allocation: its rounds are
    `UnsupportedDpEvent`, which every accountant refuses."""
    if any(part.noise_multiplier == 0 for part in parts):
        return None
    return _event("ComposedDpEvent", events=[_steps(part) for part in parts])


def _steps(part: GaussianSteps) -> dict[str, Any]:
    q = part.sample_rate
    if part.round_steps > 1:
        step = _event("UnsupportedDpEvent")
    elif part.ratios is not None:
        absent = int(q < 1)
        step = _event(
            "MixtureOfGaussiansDpEvent",
            standard_deviation=part.noise_multiplier,
            sensitivities=[0.0] * absent + part.ratios.values.tolist(),
            sampling_probs=[1 - q] * absent + (q * part.ratios.probabilities).tolist(),
        )
    else:
        gaussian = _event("GaussianDpEvent", noise_multiplier=part.noise_multiplier)
        step = _event("PoissonSampledDpEvent", sampling_probability=q, event=gaussian)
    return _event("SelfComposedDpEvent", event=step, count=part.steps)


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": _EVENTS, "class_name": name, **fields}
