"""Search for a recipe by published held-out losses alone, at an epsilon of all trials together.

    python -m torchtitan_dp.tune --job.config_file FILE --epsilon E --try KEY=VALUE,VALUE …
                                 [--section.key value …] [--plan] [--json FILE]

Every combination of the values is a trial: a run of its own, by the ordinary launcher, in
`trial_N` of the folder `job.dump_folder` with `_tune`. Before the first one the noise of all is
fixed, and what they will spend together is printed; `--plan` ends there. The same command goes on
where it was stopped: a trial that is done is not run again. Exit code 75 if it was asked to stop, 1
if a trial failed, 2 for a user's mistake.

Guarantee:
    - Trials are compared by the published losses in their `privacy.json`; nothing else of their
      outputs is read but their ledgers.
    - The noise follows from configurations and public numbers alone, before any trial begins.
    - `Search.spent_within` composes the trials' own ledgers, as `torchtitan-dp ledger`
      does, before a search begins and each time before it goes on: a unit that is trained on pays
      all steps, planned and lost ones included, and one that is held out all published losses, each
      at most `--epsilon`. Every start has root keys of its own.
    - Each trial's folder has a mark (`trial.json`) from before the first trial begins. A folder
      without it, two copies of one run, and a run beside the trials are refused: they may have
      spent what no sum counts.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("tune", __doc__)

# isort: split
from torchtitan_dp.base.process import lock_folder, processes_asked, typed, write_atomically
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, results, write_json
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.distributed.devices import default_processes
from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.schema import TRIAL_FILE, read_published
from torchtitan_dp.ledger.spending import Run, Total, inherited, total
from torchtitan_dp.privacy import published_loss
from torchtitan_dp.privacy.accounting import noise_for, rounded_up
from torchtitan_dp.train.check import check_run

TELLS_APART = 0.3
"""The difference of two trials' losses, in nats, that a search must show, a heuristic."""

_EXIT_MISTAKE, _EXIT_STOPPED = 2, 75  # of the launcher
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
        """List the trials of all combinations of `--try`; ValueError, one line."""
        combinations = grid(tries)
        config = load_config(shared, world_size)
        if not config.privacy.enable:
            raise ValueError("privacy.enable = false: a search spends nothing then; set it to true")
        if config.privacy.debug_seed is not None:
            seed = config.privacy.debug_seed
            raise ValueError(f"privacy.debug_seed = {seed}: all trials have one noise; remove it")
        delta = config.validation.publish_delta
        if delta not in (None, config.privacy.delta):
            raise ValueError(f"validation.publish_delta = {delta}: a search has one delta; omit it")
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

    def check(self, noise: Noise) -> list[tuple[Plan, Records]]:
        """Check all trials as their starts will, before any begins; ValueError, one line."""
        found = []
        for trial in self.trials:
            try:
                checked = check_run(load_config(self.arguments(trial, noise), self.world_size))
            except ValueError as mistake:
                raise ValueError(f"{trial.name}, {' '.join(trial.options)}: {mistake}") from None
            assert checked.plan is not None  # with privacy
            found.append((checked.plan, checked.records))
        return found

    def noise(self, epsilon: float) -> Noise:
        """Return the noise of all trials: that of their marks, or found for a new search. With it
        they spend at most epsilon together, and at least 99% of it.

        Raises:
            ValueError: one line; a trial is gone or a copy, there is a run beside them, the marks
                are of another search, or there is no such noise.
        """
        if not 0 < epsilon < math.inf:
            raise ValueError(f"--epsilon = {epsilon}: must be a positive number (2, say)")
        marks = {trial.name: _read_mark(trial) for trial in self.trials}
        known = next(filter(None, marks.values()), {})
        noise = Noise(known.get("noise", []), known.get("epsilon_of_loss", 0.0))
        if any(marks[one.name] not in ({}, self.mark(one, noise)) for one in self.trials):
            raise ValueError(
                f"'{self.folder}': the search there has another configuration or other trials; "
                "give its own command, or this one another job.dump_folder"
            )
        for path in sorted(Path(self.folder).glob("*/")):
            is_run = (path / PRIVACY_FILE).exists() or (path / EXECUTED_FILE).exists()
            if is_run and not marks.get(path.name):
                raise ValueError(
                    f"'{path}' is a run, but no trial of this search: restore its {TRIAL_FILE}, or "
                    "move it elsewhere (what it spent still counts: torchtitan-dp ledger)"
                )
        if not known:
            ledgers = [plan.ledger for plan, _ in self.check(Noise([1.0] * len(self.trials), 1.0))]
            try:
                return Noise(split(ledgers, epsilon)[1], _epsilon_of_loss(ledgers, epsilon))
            except ValueError as mistake:
                raise ValueError(f"--epsilon = {epsilon:g}, of all trials: {mistake}") from None
        for trial in self.trials:
            if not marks[trial.name]:
                raise ValueError(
                    f"'{trial.folder}': this trial of the search is not there, and may have spent "
                    "its epsilon; restore it, or start afresh in another job.dump_folder"
                )
        ledgers = [one for trial in self.trials if (one := read_published(trial.folder))]
        if len({one.run for one in ledgers}) < len(ledgers):
            raise ValueError(f"'{self.folder}': two trials are copies of one run; restore both")
        return noise

    def mark(self, trial: Trial, noise: Noise) -> dict[str, Any]:
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

    def spent_within(self, epsilon: float, checked: list[tuple[Plan, Records]]) -> Total:
        """Return what all trials spend together; raise ValueError, one line, if that is above
        epsilon, as where a crash lost steps."""
        of_trials = zip(self.trials, checked, strict=True)
        spent = total([Run(t.folder, p.ledger, r.fingerprint) for t, (p, r) in of_trials])
        if spent.epsilon_planned is None or spent.heldout_epsilon is None:
            raise ValueError(f"'{self.folder}': a trial is not private; change job.dump_folder")
        if (most := max(spent.epsilon_planned, spent.heldout_epsilon)) > epsilon:
            raise ValueError(
                f"--epsilon = {epsilon:g}: the noise of all trials is fixed, and together, with "
                f"what crashes lost, they would spend {rounded_up(most)}; raise it to go on"
            )
        return spent


