"""The mechanism of one optimizer step, as one frozen value.

Ledger, plan, card, `privacy.json`, audit and resume treat a mechanism as opaque. A new one is one
class here, its entry in `MECHANISMS`, a line in `mechanism_of`, and a proof that its `composition`
dominates a run of its steps.

Guarantee
---------
`composition(n)` dominates n steps that begin at a start, for neighbours as in `accounting`,
whatever was released before: the accountants, and `dp_event`, see nothing else of a mechanism. Each
step of several mechanisms is dominated by a step of their `worst`.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan_dp.privacy.banded import column_norm, noise_in_step, noise_in_sum
from torchtitan_dp.privacy.lower_bounds import mixture_mu
from torchtitan_dp.privacy.randomized import largest_ratio, ratios, refuse_projections
from torchtitan_dp.privacy.segments import GaussianSteps, merged
from torchtitan_dp.privacy.settings import Privacy

NOT_RECORDED = "not recorded"  # the estimator, where a log is the only record of a step
IN_A_ROW, UNKNOWN = -1, -2  # in the place of a banded step's number

_OF_NORMS: tuple[tuple[str, type, str], ...] = (
    (
        "projections",
        int,
        "From how many random projections norms were estimated, whose errors ε counts; 0: they "
        "were exact, or errors were capped, so that a unit counts C at most; as in every file that "
        "lacks this key.",
    ),
    (
        "capped_projections",
        int,
        "From how many random projections norms were estimated, where a gradient that is longer "
        "than its estimate is scaled down to it: a unit counts C at most whatever the errors are, "
        "so that ε is that of exact norms. 0: none were, ε counts their errors, or the steps were "
        "taken by a version that did not record it.",
    ),
    (
        "norm_estimator",
        str,
        "How: `hutchinson`, `hutch++`, or, where both numbers are 0, `exact`; `not recorded` where "
        "a log is the only record of the steps.",
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
        """Return it as the log of steps records the step of this number."""
        return self.as_logged()

    def at_unknown(self) -> "Mechanism":
        """Return it for single steps of unknown numbers."""
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
        """Return the other terms that epsilon depends on, by keys of the configuration."""
        return {"privacy.gradient_method": "one of exact or capped norms"}

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str, object, str]]:
        """List settings that this accounting does not cover: (refused, key, value, remedy)."""
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
        """Build it from `fields`, or from an older version's keys."""

    @property
    def logged(self) -> tuple[str, ...]:
        """The words after sigma, q and the start on a line of the log of steps: its name and all
        else that epsilon depends on. (Those of version 0.1.0 are without a name.)"""
        return (self.name,)

    @classmethod
    def from_logged(cls, noise_multiplier: float, sample_rate: float, *words: str) -> "Mechanism":
        """Build it from a line of the log; `words` follow its name there."""
        return cls(noise_multiplier, sample_rate, *words)

    def as_logged(self) -> "Mechanism":
        """Return it as the log of steps records it: without terms that change no epsilon."""
        return from_log(self.noise_multiplier, self.sample_rate, self.logged)


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
            fields.get("capped_projections", 0),
            fields.get("norm_estimator", "exact"),
        )

    @property
    def logged(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class BandedGaussian(PoissonGaussian):
    """The Gaussian mechanism with noise that is correlated over steps, and cyclic Poisson sampling
    (`banded`, with its proof).

    Args:
        sample_rate: q, with which a unit is drawn on average over steps: b q at every b-th step.
        bands: b.
        step: the number modulo b of the one step that this is; `IN_A_ROW`, or `UNKNOWN`.
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
        (
            "step_modulo_bands",
            int,
            "The number modulo b of the steps, where those of one group are listed by themselves; "
            "-1: they are in a row; -2: it is not known, and each of them counts for every unit.",
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
        rounds = steps if self.step == UNKNOWN else -(-steps // self.bands)
        return (GaussianSteps(self.noise_multiplier, self.draw_rate, rounds),)

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
        if self.step != IN_A_ROW:
            return self.as_logged()
        return dataclasses.replace(self, step=step % self.bands).as_logged()

    def at_unknown(self) -> Mechanism:
        return dataclasses.replace(self, step=UNKNOWN)

    def at_any(self) -> Mechanism:
        return dataclasses.replace(self, step=IN_A_ROW)

    @property
    def noise(self) -> str:
        return f"noise correlated over steps, {self.bands} bands"

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str, object, str]]:
        return [
            (
                privacy.secure_noise,
                "privacy.secure_noise",
                True,
                "with privacy.noise = 'banded' a step adds the noise of several keys, whose sum "
                "on the grid is not proven; set it to false, or privacy.noise to 'independent'",
            )
        ]

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "bands": self.bands, "step_modulo_bands": self.step}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "BandedGaussian":
        gaussian = PoissonGaussian.from_fields(fields)
        of_norms = gaussian.capped, gaussian.estimator
        rates = gaussian.noise_multiplier, gaussian.sample_rate
        return cls(*rates, *of_norms, fields["bands"], fields["step_modulo_bands"])

    @property
    def logged(self) -> tuple[str, ...]:
        return (self.name, str(self.bands), str(self.step))

    @classmethod
    def from_logged(
        cls, noise_multiplier: float, sample_rate: float, *words: str
    ) -> "BandedGaussian":
        bands, step = map(int, words)
        return cls(noise_multiplier, sample_rate, 0, NOT_RECORDED, bands, step)


@dataclass(frozen=True)
class EstimatedNorms(Mechanism):
    """The same, of gradients clipped by estimates of their norms: a drawn unit adds C times the
    ratio of true to estimated norm, a random number (`randomized`, with its proof).

    Args:
        projections: k, the random projections that a norm is estimated from.
        estimator: of these norms.
    """

    projections: int
    estimator: str = NOT_RECORDED

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

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str, object, str]]:
        here = "with privacy.underestimates = 'accounted'"
        capped = "or privacy.underestimates = 'capped'"
        return [
            (
                privacy.accountant != "pld",
                "privacy.accountant",
                f"'{privacy.accountant}'",
                f"{here} a step is a mixture of Gaussians, for which only PLD is tight; set "
                f"privacy.accountant = 'pld', {capped}",
            ),
            (
                privacy.clipping != "flat",
                "privacy.clipping",
                f"'{privacy.clipping}'",
                f"{here} the norms of several groups err apart, which is not accounted for; set "
                f"it to 'flat', {capped}",
            ),
            (
                privacy.noise == "banded",
                "privacy.noise",
                "'banded'",
                f"{here} a unit's steps are not accounted for together; set it to 'independent', "
                f"{capped}",
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
            fields.get("norm_estimator", NOT_RECORDED),
        )

    @property
    def logged(self) -> tuple[str, ...]:
        return (str(self.projections),)


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
    name = fields.get("mechanism")
    if name is None:  # of lost steps, in version 0.1.0
        name = (EstimatedNorms if fields.get("projections") else PoissonGaussian).name
    return {kind.name: kind for kind in MECHANISMS}[name].from_fields(fields)


def from_log(noise_multiplier: float, sample_rate: float, words: Sequence[str]) -> Mechanism:
    """Build the mechanism of a line of the log of steps; `words` are those of `logged`.

    Raises:
        ValueError: they are none of a mechanism.
    """
    if not words:
        return PoissonGaussian(noise_multiplier, sample_rate, estimator=NOT_RECORDED)
    name, *others = words
    if name.isdecimal():
        return EstimatedNorms(noise_multiplier, sample_rate, int(name), *others)
    kinds = {kind.name: kind for kind in MECHANISMS}
    if name not in kinds:
        raise ValueError(f"{name} is no mechanism of this version")
    return kinds[name].from_logged(noise_multiplier, sample_rate, *others)


def worst(known: Iterable[Mechanism]) -> Mechanism:
    """Return the mechanism of the largest share, with the least noise and the highest rate of all.

    Fewer projections are worse at every value (`envelope`), and exact norms are best.

    >>> exact, rough = PoissonGaussian(1.0, 0.2), EstimatedNorms(3.0, 0.1, 8)
    >>> worst([exact, rough, EstimatedNorms(2.0, 0.1, 32)])
    EstimatedNorms(noise_multiplier=1.0, sample_rate=0.2, projections=8, estimator='not recorded')
    """
    known = [mechanism.at_any() for mechanism in known]
    assert len({mechanism.period for mechanism in known}) == 1, "none dominates the rest"
    kinds = {type(mechanism) for mechanism in known}
    assert len(kinds) == 1 or kinds <= {PoissonGaussian, EstimatedNorms}, "none dominates the rest"
    return dataclasses.replace(
        max(known, key=lambda mechanism: mechanism.largest_share),
        noise_multiplier=min(mechanism.noise_multiplier for mechanism in known),
        sample_rate=max(mechanism.sample_rate for mechanism in known),
    )
