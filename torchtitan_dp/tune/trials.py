"""The trials of a search, what marks their folders, and the noise that all of them together need.

Guarantee:
    - `find_noise` looks at configurations and public numbers alone, before any trial begins.
      `spent_within` composes the trials' own ledgers, as `python -m torchtitan_dp.ledger` does: a
      unit that is trained on pays all steps, planned and lost ones included, and one that is held
      out all published losses, each at most the target. Every start has root keys of its own.
    - Each trial's folder has a mark (`trial.json`) from before the first trial begins. A folder
      without it, two copies of one run, and a run beside the trials are refused: they may have
      spent what no sum counts.
    - `result_of` reads `privacy.json` alone, and of it published losses alone.
"""

import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE, spending
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.schema import TRIAL_FILE, read_published
from torchtitan_dp.ledger.spending import Run, Total, inherited
from torchtitan_dp.preflight.check import Checked, check_run
from torchtitan_dp.privacy import published_loss
from torchtitan_dp.privacy.accounting import noise_for, rounded_up
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.process import write_atomically

_SECTIONS = ("optimizer", "lr_scheduler", "lora", "ema")
_KEYS = (
    *("training.global_batch_size", "training.steps"),
    *("privacy.noise", "privacy.bands", "privacy.max_grad_norm"),
)
_TIGHT, _MOST_GUESSES = 0.99, 30  # the share of the target that is spent at least


class Trial(NamedTuple):
    """One run of a search."""

    name: str
    folder: str
    keys: dict[str, str]  # that it tries, with their values

    @property
    def options(self) -> list[str]:
        """The keys on a command line."""
        return [f"--{key}={value}" for key, value in self.keys.items()]


class Noise(NamedTuple):
    """The noise of all trials, fixed before the first."""

    multipliers: list[float]  # sigma of each
    epsilon_of_loss: float  # of each published loss


class Result(NamedTuple):
    """A trial's published loss, after its last step."""

    trial: Trial
    loss: float  # nats
    deviation: float  # standard deviation of its noise