def _read_mark(trial: Trial) -> dict[str, Any]:
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
    """List, of sorted results, those that noise may have put behind the first: less than two
    standard deviations of the difference away."""
    best, *others = results
    return [r for r in others if r.loss - best.loss < 2 * math.hypot(r.deviation, best.deviation)]


def grid(tries: Sequence[str]) -> list[dict[str, str]]:
    """Return all combinations, each as values by key; ValueError, one line.

    >>> grid(["optimizer.lr=1e-3,3e-3"])
    [{'optimizer.lr': '1e-3'}, {'optimizer.lr': '3e-3'}]
    >>> grid(["training.global_batch_size/training.steps=64/50,128/25"])[1]
    {'training.global_batch_size': '128', 'training.steps': '25'}
    """
    found, names = [dict[str, str]()], list[str]()
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
                    f"--try = '{text}': {key} is not tried: its trials might not compare; use "
                    f"{', '.join(f'{one}.…' for one in _SECTIONS)}, {', '.join(_KEYS)}"
                )
        names += keys
        found = [one | dict(zip(keys, row, strict=True)) for one in found for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"--try: {max(names, key=names.count)} is there twice; list it once")
    if repeated := [keys for keys in found if found.count(keys) > 1]:
        raise ValueError(f"--try: {repeated[0]} is there twice, and would spend twice")
    if len(found) < 2:
        raise ValueError("--try: there is nothing to compare; list two values or more")
    return found


def split(ledgers: Sequence[Lineage], target: float) -> tuple[float, list[float]]:
    """Find the epsilon that each trial's own steps spend, the same for all, and the noise
    multipliers; ValueError if what comes before the trials spends more, or a noise is out of range.
    """
    first = ledgers[0].settings
    find = functools.partial(noise_for, delta=first.delta, accountant=first.accountant)
    multiplier = functools.cache(find)
    before = first.compose([*inherited(ledgers[0].ancestors)])
    if not before < target:
        raise ValueError(f"the initial weights have spent {rounded_up(before)}; raise it")
    low, high, each = 0.0, target, target / math.sqrt(len(ledgers))
    for _ in range(_MOST_GUESSES):
        found = [
            multiplier(one.settings.mechanism, one.planned_steps, target_epsilon=each)
            for one in ledgers
        ]
        runs = []
        for ledger, sigma in zip(ledgers, found, strict=True):
            terms = ledger.settings
            terms = replace(terms, mechanism=terms.mechanism.with_noise(sigma))
            runs.append(Run(ledger.run, replace(ledger, settings=terms, heldout_loss=None), ""))
        spent = total(runs)
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


def _epsilon_of_loss(ledgers: Sequence[Lineage], target: float) -> float:
    """Find the epsilon of each published loss with which those of all trials spend the target."""
    count, delta, before = len(ledgers), ledgers[0].settings.delta, inherited(ledgers[0].ancestors)
    sigma = published_loss.noise_for(count, target_epsilon=target, delta=delta, before=before)
    return published_loss.epsilon(published_loss.releases(sigma, 1), delta=delta)


def main(argv: list[str]) -> int:
    options, shared = parsed("tune", __doc__, argv)
    with exit_on_mistake(), contextlib.ExitStack() as held:
        asked = processes_asked()
        processes = default_processes() if asked == "auto" else int(asked)
        search = Search.of(shared, options.tries, processes)
        if not options.plan:
            held.enter_context(lock_folder(search.folder))
        noise = search.noise(options.epsilon)
        announced = _announce(search, noise, options.epsilon)
        if options.plan:
            return 0
        for trial in search.trials:
            os.makedirs(trial.folder, mode=0o700, exist_ok=True)
            text = json.dumps(search.mark(trial, noise), indent=2)
            write_atomically(os.path.join(trial.folder, TRIAL_FILE), text.encode() + b"\n")
        for trial in (one for one in search.trials if result_of(one) is None):
            _say(f"{trial.name}: {' '.join(trial.options)}")
            code = _train(search.arguments(trial, noise))
            if code in (_EXIT_MISTAKE, _EXIT_STOPPED):
                _say(f"{trial.name}: exit code {code}; the same command goes on from there")
                return code
            if code != 0:
                _say(f"{trial.name}: failed with exit code {code}; what it spent counts")
        return _conclude(search, announced, options.json)


