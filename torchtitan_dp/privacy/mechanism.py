"""The mechanism of one optimizer step, as one frozen value.

Ledger, plan, card, `privacy.json`, audit and resume treat a mechanism as opaque. A new one is one
class here, its entry in `MECHANISMS`, a line in `mechanism_of`, and a proof that its `composition`
dominates a run of its steps.

Guarantee
---------
`composition(n)` dominates n steps that begin at a start, for neighbours as in `accounting`,
whatever was released before: the accountants, and `dp_event`, see nothing else of a mechanism.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan_dp.privacy.banded import column_norm, noise_in_step, noise_in_sum
from torchtitan_dp.privacy.lower_bounds import mixture_mu
from torchtitan_dp.privacy.randomized import largest_ratio, ratios, refuse_projections
from torchtitan_dp.privacy.segments import GaussianSteps, merged
from torchtitan_dp.privacy.settings import Privacy

IN_A_ROW = -1  # in the place of a banded step's number

_OF_NORMS: tuple[tuple[str, type, str], ...] = (
    (
        "projections",
        int,
        "From how many random projections norms were estimated, whose errors ε counts; 0: they "
        "were exact, or errors were capped, so that a unit counts C at most.",
    ),
    (
        "capped_projections",
        int,
        "From how many random projections norms were estimated, where a gradient that is longer "
        "than its estimate is scaled down to it: a unit counts C at most whatever the errors are, "
        "so that ε is that of exact norms. 0: none were, or ε counts their errors.",
    ),
    (
        "norm_estimator",
        str,
        "How: `hutchinson`, `hutch++`, or, where both numbers are 0, `exact`.",
    ),
)


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

    caveat: ClassVar[str] = ""
    """An assumption that epsilon rests on with this mechanism; empty if there is none."""

    keys: ClassVar[tuple[tuple[str, type, str], ...]] = ()
    """Its own keys of `privacy.json`: name, type and meaning of each that `fields` adds."""

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
        return 1

    @property
    def group(self) -> int | None:
        """The number, modulo b, of the one step that this is; None: of any step."""
        return None

    @property
    def draw_rate(self) -> float:
        """The probability with which a step draws each unit of its group."""
        return self.period * self.sample_rate

    @property
    def noise_of_step(self) -> float:
        """The standard deviation of the noise that a start's first step adds, over C."""
        return self.noise_multiplier

    def noise_of_run(self, steps: int) -> tuple[float, float]:
        """Return the standard deviation, over C, of the noise of a step in a run of so many, as a
        root mean square, and that of the sum of all steps over sqrt(steps)."""
        return self.noise_multiplier, self.noise_multiplier

    def at(self, step: int) -> "Mechanism":
        """Return it for the one step of this number."""
        return self

    def at_any(self) -> "Mechanism":
        """Return it for steps in a row, whatever step it is of."""
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
        """List settings that this accounting does not cover: (refused, "key: reason; remedy")."""
        return []

    def fields(self) -> dict[str, Any]:
        """Return the keys of `privacy.json` that record this mechanism."""
        return {
            "mechanism": self.name,
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
        }

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Mechanism":
        """Build it from `fields`."""


@dataclass(frozen=True)
class Segment:
    """`steps` optimizer steps of one mechanism: of one group, or in a row.

    Args:
        run: of a group, the run whose groups these are: in another, a unit may be of another.

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
    def order(self) -> tuple[float, float, float, int, str]:
        """The key that segments are sorted by: the least noise first, exact norms first."""
        mechanism = self.mechanism
        rarity = 1 / mechanism.largest_share if mechanism.largest_share > 1 else 0.0
        group = -1 if mechanism.group is None else mechanism.group
        return mechanism.noise_multiplier, mechanism.sample_rate, rarity, group, self.run


def composition(segments: Iterable[Segment]) -> tuple[GaussianSteps, ...]:
    """Return the fewest subsampled Gaussian steps that dominate all segments, sorted.

    A unit is of one group of a run, so that of its groups the one with the most steps counts.
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
    """Return the steps from number `first` of a run on, by group."""
    if mechanism.period == 1:
        return [Segment(mechanism, steps)]
    counts = Counter(mechanism.at(number) for number in range(first, first + steps))
    return [Segment(one, count, run) for one, count in counts.items()]


