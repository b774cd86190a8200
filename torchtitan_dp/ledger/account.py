"""The spending of a run while it trains, computed ahead at a few points, and its `privacy.json`.

Guarantee:
    `epsilon` is of the weights' own lineage, `epsilon_executed` of every step ever begun in the
    folder, `epsilon_planned` of those and of all that are still planned. None is ever below
    `Ledger.compose` of its steps. The first two are computed once for a few points ahead, and a
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
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.caveats import assumptions, caveats
from torchtitan_dp.ledger.files import write_published
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.privacy.accounting import EpsilonCurve, rounded_up
from torchtitan_dp.privacy.meaning import Meaning, meaning
from torchtitan_dp.privacy.mechanism import Segment, composition, from_fields
from torchtitan_dp.privacy.segments import dp_event


class Account:
    """Account for the steps after one start, which go on from the ledger to `total_steps`."""

    def __init__(self, ledger: Ledger, total_steps: int) -> None:
        """
        Args:
            ledger: with lost steps entered.
            total_steps: `training.steps`.
        """
        self._ledger, self._total = ledger, total_steps

    def epsilon(self) -> float:
        """Return the epsilon of the lineage; infinite if it is not private."""
        return self._at(self._lineage_curve, self._ledger.taken_in_all)

    def beside_epsilon(self, target: float | None) -> str:
        """Return the words beside epsilon in a step's line: with lost steps, and the target."""
        epsilon, executed = self.epsilon(), self.epsilon_executed()
        lost = f"with lost steps {rounded_up(executed)}" if executed > epsilon else ""
        return ", ".join(filter(None, (lost, "" if target is None else f"target {target:g}")))

    def epsilon_executed(self) -> float:
        """Return the epsilon of all executed steps of the folder, as published."""
        return self._at(self._executed_curve, self._ledger.executed)

    def epsilon_planned(self) -> float:
        """Return the epsilon of those steps and of the steps that are still planned."""
        return max(self._composed(self._ledger.planned()), self.epsilon_executed())

    def publish(self, folder: str) -> dict[str, Any]:
        """Write `privacy.json` atomically and return its content.

        The file is true of every checkpoint in the folder: none is further than these weights,
        which were loaded from the newest.
        """
        ledger = self._ledger
        epsilon, executed, planned = self._epsilons()
        content = schema.assemble(
            ledger,
            {
                "epsilon": epsilon if ledger.private else None,
                "epsilon_executed": executed if ledger.composes else None,
                "epsilon_planned": planned if ledger.composes else None,
                "heldout_epsilon": heldout_epsilon(ledger),
                "caveats": caveats(ledger, epsilon, planned),
                **terms_in_words(ledger, ledger.planned(), planned),
            },
        )
        write_published(folder, content)
        return content

    def exported(self) -> dict[str, Any]:
        """Return the `privacy.json` of weights that are exported now, in the form of a release."""
        _, executed, planned = self._epsilons()
        return released(
            self._ledger,
            epsilon=planned,
            counts="planned_steps",
            steps=self._ledger.planned(),
            executed=executed,
            planned=planned,
        )

    def _epsilons(self) -> tuple[float, float, float]:
        """Return the epsilon of the lineage, of all executed steps, and of all planned ones."""
        epsilon = self.epsilon()
        executed = max(self.epsilon_executed(), epsilon)
        return epsilon, executed, max(self.epsilon_planned(), executed)

    def _composed(self, steps: list[Segment]) -> float:
        """Return the epsilon of these steps; infinite if they are not private."""
        return self._ledger.compose(steps) if self._ledger.composes else math.inf

    def _at(self, curve: EpsilonCurve | None, steps: Callable[[], list[Segment]]) -> float:
        """Return the spending of these steps, from the curve, if any: no logged step waits."""
        if not self._ledger.composes or curve is None:
            return self._composed(steps())
        return curve.at(self._own_steps())

    @functools.cached_property
    def _lineage_curve(self) -> EpsilonCurve | None:
        return self._curve()

    @functools.cached_property
    def _executed_curve(self) -> EpsilonCurve | None:
        ledger = self._ledger
        lost = [ledger.published_lost(), *ledger.lost_before(), *ledger.evaluations_before()]
        return self._curve(*lost) if any(part.steps for part in lost) else self._lineage_curve

    def _curve(self, *lost: Segment) -> EpsilonCurve | None:
        """Return a curve over this run's steps on the present terms, beside lost ones.

        Its points follow from the number of these steps, not from the step at which this start
        began, which a clock may have decided.
        """
        settings, own = self._ledger.settings, self._own_steps()
        present = settings.mechanism.as_logged()
        taken = self._ledger.taken()
        on_present = {step for step in taken if step.mechanism.at_any() == present}
        if present.period > 1:
            on_present = set(taken[len(taken) - own :])
        beside = union({*self._ledger.taken_before(), *taken} - on_present)
        return EpsilonCurve(
            [*beside, *lost],
            present,
            delta=settings.delta,
            accountant=settings.accountant,
            total_steps=own + max(self._total - self._ledger.steps, 0),
            first_step=own,
        )

    def _own_steps(self) -> int:
        """Count this run's steps on the present terms; of correlated noise only those in a row."""
        present = self._ledger.settings.mechanism.as_logged()
        if present.period > 1:
            return self._ledger.segments()[-1].steps
        spent = (segment.spending() for segment in self._ledger.segments())
        return sum(s.steps for s in spent if s.mechanism == present)


