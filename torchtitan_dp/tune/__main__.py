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
    refused above `--epsilon`.
"""

import contextlib
import dataclasses
import math
import signal
import subprocess
import sys

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("tune", __doc__)

# isort: split
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.distributed.devices import default_processes
from torchtitan_dp.ledger.schema import read_published
from torchtitan_dp.ledger.spending import Total, total
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.process import lock_folder, processes_asked
from torchtitan_dp.tune.trials import Noise, Search, alike, result_of

TELLS_APART = 0.3
"""The difference of two trials' losses, in nats, that a search must show, a heuristic."""

_EXIT_MISTAKE, _EXIT_STOPPED = 2, 75  # of the launcher


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
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
        search.mark(noise)
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
    """Print what all trials spend together, and return it."""
    checked = search.check(noise)
    spent = search.spent_within(epsilon, checked)
    for trial, one, sigma in zip(search.trials, checked, noise.multipliers, strict=True):
        assert one.plan is not None
        _say(
            f"{trial.name}: {' '.join(trial.options)}: {one.plan.steps:,} steps, sigma {sigma:.4g}"
        )
    _say(f"{len(search.trials)} trials of equal epsilon; all together: {_in_words(search, spent)}")
    assert checked[0].plan is not None
    loss = checked[0].plan.ledger.heldout_loss
    assert loss is not None
    units, word = len(checked[0].records.heldout), unit_word(search.config)
    deviation = loss.noise_multiplier * loss.clip / units
    _say(
        f"published losses: of {units:,} held-out {word}s, with noise of "
        f"standard deviation {deviation:.2g} nats"
    )
    if deviation > TELLS_APART / 3:
        enough = math.ceil(units * 3 * deviation / TELLS_APART)
        raise ValueError(
            f"--epsilon = {epsilon:g}: noise of {deviation:.2g} nats hides which recipe is better; "
            f"losses that are {TELLS_APART:g} nats apart (a heuristic) show by a third of that: "
            f"hold out more (data.heldout_fraction: about {enough:,} {word}s, now {units:,}), "
            f"lower validation.publish_clip (now {loss.clip:g}), try fewer values, or raise "
            "--epsilon"
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
    started.append(subprocess.Popen(command))
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
    results = sorted(filter(None, map(result_of, search.trials)), key=lambda result: result.loss)
    near = [one.trial.name for one in alike(results)] if results else []
    if json_file:
        content = {
            "announced": dataclasses.asdict(announced),
            "spent": dataclasses.asdict(total(begun)) if begun else None,
            "trials": [
                {"trial": t.name, "keys": t.keys, "loss": loss, "standard_deviation": deviation}
                for t, loss, deviation in results
            ],
            "alike": near,
        }
        write_json(json_file, content)
    failed = [trial.name for trial in search.trials if result_of(trial) is None]
    for line in faults:
        _say(line)
    for name in failed:
        _say(f"{name} failed, and is not compared; the same command tries it again")
    if not results or faults:
        return 1
    for trial, loss, deviation in results:
        _say(f"{trial.name}: {' '.join(trial.options)}: {loss:.4f} ± {deviation:.2g}")
    best = results[0].trial
    beside = (
        f"; but noise alone may have put it before {', '.join(near)}: they are less than two "
        "standard deviations of the difference away"
    )
    _say(f"best: {best.name}: {' '.join(best.options)}{beside if near else ''}")
    _say(
        f"the search spent {_in_words(search, total(begun))}; a run with its result on these "
        "records adds its own, and so do earlier searches: python -m torchtitan_dp.ledger "
        f"{search.folder}/trial_* RUN"
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