@dataclass(frozen=True)
class Search:
    """The trials of one configuration."""

    shared: list[str]  # the command line of all
    trials: list[Trial]
    config: JobConfig  # without what is tried
    world_size: int
    folder: str  # of all trials

    @classmethod
    def of(cls, shared: list[str], tries: Sequence[str], world_size: int) -> "Search":
        """Return the trials of all combinations of what `--try` lists; ValueError, one line."""
        combinations = grid(tries)
        config = load_config(shared, world_size)
        if not config.privacy.enable:
            raise ValueError(
                "privacy.enable = false: a search without privacy spends nothing; set it to true"
            )
        if config.privacy.debug_seed is not None:
            raise ValueError(
                f"privacy.debug_seed = {config.privacy.debug_seed}: all trials would draw the same "
                "noise, which their weights would show together; remove it"
            )
        delta = config.validation.publish_delta
        if delta not in (None, config.privacy.delta):
            raise ValueError(
                f"validation.publish_delta = {delta}: a search has one, privacy.delta; omit it"
            )
        folder = f"{config.job.dump_folder.rstrip('/')}_tune"
        trials = [
            Trial(f"trial_{number}", f"{folder}/trial_{number}", keys)
            for number, keys in enumerate(combinations, start=1)
        ]
        return cls(shared, trials, config, world_size, folder)

    def arguments(self, trial: Trial, noise: Noise) -> list[str]:
        """Return a trial's command line: with this noise, and a published loss after its last step,
        of all held-out units."""
        steps = trial.keys.get("training.steps", self.config.training.steps)
        return [
            *self.shared,
            *trial.options,
            f"--job.dump_folder={trial.folder}",
            "--privacy.target_epsilon=None",
            f"--privacy.noise_multiplier={noise.multipliers[self.trials.index(trial)]!r}",
            *("--validation.enable", "--validation.steps=-1", f"--validation.freq={steps}"),
            f"--validation.publish_epsilon={noise.epsilon_of_loss!r}",
            "--checkpoint.no-last_save_in_hf",
        ]

    def check(self, noise: Noise) -> list[Checked]:
        """Check all trials as their starts will, before any begins; ValueError, one line."""
        found = []
        for trial in self.trials:
            try:
                config = load_config(self.arguments(trial, noise), self.world_size)
                found.append(check_run(config))
            except ValueError as mistake:
                raise ValueError(f"{' '.join(trial.options)}: {mistake}") from None
        return found

    def mark(self, noise: Noise) -> None:
        """Make the trials' folders, each with its mark."""
        for trial in self.trials:
            os.makedirs(trial.folder, mode=0o700, exist_ok=True)
            text = json.dumps(self._mark(trial, noise), indent=2)
            write_atomically(os.path.join(trial.folder, TRIAL_FILE), text.encode() + b"\n")

    def noise(self, epsilon: float) -> Noise:
        """Return the noise of all trials: that of their marks, or found for a new search.

        Raises:
            ValueError: one line; a trial is gone or a copy, there is a run beside them, or the
                marks are of another search; or as `find_noise`.
        """
        if not 0 < epsilon < math.inf:
            raise ValueError(f"--epsilon = {epsilon}: must be a positive number (2, say)")
        marks = {trial.name: _read_mark(trial) for trial in self.trials}
        known = next(filter(None, marks.values()), {})
        noise = Noise(known.get("noise", []), known.get("epsilon_of_loss", 0.0))
        if any(marks[one.name] not in ({}, self._mark(one, noise)) for one in self.trials):
            raise ValueError(
                f"'{self.folder}': the search there has another configuration or other trials; "
                "give its own command, or this one another job.dump_folder"
            )
        for path in sorted(Path(self.folder).glob("*/")):
            is_run = (path / PRIVACY_FILE).exists() or (path / EXECUTED_FILE).exists()
            if is_run and not marks.get(path.name):
                raise ValueError(
                    f"'{path}' is a run, but no trial of this search: restore its {TRIAL_FILE}, or "
                    "move it elsewhere, where what it spent still counts beside this search "
                    "(python -m torchtitan_dp.ledger adds up)"
                )
        if not known:
            return self.find_noise(epsilon)
        for trial in self.trials:
            if not marks[trial.name]:
                raise ValueError(
                    f"'{trial.folder}': this trial of the search is not there, and may have spent "
                    "its epsilon; restore it, or start afresh in another job.dump_folder"
                )
        ledgers = [one for trial in self.trials if (one := read_published(trial.folder))]
        if len({one.run for one in ledgers}) < len(ledgers):
            raise ValueError(
                f"'{self.folder}': two of its trials are copies of one run; restore both"
            )
        return noise

    def _mark(self, trial: Trial, noise: Noise) -> dict[str, Any]:
        """Return the content of a trial's mark."""
        toml = Path(self.config.job.config_file or "").read_bytes()
        return {
            "trial": trial.name,
            "trials": [one.keys for one in self.trials],
            "config": hashlib.sha256(toml).hexdigest(),
            "command_line": self.shared,
            "noise": noise.multipliers,
            "epsilon_of_loss": noise.epsilon_of_loss,
        }

    def find_noise(self, target: float) -> Noise:
        """Find the noise with which all trials together spend at most the target, and at least 99%
        of it.

        Raises:
            ValueError: one line, as `check`; or there is no such noise.
        """
        checked = self.check(Noise([1.0] * len(self.trials), 1.0))
        ledgers = [one.plan.ledger for one in checked if one.plan is not None]
        try:
            return Noise(split(ledgers, target)[1], _epsilon_of_loss(ledgers, target))
        except ValueError as mistake:
            raise ValueError(f"--epsilon = {target:g}, of all trials: {mistake}") from None

    def spent_within(self, epsilon: float, checked: list[Checked]) -> Total:
        """Return what all trials spend together; raise ValueError, one line, if that is above
        epsilon, as where a crash lost steps."""
        spent = spending.total(
            [
                Run(trial.folder, one.plan.ledger, one.records.fingerprint)
                for trial, one in zip(self.trials, checked, strict=True)
                if one.plan is not None
            ]
        )
        if spent.epsilon_planned is None or spent.heldout_epsilon is None:
            raise ValueError(
                f"'{self.folder}': a trial there is not private, so that no epsilon covers the "
                "search; start afresh in another job.dump_folder"
            )
        if (most := max(spent.epsilon_planned, spent.heldout_epsilon)) > epsilon:
            raise ValueError(
                f"--epsilon = {epsilon:g}: the noise of all trials is fixed, and together, with "
                f"what crashes lost, they would spend {rounded_up(most)}; raise it to go on"
            )
        return spent


def _read_mark(trial: Trial) -> dict[str, Any]:
    """Return the content of a trial's mark; nothing if there is none."""
    path = Path(trial.folder, TRIAL_FILE)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it") from error


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


