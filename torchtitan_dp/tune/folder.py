"""What the folder of a search keeps of it, and the published losses of its trials.

Guarantee:
    A trial that has begun is known by the name of its run, so that one whose folder is gone, or is
    another's, is refused, as is a run beside the trials: they may have spent what no sum counts.
    `result_of` reads `privacy.json` alone, and of it published losses alone.
"""

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_dp.ledger.log import EXECUTED_FILE
from torchtitan_dp.ledger.schema import PRIVACY_FILE, TRIAL_FILE, read_published
from torchtitan_dp.ledger.spending import Run, Total, total
from torchtitan_dp.preflight.check import Checked
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.process import write_atomically
from torchtitan_dp.tune.trials import Noise, Search, Trial

SEARCH_FILE = "tune.json"


@dataclass
class State:
    """What a search's folder keeps of it, so that no trial is repeated or left out of the sum."""

    asked: list[Any]  # what it was started with
    noise: Noise
    each: float  # the epsilon of every trial's own steps
    begun: dict[str, str]  # the names of the ledgers' runs, by trial; "" until one is known

    @classmethod
    def read(cls, folder: str) -> "State | None":
        """Return that of a folder, if a search was started there."""
        path = Path(folder, SEARCH_FILE)
        if not path.exists():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**fields, "noise": Noise(**fields["noise"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}): restore it") from error

    def write(self, folder: str) -> None:
        """Keep it."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        write_atomically(os.path.join(folder, SEARCH_FILE), text.encode() + b"\n")


def state_of(search: Search, epsilon: float) -> State:
    """Return what the folder keeps of this search, or what a new one will; ValueError, one line."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"--epsilon = {epsilon}: must be a positive number (2, say)")
    known = State.read(search.folder)
    toml = Path(search.config.job.config_file or "").read_bytes()
    asked = [hashlib.sha256(toml).hexdigest(), search.shared, [one.keys for one in search.trials]]
    if known is not None and known.asked != asked:
        raise ValueError(
            f"'{search.folder}': the search there has another configuration or other trials; give "
            "its own command, or this one another job.dump_folder"
        )
    names = {trial.name for trial in search.trials} if known is not None else set()
    for path in sorted(Path(search.folder).glob("*/")):
        if path.name not in names and any(
            (path / f).exists() for f in (PRIVACY_FILE, EXECUTED_FILE)
        ):
            raise ValueError(
                f"'{path}' is a run, but no trial of this search: restore {SEARCH_FILE}, or move "
                "it elsewhere, where what it spent still counts beside this search (python -m "
                "torchtitan_dp.ledger adds up)"
            )
    if known is None:
        known = State(asked, *search.find_noise(epsilon), {})
    remember(search, known)
    return known


def name_of(trial: Trial) -> str | None:
    """Return the name of a trial's run, once its ledger has begun."""
    published = read_published(trial.folder)
    return None if published is None else published.run


def remember(search: Search, state: State) -> None:
    """Enter the trials that have begun; raise ValueError, one line, if one is no longer there."""
    for trial in search.trials:
        run = name_of(trial)
        before = state.begun.get(trial.name)
        is_gone = before is not None and not Path(trial.folder, TRIAL_FILE).is_file()
        if is_gone or (before and run != before):
            raise ValueError(
                f"'{trial.folder}': the run {before} that this search began is not there, and may "
                "have spent its epsilon; restore it, or start afresh in another job.dump_folder"
            )
        if run is not None:
            state.begun[trial.name] = run
    runs = [*filter(None, state.begun.values())]
    if len({*runs}) < len(runs):
        raise ValueError(
            f"'{search.folder}': two of its trials are copies of one run; restore both"
        )


def spent_within(epsilon: float, search: Search, checked: list[Checked]) -> Total:
    """Return what all trials spend together; raise ValueError, one line, if that is above epsilon,
    as where a crash lost steps."""
    together = [
        Run(trial.folder, one.plan.ledger, one.records.fingerprint)
        for trial, one in zip(search.trials, checked, strict=True)
        if one.plan is not None
    ]
    spent = total(together)
    if spent.epsilon_planned is None or spent.heldout_epsilon is None:
        raise ValueError(
            f"'{search.folder}': a trial there is not private, so that no epsilon covers the "
            "search; start afresh in another job.dump_folder"
        )
    if (most := max(spent.epsilon_planned, spent.heldout_epsilon)) > epsilon:
        raise ValueError(
            f"--epsilon = {epsilon:g}: the noise of all trials is fixed, and together, with what "
            f"crashes lost, they would spend {rounded_up(most)}; raise it to go on"
        )
    return spent


class Result(NamedTuple):
    """A trial's published loss, after its last step."""

    trial: Trial
    loss: float  # nats
    deviation: float  # standard deviation of its noise


def result_of(trial: Trial) -> Result | None:
    """Return the published loss after a trial's last step; None if it is not done."""
    ledger = read_published(trial.folder)
    if ledger is None or ledger.left or ledger.heldout_loss is None:
        return None
    noised = ledger.heldout_loss.noised
    if noised is None or noised.step != ledger.steps:
        return None
    return Result(trial, noised.loss, noised.standard_deviation)


def alike(results: list[Result]) -> list[Result]:
    """Return the results, of sorted ones, that noise may have put behind the first: those less than
    two standard deviations of a difference away."""
    best, *others = results
    return [
        one
        for one in others
        if one.loss - best.loss < 2 * math.hypot(one.deviation, best.deviation)
    ]