@dataclass(frozen=True)
class PoissonGaussian(Mechanism):
    """The Poisson-subsampled Gaussian mechanism: a drawn unit adds at most C.

    Args:
        capped: k, the random projections that norms were estimated from, where a gradient longer
            than its estimate is scaled down to it, so that epsilon is that of exact norms; 0: none.
        estimator: of these norms.
    """

    capped: int = 0
    estimator: str = "exact"

    name = "poisson_sampled_gaussian"
    keys = _OF_NORMS

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        return (GaussianSteps(self.noise_multiplier, self.sample_rate, steps),)

    @property
    def norms(self) -> str:
        return f"norms from {self.capped} projections, capped" if self.capped else ""

    @property
    def clipping(self) -> str:
        if not self.capped:
            return ""
        return (
            f"by norms estimated from random projections ({self.estimator}, {self.capped} of them);"
            " a gradient longer than its estimate is scaled down to it, so that a unit counts at "
            "most C and ε is that of exact norms"
        )

    def fields(self) -> dict[str, Any]:
        norms = {"projections": 0, "capped_projections": self.capped}
        return {**super().fields(), **norms, "norm_estimator": self.estimator}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "PoissonGaussian":
        return cls(
            fields["noise_multiplier"],
            fields["sample_rate"],
            fields["capped_projections"],
            fields["norm_estimator"],
        )

    def terms(self) -> dict[str, object]:
        if not self.capped:
            return {"privacy.gradient_method": "one of exact norms"}
        return {
            "privacy.gradient_method": "'randomized' with underestimates = 'capped'",
            "privacy.projections": self.capped,
            "privacy.norm_estimator": self.estimator,
        }


