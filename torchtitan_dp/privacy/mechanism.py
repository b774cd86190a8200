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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan_dp.privacy.envelope import largest_ratio, ratios, refuse_projections
from torchtitan_dp.privacy.lower_bounds import mixture_mu
from torchtitan_dp.privacy.segments import GaussianSteps, merged
from torchtitan_dp.privacy.settings import Privacy

NOT_RECORDED = "not recorded"  # the estimator, where a log is the only record of a step

_OF_NORMS = (
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
        """Return subsampled Gaussian steps that dominate `steps` steps from a start on."""

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

    def claimed_mu(self, *, trials: int, confidence: float) -> float:
        """Return the largest mu that an audit of one whole step may find, with this confidence."""
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
    """`steps` optimizer steps of one mechanism, from a start on.

    Raises:
        ValueError: their number is negative.
    """

    mechanism: Mechanism
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"training.steps = {self.steps} is negative; choose 0 or more")

    @property
    def order(self) -> tuple[float, float, float]:
        """The key that segments are sorted by: the least noise first, exact norms first."""
        mechanism = self.mechanism
        rarity = 1 / mechanism.largest_share if mechanism.largest_share > 1 else 0.0
        return mechanism.noise_multiplier, mechanism.sample_rate, rarity


def composition(segments: Iterable[Segment]) -> tuple[GaussianSteps, ...]:
    """Return the fewest subsampled Gaussian steps that dominate all segments, sorted."""
    return merged(part for s in segments for part in s.mechanism.composition(s.steps))


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
                privacy.exact_sum,
                "privacy.exact_sum",
                True,
                f"{here} a unit moves the sum by more than C at times, for which fixed point has "
                f"no room; set it to false, {capped}",
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


MECHANISMS: tuple[type[Mechanism], ...] = (PoissonGaussian, EstimatedNorms, NoMechanism)


def mechanism_of(
    privacy: Privacy, *, noise_multiplier: float, sample_rate: float, estimates_norms: bool
) -> Mechanism:
    """Return the mechanism that the configuration asks for.

    Args:
        estimates_norms: whether the gradient method estimates norms.
    """
    if not estimates_norms:
        return PoissonGaussian(noise_multiplier, sample_rate)
    norms = privacy.projections, privacy.norm_estimator
    if privacy.underestimates == "capped":
        return PoissonGaussian(noise_multiplier, sample_rate, *norms)
    return EstimatedNorms(noise_multiplier, sample_rate, *norms)


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
    known = list(known)
    kinds = {type(mechanism) for mechanism in known}
    assert len(kinds) == 1 or kinds <= {PoissonGaussian, EstimatedNorms}, "none dominates the rest"
    return dataclasses.replace(
        max(known, key=lambda mechanism: mechanism.largest_share),
        noise_multiplier=min(mechanism.noise_multiplier for mechanism in known),
        sample_rate=max(mechanism.sample_rate for mechanism in known),
    )
