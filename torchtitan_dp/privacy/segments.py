"""The steps of a run: as a `Mechanism`, a frozen value, and as the Gaussians that dominate them.

Ledger, plan, card, `privacy.json`, audit and resume treat a mechanism as opaque; `mechanism` has
its classes. Accountants see Poisson-subsampled Gaussians and rounds of random allocation, and
nothing else.

Guarantee
---------
`Mechanism.composition(n)` dominates n steps that begin at a start, for neighbours as in
`accounting`, whatever was released before: the accountants, and `dp_event`, see nothing else of a
mechanism.

`merged` changes nothing about what the steps spend: their order is irrelevant to composition, steps
that draw nobody or are infinitely noisy spend nothing, and Gaussian mechanisms without sampling, of
exact norms, compose exactly into one, whose 1 / sigma^2 is the sum of theirs. `dp_event` lists
every step once, so that an accountant of another program, given the event and delta, bounds the
same run.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan_dp.privacy.coefficients import (
    INDEPENDENT,
    Shares,
    column_norm,
    noise_in_step,
    noise_in_weights,
)
from torchtitan_dp.privacy.randomized import Ratios
from torchtitan_dp.privacy.settings import Privacy

_EVENTS = "dp_accounting.dp_event"


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
        every unit takes part (`allocation`)."""
        return self.sample_rate if self.round_steps == 1 else 1.0

    @property
    def order(self) -> tuple[float, float, int, float, int]:
        """The key that steps are sorted by: the least noise first, exact norms first."""
        rarity = 0.0 if self.ratios is None else 1 / self.ratios.largest
        return self.noise_multiplier, self.sample_rate, self.steps, rarity, self.round_steps


def merged(steps: Iterable[GaussianSteps]) -> tuple[GaussianSteps, ...]:
    """Merge steps into the fewest that spend the same, sorted.

    >>> merged([GaussianSteps(2.0, 0.1, 5), GaussianSteps(1.0, 1.0, 4), GaussianSteps(2.0, 0.1, 7)])
    (GaussianSteps(noise_multiplier=0.5, sample_rate=1.0, steps=1, ratios=None, \
round_steps=1), GaussianSteps(noise_multiplier=2.0, sample_rate=0.1, steps=12, ratios=None, \
round_steps=1))
    """
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
    fewest = [
        GaussianSteps(sigma, q, count, ratios, t) for (sigma, q, ratios, t), count in counts.items()
    ]
    return tuple(sorted(fewest, key=lambda part: part.order))


