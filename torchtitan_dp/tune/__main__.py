"""Search for a recipe by published held-out losses alone, at an epsilon of all trials together.

    python -m torchtitan_dp.tune --job.config_file FILE --epsilon E --try KEY=VALUE,VALUE …
                                 [--section.key value …] [--plan] [--json FILE]

Every combination of the values is a trial: a run of its own, by the ordinary launcher, in
`trial_N` of the folder `job.dump_folder` with `_tune`. Before the first one the noise of all is
fixed, and what they will spend together is printed; `--plan` ends there. The same command goes on
where it was stopped: a trial that is done is not run again. Exit code 75 if it was asked to stop, 1
if a trial failed, 2 for a user's mistake.

Guarantee:
    Trials are compared by the published losses in their `privacy.json`; nothing else of their
    outputs is read but their ledgers. What these spend together, planned steps and those that
    crashes lost included, is computed before a search begins and each time before it goes on, and
    refused above `--epsilon`. A trial whose folder is gone or is another's, and a run beside them,
    are refused too: they may have spent what no sum counts.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("tune", __doc__)

# isort: split
from rich.console import Console
from rich.table import Table

from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.distributed.devices import default_processes
from torchtitan_dp.ledger.schema import TRIAL_FILE, read_published
from torchtitan_dp.ledger.spending import Total, total
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.process import lock_folder
from torchtitan_dp.tune.folder import (
    Result,
    State,
    alike,
    name_of,
    remember,
    result_of,
    spent_within,
    state_of,
)
from torchtitan_dp.tune.trials import Search, Trial

TELLS_APART = 0.3
"""The difference of two trials' losses, in nats, that a search must show, a heuristic."""

_LOG_WIDTH = 250  # where there is no terminal that a table could be too wide for
_EXIT_MISTAKE, _EXIT_STOPPED = 2, 75  # of the launcher


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    options, shared = parsed("tune", __doc__, argv)
    with exit_on_mistake(), contextlib.ExitStack() as held:
        search = Search.of(shared, options.tries, _processes())
        if not options.plan:
            held.enter_context(lock_folder(search.folder))
        state = state_of(search, options.epsilon)
        announced = _announce(search, state, options.epsilon)
        if options.plan:
            return 0
        state.write(search.folder)
        failed = [trial for trial in search.trials if not _run(search, state, trial)]
        return _conclude(search, announced, failed, options.json)


def _processes() -> int:
    """Return the number of processes of each trial, as `torchtitan_dp train` chooses it."""
    given = os.environ.get("NGPU", "auto")
    if given == "auto":
        return default_processes()
    if not (given.isdecimal() and int(given) > 0):
        raise ValueError(f"NGPU = '{given}': must be 1 or more, or auto")
    return int(given)


def _announce(search: Search, state: State, epsilon: float) -> Total:
    """Print what all trials spend together, and return it."""
    checked = search.check(state.noise)
    spent = spent_within(epsilon, search, checked)
    table = Table("trial", "tries", "steps", "sigma")
    for trial, one in zip(search.trials, checked, strict=True):
        assert one.plan is not None
        sigma = one.plan.settings.mechanism.noise_multiplier
        table.add_row(trial.name, " ".join(trial.options), f"{one.plan.steps:,}", f"{sigma:.4g}")
    _console().print(table)
    _say(
        f"{len(search.trials)} trials, each of epsilon = {rounded_up(state.each, digits=3)}; all "
        f"together: {_in_words(search, spent)}"
    )
    assert checked[0].plan is not None
    loss = checked[0].plan.ledger.heldout_loss
    assert loss is not None
    units = len(checked[0].records.heldout)
    deviation = loss.noise_multiplier * loss.clip / units
    _say(
        f"published losses: of {units:,} held-out {unit_word(search.config)}s, with noise of "
        f"standard deviation {deviation:.2g} nats"
    )
    if deviation > TELLS_APART / 3:
        word, enough = unit_word(search.config), math.ceil(units * 3 * deviation / TELLS_APART)
        raise ValueError(
            f"--epsilon = {epsilon:g}: noise of {deviation:.2g} nats hides which recipe is better; "
            f"losses that are {TELLS_APART:g} nats apart (a heuristic) show by a third of that: "
            f"hold out more (data.heldout_fraction: about {enough:,} {word}s, now {units:,}), "
            f"lower validation.publish_clip (now {loss.clip:g}), try fewer values, or raise "
            "--epsilon"
        )
    return spent


