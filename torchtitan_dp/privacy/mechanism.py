"""The mechanisms of an optimizer step: one class each.

A new one is one class here, its entry in `MECHANISMS`, a line in `mechanism_of`, and a proof that
its `composition` dominates a run of its steps.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchtitan_dp.privacy.coefficients import INDEPENDENT, cut_off
from torchtitan_dp.privacy.lower_bounds import mixture_mu
from torchtitan_dp.privacy.randomized import largest_ratio, ratios, refuse_projections
from torchtitan_dp.privacy.segments import GaussianSteps, Mechanism
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
class PoissonGaussian(Mechanism):
    """The Poisson-subsampled Gaussian mechanism: a drawn unit adds at most C.

    Args:
        capped_projections: k, the random projections that norms were estimated from, where a
            gradient longer than its estimate is scaled down to it, so that epsilon is that of exact
            norms; 0: none.
        norm_estimator: of these norms.
    """

    capped_projections: int = 0
    norm_estimator: str = "exact"

    name = "poisson_sampled_gaussian"
    keys = _OF_NORMS
    projections: ClassVar[int] = 0  # whose errors epsilon counts

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        return (GaussianSteps(self.noise_multiplier, self.sample_rate, steps),)

    @property
    def norms(self) -> str:
        k = self.capped_projections
        return f"norms from {k} projections, capped" if k else ""

    @property
    def clipping(self) -> str:
        if not self.capped_projections:
            return ""
        return (
            f"{_by_estimates(self.norm_estimator, self.capped_projections)}; a gradient longer "
            "than its estimate is scaled down to it, so that a unit counts at most C and ε is that "
            "of exact norms"
        )

    def terms(self) -> dict[str, object]:
        if not self.capped_projections:
            return {"privacy.gradient_method": "one of exact norms"}
        return _terms_of_estimates("capped", self.capped_projections, self.norm_estimator)


@dataclass(frozen=True)
class AllocatedGaussian(PoissonGaussian):
    """The Gaussian mechanism with random allocation: each unit is drawn at exactly one step of each
    round of t (`allocation`, with its proof). A round counts as a whole from its first step on.

    Args:
        sample_rate: q = 1 / t, with which a unit is drawn at a step if its step is not known.
        round_steps: t, at least 2.
    """

    round_steps: int = 2

    name = "gaussian_of_random_allocation"
    sampling = "allocation"
    keys = (
        *_OF_NORMS,
        (
            "round_steps",
            int,
            "t: the steps of a round, at exactly one of which each unit is drawn. ε is of whole "
            "rounds.",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round_steps < 2 or self.sample_rate != 1 / self.round_steps:
            raise ValueError(f"rounds of {self.round_steps} steps at the rate {self.sample_rate}")

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        rounds, t = -(-steps // self.round_steps), self.round_steps
        return (GaussianSteps(self.noise_multiplier, self.sample_rate, rounds, round_steps=t),)

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        line = (
            "privacy.accountant: with privacy.sampling = 'allocation' only PLD counts that a "
            "unit's step is hidden; set it to 'pld', or privacy.sampling to 'poisson'"
        )
        return [(privacy.accountant != "pld", line)]


@dataclass(frozen=True)
class BandedGaussian(PoissonGaussian):
    """The Gaussian mechanism with noise that is correlated over steps, and cyclic Poisson sampling
    (`banded`, with its proof).

    Args:
        sample_rate: q, with which a unit is drawn on average over steps: b q at every b-th step.
        bands: b.
        step: the number modulo b of the one step that this is, or `IN_A_ROW`.
        column: c_0 = 1, …, c_{b-1}; by default `coefficients.cut_off`.
    """

    bands: int = 2
    step: int = IN_A_ROW
    column: tuple[float, ...] = field(default=(), hash=False)

    name = "banded_gaussian_of_cyclic_poisson_sampling"
    sampling = "cyclic_poisson"
    keys = (
        *_OF_NORMS,
        (
            "bands",
            int,
            "b: units are in b groups, of which each step draws from the next one, each unit with "
            "probability b q; noise is correlated over steps by a matrix of b bands. 1: it is not.",
        ),
        (
            "column",
            list[float],
            "c: the coefficients of these bands, chosen at the run's first start (docs/privacy.md);"
            " ε does not depend on them: noise is scaled by their norm.",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Frozen; lists are what files have, and none those of before columns were chosen.
        object.__setattr__(self, "column", tuple(self.column) or cut_off(self.bands))
        if len(self.column) != self.bands or self.column[0] != 1:
            raise ValueError(f"{self.bands} bands with the coefficients {self.column}")
        if self.draw_rate > 1:
            raise ValueError(
                f"privacy.bands = {self.bands}: each unit would be drawn with probability "
                f"{self.bands} x {self.sample_rate:.4g} at every {self.bands}th step; use at most "
                f"{math.floor(1 / self.sample_rate)}"
            )

    def composition(self, steps: int) -> tuple[GaussianSteps, ...]:
        return (GaussianSteps(self.noise_multiplier, self.draw_rate, -(-steps // self.bands)),)

    @property
    def group(self) -> int | None:
        return self.step if self.step >= 0 else None

    def at(self, step: int) -> Mechanism:
        return dataclasses.replace(self, step=step % self.bands)

    def at_any(self) -> Mechanism:
        return dataclasses.replace(self, step=IN_A_ROW)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Mechanism:
        return super().from_fields({"column": (), **fields})

    @property
    def noise(self) -> str:
        return f"noise correlated over steps, {self.bands} bands"

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        secure = (
            "privacy.secure_noise: with privacy.noise = 'banded' a step takes back earlier noise, "
            "and their sum on the grid is not proven; set it to false, or privacy.noise to "
            "'independent'"
        )
        allocated = (
            "privacy.sampling: with privacy.noise = 'banded' a unit's steps lie apart by their "
            "groups, and rounds are not proven beside them; set it to 'poisson', or privacy.noise "
            "to 'independent'"
        )
        return [
            (privacy.secure_noise, secure),
            (privacy.sampling == "allocation", allocated),
        ]


@dataclass(frozen=True)
class EstimatedNorms(Mechanism):
    """`PoissonGaussian` with estimated norms: a drawn unit adds C times the ratio of true to
    estimated norm, a random number (`randomized`, with its proof).

    Args:
        projections: k, the random projections that a norm is estimated from.
        norm_estimator: of these norms.
    """

    projections: int
    norm_estimator: str

    name = "poisson_sampled_gaussian_of_randomized_norms"
    keys = _OF_NORMS
    capped_projections: ClassVar[int] = 0
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
        return _by_estimates(self.norm_estimator, self.projections)

    def claimed_mu(self, *, trials: int, confidence: float) -> float:
        shares = ratios(self.projections)
        return mixture_mu(self.noise_multiplier, shares, trials=trials, confidence=confidence)

    def terms(self) -> dict[str, object]:
        return _terms_of_estimates("accounted", self.projections, self.norm_estimator)

    def refusals(self, privacy: Privacy) -> list[tuple[bool, str]]:
        table = (
            (
                "accountant",
                privacy.accountant != "pld",
                "a step is a mixture of Gaussians, for which only PLD is tight; set "
                "privacy.accountant = 'pld'",
            ),
            (
                "clipping",
                privacy.clipping != "flat",
                "the norms of several groups err apart, which is not accounted for; set it to "
                "'flat'",
            ),
            (
                "noise",
                privacy.noise == "banded",
                "a unit's steps are not accounted for together; set it to 'independent'",
            ),
            (
                "sampling",
                privacy.sampling == "allocation",
                "a round of mixtures is not accounted for; set it to 'poisson'",
            ),
        )
        capped = "or privacy.underestimates = 'capped'"
        return [
            (
                refused,
                f"privacy.{key}: with privacy.underestimates = 'accounted' {why}, {capped}",
            )
            for key, refused, why in table
        ]


@dataclass(frozen=True)
class NoMechanism(PoissonGaussian):
    """A step without privacy, of a run that is trained without it."""

    name = "none"


MECHANISMS: tuple[type[Mechanism], ...] = (
    PoissonGaussian,
    AllocatedGaussian,
    BandedGaussian,
    EstimatedNorms,
    NoMechanism,
)


def _by_estimates(estimator: str, projections: int) -> str:
    return f"by norms estimated from random projections ({estimator}, {projections} of them)"


def _terms_of_estimates(underestimates: str, projections: int, estimator: str) -> dict[str, object]:
    return {
        "privacy.gradient_method": f"'randomized' with underestimates = '{underestimates}'",
        "privacy.projections": projections,
        "privacy.norm_estimator": estimator,
    }


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
    rates = noise_multiplier, sample_rate
    norms = (privacy.projections, privacy.norm_estimator) if estimates_norms else (0, "exact")
    if estimates_norms and privacy.underestimates == "accounted":
        return EstimatedNorms(*rates, *norms)
    if len(column) == 1:
        t = round(1 / sample_rate) if privacy.sampling == "allocation" else 0
        if t > 1:
            return AllocatedGaussian(noise_multiplier, 1 / t, *norms, round_steps=t)
        return PoissonGaussian(noise_multiplier, 1.0 if t == 1 else sample_rate, *norms)
    return BandedGaussian(*rates, *norms, bands=len(column), column=tuple(column))


def from_fields(fields: dict[str, Any]) -> Mechanism:
    """Build the mechanism that the keys of a `privacy.json`, or of one of its parts, record.

    Raises:
        KeyError, TypeError, ValueError: they record none that this version knows.
    """
    return {kind.name: kind for kind in MECHANISMS}[fields["mechanism"]].from_fields(fields)