def released(
    ledger: Ledger,
    *,
    epsilon: float,
    counts: str,
    steps: list[Segment],
    executed: float,
    planned: float,
    stated: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the `privacy.json` that leaves with weights.

    Args:
        epsilon: that is claimed, of `steps`; infinite if they are not private.
        counts: the name of these steps, as the schema has it.
        executed, planned: the epsilon of all executed steps, and of all planned ones.
        stated: by the owner.
    """
    private = ledger.private
    taken = ledger.epsilon() if ledger.composes else math.inf
    return schema.assemble(
        ledger,
        {
            "epsilon": epsilon if private else None,
            "epsilon_counts": counts,
            "epsilon_planned": planned if ledger.composes else None,
            "epsilon_executed": executed if ledger.composes else None,
            "heldout_epsilon": heldout_epsilon(ledger),
            "caveats": [*caveats(ledger, taken, planned), *stated],
            **terms_in_words(ledger, steps, epsilon),
        },
        release=True,
    )


def heldout_epsilon(ledger: Ledger) -> float | None:
    """Return the epsilon of all held-out losses that were or will be published; None if there are
    none, or nothing here is private."""
    if ledger.heldout_losses is None or not ledger.private:
        return None
    return ledger.heldout_epsilon()


def terms_in_words(ledger: Ledger, segments: list[Segment], epsilon: float) -> dict[str, Any]:
    """Return the values of `privacy.json` that are the same for a run and for a release.

    Args:
        segments, epsilon: steps and their epsilon; infinite if they are not private.
    """
    found = explain(ledger, segments, epsilon)
    return {
        "meaning": None if found is None else found.to_json(),
        "dp_event": dp_event(composition(segments)) if ledger.composes else None,
        "assumptions": assumptions(ledger),
        "segments": [segment.fields() for segment in ledger.segments()],
        "step_names": " ".join(ledger.names()),
        "steps_executed": ledger.steps_executed,
        "versions": versions(),
        "source": source(),
    }


def explain(ledger: Ledger, segments: list[Segment], epsilon: float) -> Meaning | None:
    """Return the meaning of an epsilon for one person; None where there is no privacy."""
    if not ledger.composes or not math.isfinite(epsilon):
        return None
    return meaning(segments, ledger.settings.delta)


def summary(spent: dict[str, Any]) -> list[str]:
    """Return the lines that end a run's console, from its `privacy.json`."""
    epsilon = f"epsilon = {rounded_up(spent['epsilon'])}" if spent["private"] else "NOT private"
    mechanism = from_fields(spent)
    how = "".join(f"{words}, " for words in (mechanism.norms, mechanism.noise) if words)
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
_LIBRARIES = (_NAME, "torch", "torchtitan", "opacus", "dp-accounting", "numpy", "scipy", "jinja2")
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