def _announce(search: Search, noise: Noise, epsilon: float) -> Total:
    checked = search.check(noise)
    spent = search.spent_within(epsilon, checked)
    for trial, (plan, _), sigma in zip(search.trials, checked, noise.multipliers, strict=True):
        _say(f"{trial.name}: {' '.join(trial.options)}: {plan.steps:,} steps, sigma {sigma:.4g}")
    _say(f"{len(search.trials)} trials of equal epsilon; all together: {_in_words(search, spent)}")
    plan, records = checked[0]
    loss = plan.ledger.heldout_loss
    assert loss is not None
    units, word = len(records.heldout), unit_word(search.config)
    deviation = loss.noise_multiplier * loss.clip / units
    how = f"clipped to {loss.clip:g} nats, with noise of {deviation:.2g}"
    _say(f"published losses: of {units:,} held-out {word}s, {how}")
    if deviation > TELLS_APART / 3:
        share = units / (units + len(records.train)) * 3 * deviation / TELLS_APART
        more = f"set data.heldout_fraction = {rounded_up(share, digits=2)} (final run, too), "
        raise ValueError(
            f"--epsilon = {epsilon:g}: noise of {deviation:.2g} nats hides which recipe is better "
            f"(by {TELLS_APART:g}, say): {more if share < 0.5 else ''}lower "
            "validation.publish_clip, try fewer values, or raise --epsilon"
        )
    return spent


def _train(arguments: list[str]) -> int:
    """Train as `torchtitan-dp train` does, and return its exit code; signals go to it."""
    command = [sys.executable, "-m", "torchtitan_dp", "train", *arguments]
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        for child in started:
            if number != signal.SIGINT:  # which a terminal sends to both
                child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handled = [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    started.append(subprocess.Popen(command, stdout=2))  # stderr: stdout is for the result
    if asked:
        started[0].send_signal(signal.SIGTERM)
    code = started[0].wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return _EXIT_STOPPED if asked else code


def _conclude(search: Search, announced: Total, json_file: str | None) -> int:
    """Print the losses, the best trial and what the search spent; return the exit code."""
    begun = [verify(trial.folder) for trial in search.trials if read_published(trial.folder)]
    faults = [f"FAULT: {run.folder}: {fault}" for run in begun for fault in run.faults]
    found = sorted(filter(None, map(result_of, search.trials)), key=lambda result: result.loss)
    near = [one.trial.name for one in alike(found)] if found else []
    if json_file:
        content = {
            "announced": dataclasses.asdict(announced),
            "spent": dataclasses.asdict(total(begun)) if begun else None,
            "trials": [
                {"trial": t.name, "keys": t.keys, "loss": loss, "standard_deviation": deviation}
                for t, loss, deviation in found
            ],
            "alike": near,
        }
        write_json(json_file, content)
    failed = [trial.name for trial in search.trials if result_of(trial) is None]
    retried = "failed, and is not compared; the same command tries it again"
    for line in (*faults, *(f"{name} {retried}" for name in failed)):
        _say(line)
    if not found or faults:
        return 1
    clip = search.config.validation.publish_clip
    if found[0].loss > clip - 2 * found[0].deviation:
        _say(f"warning: losses near validation.publish_clip = {clip:g} compare nothing: raise it")
    out = results(json_file)
    for trial, loss, deviation in found:
        print(f"{trial.name}: {' '.join(trial.options)}: {loss:.4f} ± {deviation:.2g}", file=out)
    best = found[0].trial
    beside = f"; but noise may have put it before {', '.join(near)}: less than two deviations away"
    print(f"best: {best.name}: {' '.join(best.options)}{beside if near else ''}", file=out)
    print(f"final run: {typed('train')} {shlex.join([*search.shared, *best.options])}", file=out)
    print(
        f"the search spent {_in_words(search, total(begun))}; a run with its result, and earlier "
        f"searches, add theirs: torchtitan-dp ledger {search.folder}/trial_* RUN",
        file=out,
    )
    return 1 if failed else 0


def _in_words(search: Search, spent: Total) -> str:
    assert spent.epsilon_planned is not None
    assert spent.heldout_epsilon is not None
    return (
        f"epsilon = {rounded_up(spent.epsilon_planned)}, or {rounded_up(spent.heldout_epsilon)} "
        f"for a held-out {unit_word(search.config)}, delta = {spent.delta:g}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