@dataclass(frozen=True)
class Mechanism(ABC):
    """One step: units drawn with `sample_rate`, noise of `noise_multiplier` times the clip norm.

    Args:
        noise_multiplier: sigma, the noise's standard deviation over C; 0 means no privacy.
        sample_rate: q, the probability with which each unit is drawn at each step.

    Raises:
        ValueError: a value is out of its range.
    """

    noise_multiplier: float
    sample_rate: float

    name: ClassVar[str]
    """The value of `mechanism` in `privacy.json`."""

    sampling: ClassVar[str] = "poisson"
    """The value of `sampling` there."""

    caveat: ClassVar[str] = ""
    """An assumption that epsilon rests on with this mechanism; empty if there is none."""

    keys: ClassVar[tuple[tuple[str, type, str], ...]] = ()
    """Its own keys of `privacy.json`, which are attributes: name, type and meaning of each."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ValueError(
                f"privacy.sample_rate = {self.sample_rate} is not a probability; choose one "
                "between 0 and 1"
            )
        if not self.noise_multiplier >= 0:
            raise ValueError(
                f"privacy.noise_multiplier = {self.noise_multiplier} is negative; choose 0 or more"
            )

    @abstractmethod
    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        """Return subsampled Gaussian steps that dominate `steps` steps in a row."""

    @property
    def period(self) -> int:
        """b, the number of groups of units, of which each step draws from the next one: a unit is
        drawn at every b-th step at most."""
        return len(self.column)

    @property
    def round_steps(self) -> int:
        """t, the steps of a round that is drawn at once, and counts as a whole; 1 where each step
        is drawn by itself."""
        return 1

    @property
    def column(self) -> tuple[float, ...]:
        """c, by which a step takes back earlier noise (`banded`); (1,) where it does not."""
        return INDEPENDENT

    @property
    def group(self) -> int | None:
        """The group of units that this mechanism's one step draws from: the step's number modulo b;
        None for steps in a row."""
        return None

    @property
    def draw_rate(self) -> float:
        """The probability with which a step draws each unit of its group."""
        return self.period * self.sample_rate

    @property
    def noise_of_step(self) -> float:
        """The standard deviation of the noise that a start's first step adds, over C."""
        return self.noise_multiplier * column_norm(self.column)

    def noise_of_run(self, steps: int) -> tuple[float, float]:
        """Return the standard deviation, over C, of the noise of a step in a run of so many, as a
        root mean square, and that of the sum of all steps over sqrt(steps)."""
        in_step = self.noise_multiplier * noise_in_step(self.column, steps)
        return in_step, self.noise_in_weights([1.0] * steps)

    def noise_in_weights(self, shares: Shares) -> float:
        """Return the standard deviation, over C, of independent noise that would leave as much in
        weights in which each step's has one of these shares, a root mean square over rows."""
        return self.noise_multiplier * noise_in_weights(self.column, shares)

    def at(self, step: int) -> "Mechanism":
        """Return the mechanism of the one step with this number."""
        return self

    def at_any(self) -> "Mechanism":
        """Return the mechanism of steps in a row, of which `at` returned this one."""
        return self

    def with_noise(self, noise_multiplier: float) -> "Mechanism":
        """Return the same mechanism with another noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    @property
    def largest_share(self) -> float:
        """The most that one unit moves the clipped sum by, over C."""
        return 1.0

    @property
    def norms(self) -> str:
        """How norms were found, in words, to follow sigma and q; empty for exact norms."""
        return ""

    @property
    def clipping(self) -> str:
        """How norms were found, for a model card; empty for exact norms."""
        return ""

    @property
    def noise(self) -> str:
        """How noise depends on earlier steps', in words; empty where it does not."""
        return ""

    def claimed_mu(self, *, trials: int, confidence: float) -> float:
        """Return the largest mu that an audit of one whole step, or round of steps, may find, with
        this confidence."""
        return 1 / self.noise_multiplier

    def terms(self) -> dict[str, object]:
        """Return the mechanism's other terms, by keys of the configuration."""
        return {}

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        """List settings that this accounting does not cover: (refused, "key: why; remedy")."""
        return []

    def fields(self) -> dict[str, Any]:
        """Return the keys of `privacy.json` that record this mechanism."""
        own = {key: getattr(self, key) for key, *_ in self.keys}
        rates = {"noise_multiplier": self.noise_multiplier, "sample_rate": self.sample_rate}
        return {"mechanism": self.name, **rates, **own}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Mechanism":
        """Build it from `fields`."""
        known = {"noise_multiplier", "sample_rate", *(key for key, *_ in cls.keys)}
        given = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: fields[key] for key in known & given})


@dataclass(frozen=True)
class Segment:
    """`steps` optimizer steps of one mechanism: of one group, or in a row.

    Args:
        run: for steps of one group, the run that divided units into groups: another run may put a
            unit into another group.

    Raises:
        ValueError: their number is negative.
    """

    mechanism: Mechanism
    steps: int
    run: str = ""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"training.steps = {self.steps} is negative; choose 0 or more")

    @property
    def order(self) -> tuple[float, float, float, int, int, str]:
        """The key that segments are sorted by: the least noise first, exact norms first."""
        mechanism = self.mechanism
        rarity = 1 / mechanism.largest_share if mechanism.largest_share > 1 else 0.0
        group = -1 if mechanism.group is None else mechanism.group
        rates = mechanism.noise_multiplier, mechanism.sample_rate
        return *rates, rarity, mechanism.round_steps, group, self.run