def grid(tries: Sequence[str]) -> list[dict[str, str]]:
    """Return all combinations of what is tried, each as values by key.

    >>> grid(["optimizer.lr=1e-3,3e-3"])
    [{'optimizer.lr': '1e-3'}, {'optimizer.lr': '3e-3'}]
    >>> grid(["training.global_batch_size/training.steps=64/50,128/25"])[1]
    {'training.global_batch_size': '128', 'training.steps': '25'}

    Raises:
        ValueError: one line; it cannot be read, or two trials would be the same.
    """
    axes, names = [], []
    for text in tries:
        before, _, after = text.partition("=")
        keys, rows = before.split("/"), [row.split("/") for row in after.split(",")]
        if any(len(row) != len(keys) or "" in row for row in rows):
            raise ValueError(
                f"--try = '{text}': write KEY=VALUE,VALUE or, for keys that change together, "
                "KEY/KEY=VALUE/VALUE,VALUE/VALUE"
            )
        for key in keys:
            if key not in _KEYS and key.split(".")[0] not in _SECTIONS:
                raise ValueError(
                    f"--try = '{text}': {key} is not tried, since losses or records of its trials "
                    f"might not compare; use {', '.join(f'{one}.…' for one in _SECTIONS)}, "
                    f"{', '.join(_KEYS)}"
                )
        names += keys
        axes.append([dict(zip(keys, row, strict=True)) for row in rows])
    if len(set(names)) < len(names):
        raise ValueError(f"--try: {max(names, key=names.count)} is there twice; list it once")
    found = [
        {key: value for part in parts for key, value in part.items()}
        for parts in itertools.product(*axes)
    ]
    if repeated := [keys for keys in found if found.count(keys) > 1]:
        same = ", ".join(f"{key}={value}" for key, value in repeated[0].items())
        raise ValueError(f"--try: {same} is there twice, and would spend twice; list it once")
    if len(found) < 2:
        raise ValueError("--try: there is nothing to compare; list two values or more")
    return found


def split(ledgers: Sequence[Lineage], target: float) -> tuple[float, list[float]]:
    """Find the epsilon that each trial's own steps spend, the same for all, and the noise
    multipliers: all trials together spend at most the target, and at least 99% of it.

    Raises:
        ValueError: what comes before the trials spends more, or a noise is out of range.
    """
    terms = ledgers[0].settings

    @functools.cache
    def multiplier(mechanism: Mechanism, steps: int, epsilon: float) -> float:
        return noise_for(
            mechanism, steps, target_epsilon=epsilon, delta=terms.delta, accountant=terms.accountant
        )

    before = terms.compose([*inherited(ledgers[0].ancestors)])
    if not before < target:
        raise ValueError(f"the initial weights have spent {rounded_up(before)}; raise it")
    low, high, each = 0.0, target, target / math.sqrt(len(ledgers))
    for _ in range(_MOST_GUESSES):
        found = [multiplier(one.settings.mechanism, one.planned_steps, each) for one in ledgers]
        spent = total(list(map(_with_noise, ledgers, found)))
        if spent.epsilon_planned is None:
            raise ValueError("the trials' weights are not private; see the plan of one for why")
        if _TIGHT * target <= spent.epsilon_planned <= target:
            return each, found
        low, high = (each, high) if spent.epsilon_planned < target else (low, each)
        # What many runs spend grows about as what each does.
        share = (spent.epsilon_planned - before) / ((1 + _TIGHT) / 2 * target - before)
        guess = each / share if share > 0 else high
        each = guess if low < guess < high else (low + high) / 2
    raise ValueError("the initial weights have spent nearly as much; raise it")


def _with_noise(ledger: Lineage, multiplier: float) -> Lineage:
    """Return a ledger with another noise, and without a held-out loss."""
    mechanism = ledger.settings.mechanism.with_noise(multiplier)
    settings = replace(ledger.settings, mechanism=mechanism)
    return replace(ledger, settings=settings, heldout_loss=None)


def _epsilon_of_loss(ledgers: Sequence[Lineage], target: float) -> float:
    """Find the epsilon of each published loss alone with which those of all trials, one each, spend
    at most the target."""
    first = ledgers[0]
    sigma = noise_for(
        Mechanism(1.0, 1.0),
        len(ledgers),
        target_epsilon=target,
        delta=first.settings.delta,
        accountant="pld",
        before=inherited(first.ancestors),
    )
    return published_loss.epsilon(published_loss.releases(sigma, 1), delta=first.settings.delta)


def total(ledgers: Sequence[Lineage]) -> Total:
    """Return what runs on the same records spend together, planned steps and losses included."""
    return spending.total([Run(one.run, one, "") for one in ledgers])
