"""The spending of a run while it trains, computed ahead at a few points, and its `privacy.json`.

Guarantee:
    `epsilon` is of the weights' own lineage, `epsilon_executed` of every step ever begun in the
    folder, `epsilon_planned` of those and of all that are still planned. None is ever below
    `compose` of its steps. The first two are computed once for a few points ahead, and a
    query gives the next point up, so that no step waits for an accountant. `epsilon_planned` also
    covers a stop that weights decided; no epsilon covers a stop that followed from losses, norms
    or other logs, or from a clock. Where the planned steps were taken, nothing in `privacy.json`
    depends on how often the run was started, or on how many steps each start took or lost.
"""

import functools
import importlib.metadata
import math
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.files import write_published
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.spending import (
    all_but_own,
    assumptions,
    caveats,
    compose,
    heldout_epsilon,
    initial_steps,
    spending,
)
from torchtitan_dp.ledger.spending import epsilon as epsilon_of
from torchtitan_dp.privacy.accounting import EpsilonCurve, rounded_up
from torchtitan_dp.privacy.meaning import Meaning, meaning
from torchtitan_dp.privacy.segments import Mechanism, Segment, composition, dp_event


class Account:
    """The epsilons of a run while it trains, from one start or load on to `total_steps`."""

    def __init__(self, lineage: Lineage, total_steps: int) -> None:
        """
        Args:
            lineage: at the start, with lost steps entered.
            total_steps: `training.steps`.
        """
        self._first, self._total = lineage, max(total_steps, lineage.steps)

    def epsilon(self, lineage: Lineage) -> float:
        """Return the epsilon of the lineage; infinite if it is not private."""
        return self._taken.at(lineage.steps) if lineage.composes else math.inf

    def epsilon_executed(self, lineage: Lineage) -> float:
        """Return the epsilon of all executed steps of the folder, as published."""
        return self._executed.at(lineage.steps) if lineage.composes else math.inf

    def epsilon_planned(self, lineage: Lineage) -> float:
        """Return the epsilon of those steps and of the steps that are still planned."""
        if not lineage.composes:
            return math.inf
        planned = compose(lineage, spending(lineage, lost=True, planned=True))
        return max(planned, self.epsilon_executed(lineage))

    def beside_epsilon(self, lineage: Lineage, target: float | None) -> str:
        """Return the words beside epsilon in a step's line: with lost steps, and the target."""
        epsilon, executed = self.epsilon(lineage), self.epsilon_executed(lineage)
        lost = f"with lost steps {rounded_up(executed)}" if executed > epsilon else ""
        return ", ".join(filter(None, (lost, "" if target is None else f"target {target:g}")))

    def publish(self, lineage: Lineage, folder: str) -> dict[str, Any]:
        """Write `privacy.json` atomically and return its content.

        The file is true of every checkpoint in the folder: none is further than these weights,
        which were loaded from the newest.
        """
        taken, executed, planned = self._epsilons(lineage)
        steps = spending(lineage, lost=True, planned=True)
        content = described(lineage, (taken, executed, planned), steps, planned, claimed=taken)
        write_published(folder, content)
        return content

    def exported(self, lineage: Lineage) -> dict[str, Any]:
        """Return the `privacy.json` of weights that are exported now, in the form of a release."""
        _, executed, planned = self._epsilons(lineage)
        steps = spending(lineage, lost=True, planned=True)
        return released(lineage, (executed, planned), "planned_steps", steps, planned)

    def _epsilons(self, lineage: Lineage) -> tuple[float, float, float]:
        """Return the epsilon of the lineage, of all executed steps, and of all planned ones."""
        epsilon = self.epsilon(lineage)
        executed = max(self.epsilon_executed(lineage), epsilon)
        return epsilon, executed, max(self.epsilon_planned(lineage), executed)

    @functools.cached_property
    def _taken(self) -> EpsilonCurve:
        return self._curve(initial_steps(self._first))

    @functools.cached_property
    def _executed(self) -> EpsilonCurve:
        begun = all_but_own(self._first)
        return self._taken if begun == initial_steps(self._first) else self._curve(begun)

    def _curve(self, beside: list[Segment]) -> EpsilonCurve:
        """Return a curve over this run's steps beside others. Its points follow from the number of
        planned steps, not from the step at which this start began, which a clock may have
        decided."""
        settings = self._first.settings
        return EpsilonCurve(
            beside,
            settings.mechanism,
            delta=settings.delta,
            accountant=settings.accountant,
            total_steps=self._total,
            first_step=self._first.steps,
        )