def composition(segments: Iterable[Segment]) -> tuple[GaussianSteps, ...]:
    """Return the fewest subsampled Gaussian steps that dominate all segments, sorted.

    A unit is in one group of a run, so of a run's groups the one with the most steps counts.
    """
    parts: list[GaussianSteps] = []
    by_group: dict[tuple[Mechanism, str], Counter[int]] = defaultdict(Counter)
    for s in segments:
        if s.mechanism.group is None:
            parts += s.mechanism.composition(s.steps)
        else:
            by_group[s.mechanism.at_any(), s.run][s.mechanism.group] += s.steps
    for (mechanism, _), steps in by_group.items():
        parts += mechanism.composition(max(steps.values()) * mechanism.period)
    return merged(parts)


def steps_in_a_row(mechanism: Mechanism, first: int, steps: int, run: str) -> list[Segment]:
    """Return the steps from number `first` of a run on, by group; of random allocation, the rounds
    that begin among them: that of `first`, if it began before, is counted with earlier steps."""
    if (t := mechanism.round_steps) > 1:
        rounds = -(-(first - 1 + steps) // t) - -(-(first - 1) // t)
        return [Segment(mechanism, rounds * t)]
    if mechanism.period == 1:
        return [Segment(mechanism, steps)]
    counts = Counter(mechanism.at(number) for number in range(first, first + steps))
    return [Segment(one, count, run) for one, count in counts.items()]


def dp_event(parts: Sequence[GaussianSteps]) -> dict[str, Any] | None:
    """Return merged steps as a `dp_accounting.DpEvent`, the fields of `to_named_tuple` in a dict.

    Returns:
        A `ComposedDpEvent` of a `SelfComposedDpEvent` for all steps on the same terms, of Poisson
        sampled Gaussian events whose noise is in units of C, or, where norms were estimated, of
        mixtures of Gaussians, sampling included; None if a step has no noise. dp-accounting has no
        event of random allocation: its rounds are `UnsupportedDpEvent`, which every accountant
        refuses, and none takes for Poisson sampling.

    >>> event = dp_event([GaussianSteps(2.0, 0.1, 5)])["events"][0]
    >>> event["class_name"], event["count"], event["event"]["event"]["noise_multiplier"]
    ('SelfComposedDpEvent', 5, 2.0)
    """
    if any(part.noise_multiplier == 0 for part in parts):
        return None
    return _event("ComposedDpEvent", events=[_steps(part) for part in parts])


def _steps(part: GaussianSteps) -> dict[str, Any]:
    if part.round_steps > 1:
        return _event("SelfComposedDpEvent", event=_event("UnsupportedDpEvent"), count=part.steps)
    if part.ratios is not None:
        return _event("SelfComposedDpEvent", event=_mixture(part, part.ratios), count=part.steps)
    gaussian = _event("GaussianDpEvent", noise_multiplier=part.noise_multiplier)
    step = _event("PoissonSampledDpEvent", sampling_probability=part.sample_rate, event=gaussian)
    return _event("SelfComposedDpEvent", event=step, count=part.steps)


def _mixture(part: GaussianSteps, ratios: Ratios) -> dict[str, Any]:
    q = part.sample_rate
    absent = ([0.0], [1 - q]) if q < 1 else ([], [])
    return _event(
        "MixtureOfGaussiansDpEvent",
        standard_deviation=part.noise_multiplier,
        sensitivities=[*absent[0], *ratios.values.tolist()],
        sampling_probs=[*absent[1], *(q * ratios.probabilities).tolist()],
    )


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": _EVENTS, "class_name": name, **fields}