@dataclass(frozen=True)
class BandedGaussian(PoissonGaussian):
    """The Gaussian mechanism with noise that is correlated over steps, and cyclic Poisson sampling
    (`banded`, with its proof).

    Args:
        sample_rate: q, with which a unit is drawn on average over steps: b q at every b-th step.
        bands: b.
        step: the number modulo b of the one step that this is, or `IN_A_ROW`.
    """

    bands: int = 2
    step: int = IN_A_ROW

    name = "banded_gaussian_of_cyclic_poisson_sampling"
    keys = (
        *_OF_NORMS,
        (
            "bands",
            int,
            "b: units are in b groups, of which each step draws from the next one, each unit with "
            "probability b q; noise is correlated over steps by a matrix of b bands. 1: it is not.",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draw_rate > 1:
            raise ValueError(
                f"privacy.bands = {self.bands}: each unit would be drawn with probability "
                f"{self.bands} x {self.sample_rate:.4g} at every {self.bands}th step; use at most "
                f"{math.floor(1 / self.sample_rate)}"
            )

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        return (GaussianSteps(self.noise_multiplier, self.draw_rate, -(-steps // self.bands)),)

    @property
    def period(self) -> int:
        return self.bands

    @property
    def group(self) -> int | None:
        return self.step if self.step >= 0 else None

    @property
    def noise_of_step(self) -> float:
        return self.noise_multiplier * column_norm(self.bands)

    def noise_of_run(self, steps: int) -> tuple[float, float]:
        shares = noise_in_step(self.bands, steps), noise_in_sum(self.bands, steps)
        return self.noise_multiplier * shares[0], self.noise_multiplier * shares[1]

    def at(self, step: int) -> Mechanism:
        return dataclasses.replace(self, step=step % self.bands)

    def at_any(self) -> Mechanism:
        return dataclasses.replace(self, step=IN_A_ROW)

    @property
    def noise(self) -> str:
        return f"noise correlated over steps, {self.bands} bands"

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        return [
            (
                privacy.secure_noise,
                "privacy.secure_noise: with privacy.noise = 'banded' a step adds the noise of "
                "several keys, whose sum on the grid is not proven; set it to false, or "
                "privacy.noise to 'independent'",
            )
        ]

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "bands": self.bands}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "BandedGaussian":
        gaussian = PoissonGaussian.from_fields(fields)
        of_norms = gaussian.capped, gaussian.estimator
        rates = gaussian.noise_multiplier, gaussian.sample_rate
        return cls(*rates, *of_norms, fields["bands"])


@dataclass(frozen=True)
class EstimatedNorms(Mechanism):
    """The same, of gradients clipped by estimates of their norms: a drawn unit adds C times the
    ratio of true to estimated norm, a random number (`randomized`, with its proof).

    Args:
        projections: k, the random projections that a norm is estimated from.
        estimator: of these norms.
    """

    projections: int
    estimator: str

    name = "poisson_sampled_gaussian_of_randomized_norms"
    keys = _OF_NORMS
    caveat = (
        "norms were estimated from random projections: the estimates' errors, which epsilon "
        "counts, are taken to be those of real numbers"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_projections(self.projections)

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        shares = ratios(self.projections)
        return (GaussianSteps(self.noise_multiplier, self.sample_rate, steps, shares),)

    @property
    def largest_share(self) -> float:
        return largest_ratio(self.projections)

    @property
    def norms(self) -> str:
        return f"norms from {self.projections} projections"

    @property
    def clipping(self) -> str:
        return (
            f"by norms estimated from random projections ({self.estimator}, {self.projections} of "
            "them)"
        )

    def claimed_mu(self, *, trials: int, confidence: float) -> float:
        shares = ratios(self.projections)
        return mixture_mu(self.noise_multiplier, shares, trials=trials, confidence=confidence)

    def terms(self) -> dict[str, object]:
        return {
            "privacy.gradient_method": "'randomized' with underestimates = 'accounted'",
            "privacy.projections": self.projections,
            "privacy.norm_estimator": self.estimator,
        }

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        here = "with privacy.underestimates = 'accounted'"
        capped = "or privacy.underestimates = 'capped'"
        return [
            (
                privacy.accountant != "pld",
                f"privacy.accountant: {here} a step is a mixture of Gaussians, for which only PLD "
                f"is tight; set privacy.accountant = 'pld', {capped}",
            ),
            (
                privacy.clipping != "flat",
                f"privacy.clipping: {here} the norms of several groups err apart, which is not "
                f"accounted for; set it to 'flat', {capped}",
            ),
            (
                privacy.noise == "banded",
                f"privacy.noise: {here} a unit's steps are not accounted for together; set it to "
                f"'independent', {capped}",
            ),
        ]

    def fields(self) -> dict[str, Any]:
        norms = {"projections": self.projections, "capped_projections": 0}
        return {**super().fields(), **norms, "norm_estimator": self.estimator}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "EstimatedNorms":
        return cls(
            fields["noise_multiplier"],
            fields["sample_rate"],
            fields["projections"],
            fields["norm_estimator"],
        )


@dataclass(frozen=True)
class NoMechanism(PoissonGaussian):
    """A step without privacy, of a run that is trained without it."""

    name = "none"


MECHANISMS: tuple[type[Mechanism], ...] = (
    PoissonGaussian,
    BandedGaussian,
    EstimatedNorms,
    NoMechanism,
)


def mechanism_of(
    privacy: Privacy,
    *,
    noise_multiplier: float,
    sample_rate: float,
    estimates_norms: bool,
    bands: int = 1,
) -> Mechanism:
    """Return the mechanism that the configuration asks for.

    Args:
        estimates_norms: whether the gradient method estimates norms.
        bands: b; 1 for independent noise.
    """
    rates = noise_multiplier, sample_rate
    norms = privacy.projections, privacy.norm_estimator
    if estimates_norms and privacy.underestimates == "accounted":
        return EstimatedNorms(*rates, *norms)
    exact = PoissonGaussian(*rates, *(norms if estimates_norms else ()))
    if bands == 1:
        return exact
    return BandedGaussian(*rates, exact.capped, exact.estimator, bands)


def from_fields(fields: dict[str, Any]) -> Mechanism:
    """Build the mechanism that the keys of a `privacy.json`, or of one of its parts, record.

    Raises:
        KeyError, TypeError, ValueError: they record none that this version knows.
    """
    return {kind.name: kind for kind in MECHANISMS}[fields["mechanism"]].from_fields(fields)