def released(
    lineage: Lineage,
    begun: tuple[float, float],
    counts: str,
    steps: list[Segment],
    epsilon: float,
    stated: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the `privacy.json` of weights that are released or exported.

    Args:
        begun: the epsilon of all executed steps, and of all planned ones.
        counts: the schema's name of the steps that the release claims.
        steps, epsilon: those steps, and their epsilon.
        stated: the owner's statements, which become caveats.
    """
    taken = epsilon_of(lineage) if lineage.composes else math.inf
    return described(lineage, (taken, *begun), steps, epsilon, stated=stated, counts=counts)


def described(
    lineage: Lineage,
    epsilons: tuple[float, float, float],
    steps: list[Segment],
    epsilon: float,
    *,
    claimed: float | None = None,
    stated: Sequence[str] = (),
    counts: str | None = None,
) -> dict[str, Any]:
    """Return the content of a `privacy.json`; epsilons are infinite where there is no privacy.

    Args:
        epsilons: of the steps taken, of all executed, and of all planned ones.
        steps, epsilon: the steps behind `meaning` and `dp_event`, and their epsilon.
        claimed: the value of the key `epsilon`, if it is not that one.
        counts: for a release alone, as in `released`.
    """
    taken, executed, planned = epsilons
    found, claimed = explain(lineage, steps, epsilon), epsilon if claimed is None else claimed
    values = {
        "epsilon": claimed if lineage.private else None,
        "epsilon_planned": planned if lineage.composes else None,
        "epsilon_executed": executed if lineage.composes else None,
        "heldout_epsilon": published_heldout_epsilon(lineage),
        "caveats": [*caveats(lineage, taken, planned), *stated],
        "meaning": None if found is None else found.to_json(),
        "dp_event": dp_event(composition(steps)) if lineage.composes else None,
        "assumptions": assumptions(lineage),
        "step_names": " ".join(lineage.names()),
        "steps_executed": lineage.steps_executed,
        "versions": versions(),
        "source": source(),
    }
    if counts is not None:
        values["epsilon_counts"] = counts
    return schema.assemble(lineage, values, release=counts is not None)


def without_privacy(lineage: Lineage) -> dict[str, Any]:
    """Return the `privacy.json` of a run without privacy."""
    return described(lineage, (math.inf, math.inf, math.inf), [], math.inf)


def published_heldout_epsilon(lineage: Lineage) -> float | None:
    """Return the epsilon of all held-out losses that were or will be published; None if there are
    none, or nothing here is private."""
    if lineage.heldout_losses is None or not lineage.private:
        return None
    return heldout_epsilon(lineage)


def explain(lineage: Lineage, segments: list[Segment], epsilon: float) -> Meaning | None:
    """Return the meaning of an epsilon for one person; None where there is no privacy."""
    if not lineage.composes or not math.isfinite(epsilon):
        return None
    return meaning(segments, lineage.settings.delta)


def in_words(mechanism: Mechanism) -> list[str]:
    """Return how norms were estimated and how noise depends on earlier steps', for a console;
    nothing of exact norms and independent noise."""
    k, capped = mechanism.projections, mechanism.capped_projections
    norms = f"norms from {k or capped} projections" + (", capped" if capped else "")
    noise = f"noise correlated over steps, {mechanism.period} bands"
    return [*([norms] if k or capped else []), *([noise] if mechanism.period > 1 else [])]


def summary(spent: dict[str, Any]) -> list[str]:
    """Return the lines that end a run's console, from its `privacy.json`."""
    epsilon = f"epsilon = {rounded_up(spent['epsilon'])}" if spent["private"] else "NOT private"
    how = "".join(f"{words}, " for words in in_words(Mechanism.from_fields(spent)))
    lines = [
        f"done: {spent['steps']} steps",
        f"privacy: {epsilon}, delta = {spent['delta']:g} "
        f"(sigma = {spent['noise_multiplier']:.4f}, q = {spent['sample_rate']:.5f}, "
        f"C = {spent['max_grad_norm']:g}, {how}{spent['accountant']}; unit: one "
        f"{spent['privacy_unit']}; neighbours: {spent['neighbouring_relation']})",
    ]
    if spent["private"] and spent["steps_executed"] > spent["steps"]:
        lines.append(
            f"with steps lost in crashes: epsilon = "
            f"{rounded_up(spent['epsilon_executed'])}, for {spent['steps_executed']} steps"
        )
    losses = spent["heldout_losses"]
    if spent["private"] and losses is not None and losses["losses"]:
        step, loss, deviation = losses["losses"][-1]
        lines.append(
            f"held-out loss to publish: {loss:.4f} after step {step}, with noise of standard "
            f"deviation {deviation:.2g}; epsilon = {rounded_up(spent['heldout_epsilon'])}, "
            f"delta = {losses['delta']:g} for a held-out unit"
        )
    return [*lines, *(f"caveat: {caveat}" for caveat in spent["caveats"])]


_NAME = "torchtitan-dp"
_LIBRARIES = (
    _NAME,
    "torch",
    "torchtitan",
    "opacus",
    "dp-accounting",
    "PLD_accounting",
    "numpy",
    "scipy",
    "jinja2",
)
_GIT_TIMEOUT_S = 10


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that the guarantee rests on, this package included."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on a path, not installed
            found[name] = "unknown"
    return found


@functools.cache
def source() -> dict[str, Any]:
    """Return this package's name and version, the commit of its checkout, and whether its files
    differ from that; the latter two are None outside of a checkout, and where git fails."""
    commit = _git("rev-parse", "HEAD")
    tracked = commit is not None and _git("ls-files", "--", __file__)
    changes = _git("status", "--porcelain", "--", "..") if tracked else None
    return {
        "name": _NAME,
        "version": versions()[_NAME],
        "commit": commit if tracked else None,
        "modified": changes != "" if changes is not None else None,
    }


def _git(*arguments: str) -> str | None:
    """Return the output of a git command, run where this file lies; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