def _run(search: Search, state: State, trial: Trial) -> bool:
    """Run a trial, unless it is done; return whether it now is.

    Raises:
        SystemExit: it was asked to stop, or its start found a mistake.
    """
    if result_of(trial) is not None:
        return True
    _say(f"{trial.name}: {' '.join(trial.options)}")
    os.makedirs(trial.folder, mode=0o700, exist_ok=True)
    write_json(os.path.join(trial.folder, TRIAL_FILE), trial.keys)
    state.begun.setdefault(trial.name, "")
    state.write(search.folder)

    def learn_name() -> bool:
        if not state.begun[trial.name] and (name := name_of(trial)) is not None:
            state.begun[trial.name] = name
            state.write(search.folder)
        return state.begun[trial.name] != ""

    code = _train(search.arguments(trial, state.noise), learn_name)
    remember(search, state)
    state.write(search.folder)
    if code in (_EXIT_MISTAKE, _EXIT_STOPPED):
        _say(f"{trial.name}: ended with exit code {code}; the same command goes on from there")
        raise SystemExit(code)
    if code != 0:
        _say(f"{trial.name}: failed with exit code {code}; what it spent counts")
    return code == 0 and result_of(trial) is not None


def _train(arguments: list[str], has_begun: Callable[[], bool]) -> int:
    """Train as `torchtitan-dp train` does, and return its exit code; signals go to it. `has_begun`
    is called each second until it returns True, so that a search that is killed knows its trial."""
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
    started.append(subprocess.Popen(command))
    if asked:
        started[0].send_signal(signal.SIGTERM)
    while started[0].poll() is None and not has_begun():
        with contextlib.suppress(subprocess.TimeoutExpired):
            started[0].wait(timeout=1)
    code = started[0].wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return _EXIT_STOPPED if asked else code


def _conclude(search: Search, announced: Total, failed: list[Trial], json_file: str | None) -> int:
    """Print the losses, the best trial and what the search spent; return the exit code."""
    begun = [verify(trial.folder) for trial in search.trials if read_published(trial.folder)]
    for line in (f"FAULT: {run.folder}: {fault}" for run in begun for fault in run.faults):
        _say(line)
    results = sorted(filter(None, map(result_of, search.trials)), key=lambda result: result.loss)
    if json_file:
        write_json(json_file, _for_programs(results, announced, total(begun) if begun else None))
    for trial in failed:
        _say(f"{trial.name} failed, and is not compared; the same command tries it again")
    if not results or any(run.faults for run in begun):
        return 1
    table = Table("trial", "tries", "published loss", "±")
    for trial, loss, deviation in results:
        table.add_row(trial.name, " ".join(trial.options), f"{loss:.4f}", f"{deviation:.2g}")
    _console().print(table)
    best = results[0]
    _say(f"best: {best.trial.name}: {' '.join(best.trial.options)}{_beside(results)}")
    _say(
        f"the search spent {_in_words(search, total(begun))}; a run with its result on these "
        "records adds its own, and so do earlier searches: python -m torchtitan_dp.ledger "
        f"{search.folder}/trial_* RUN"
    )
    return 1 if failed else 0


def _beside(results: list[Result]) -> str:
    if not (names := [one.trial.name for one in alike(results)]):
        return ""
    return (
        f"; but noise alone may have put it before {', '.join(names)}: they are less than two "
        "standard deviations of the difference away"
    )


def _for_programs(results: list[Result], announced: Total, spent: Total | None) -> dict[str, Any]:
    """Return the content of `--json`."""
    return {
        "announced": dataclasses.asdict(announced),
        "spent": spent and dataclasses.asdict(spent),
        "trials": [
            {"trial": trial.name, "keys": trial.keys, "loss": loss, "standard_deviation": deviation}
            for trial, loss, deviation in results
        ],
        "alike": [one.trial.name for one in alike(results)] if results else [],
    }


def _in_words(search: Search, spent: Total) -> str:
    assert spent.epsilon_planned is not None
    assert spent.heldout_epsilon is not None
    return (
        f"epsilon = {rounded_up(spent.epsilon_planned)}, or {rounded_up(spent.heldout_epsilon)} "
        f"for a held-out {unit_word(search.config)}, delta = {spent.delta:g}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _console() -> Console:
    width = None if sys.stderr.isatty() else _LOG_WIDTH
    return Console(stderr=True, highlight=False, soft_wrap=True, width=width)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
