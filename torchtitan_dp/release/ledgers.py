"""Verify runs, and add up what several of them spend.

    python -m torchtitan_dp.ledger RUN… [--delta D] [--overlapping] [--json FILE]

RUN is a `job.dump_folder`. Exit code 0 if all that the runs' files say holds together, 1 if not,
or if a run has no checkpoint to compare with; 2 for a mistake on the command line.
"""

import dataclasses
import sys
from typing import Any, TextIO

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("ledger", __doc__)

# isort: split
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.config.load import exit_on_mistake, results, write_json
from torchtitan_dp.ledger.spending import Run, Total, counted_twice, to_act_on, total
from torchtitan_dp.privacy.accounting import rounded_up


def main(argv: list[str]) -> int:
    options, _ = parsed("ledger", __doc__, argv)
    with exit_on_mistake():
        runs = [verify(folder) for folder in options.runs]
        holds = not any(run.faults for run in runs)
        spent = total(runs, options.delta, overlapping=options.overlapping) if holds else None
        if options.json:
            write_json(options.json, for_programs(runs, spent))
    _show(runs, spent, results(options.json), overlapping=options.overlapping)
    return 0 if all(run.verified for run in runs) else 1


def _show(runs: list[Run], spent: Total | None, out: TextIO, *, overlapping: bool) -> None:

    def say(line: str) -> None:
        print(line, file=out)

    of_weights = all(run.epsilon is not None and not run.ledger.is_trial for run in runs)
    name = "epsilon to state" if of_weights else "epsilon"  # of no audit, of no trial alone
    for run in runs:
        begun, kept = f"{run.ledger.steps_executed:,}", f"{run.ledger.steps:,}"
        stated = None if run.epsilon is None else run.epsilon_planned  # of weights
        fewer = {run.epsilon: f"{kept} steps", run.epsilon_executed: f"the {begun} steps begun"}
        others = (f"; of {of}: {_word(n)}" for n, of in fewer.items() if n != stated)
        say(
            f"{run.folder}: run {run.ledger.run}, {kept} steps: {name} = "
            f"{_word(stated)}{''.join(others)}; verified: {'yes' if run.verified else 'NO'}"
        )
        words = {"FAULT": run.faults, "note": run.notes, "assumed": to_act_on(run.caveats())}
        for kind, lines in words.items():
            for line in lines:
                say(f"{kind}: {run.folder}: {line}")
    if spent is None:
        say("runs are not composed while their files contradict each other")
        return
    several = len(runs) > 1
    say(
        f"{f'all {len(runs)} runs together' if several else 'the run'}: {name} = "
        f"{_word(spent.epsilon_planned)}, delta = {spent.delta:g} ({spent.accountant}; "
        f"{spent.steps_executed:,} steps; unit: one {runs[0].ledger.settings.privacy_unit}; "
        f"neighbours: {spent.neighbouring_relation})"
    )
    if spent.epsilon != spent.epsilon_planned:
        say(
            "it is valid if only weights decided when to stop; without the planned steps that were "
            f"not taken: {_word(spent.epsilon)}, if neither results nor a clock decided it"
        )
    if spent.heldout_epsilon is not None:
        say(
            f"published held-out losses: epsilon = {_word(spent.heldout_epsilon)}, delta = "
            f"{spent.delta:g}, of a unit that is held out; it pays this in place of the above"
        )
    for line in counted_twice(runs):
        say(line)
    if several:
        say("assumed: the runs' number, noise, rates and steps did not follow from private results")
        if overlapping:
            say("this is the cost to a unit with records in all of them")
    if any(run.ledger.audit is not None for run in runs):
        say("of an audited run its published result counts; its weights stay NOT private")


def _word(value: float | None) -> str:
    return "NOT private" if value is None else rounded_up(value)


def for_programs(runs: list[Run], spent: Total | None) -> dict[str, Any]:
    """Return the content of `--json`."""
    own = ("folder", "epsilon", "epsilon_executed", "epsilon_planned", "faults", "notes")
    of_ledger = ("run", "private", "steps", "steps_executed")
    return {
        "runs": [
            {
                **{name: getattr(run, name) for name in own},
                **{name: getattr(run.ledger, name) for name in of_ledger},
                "delta": run.ledger.settings.delta,
                "verified": run.verified,
                "caveats": run.caveats(),
            }
            for run in runs
        ],
        "total": None if spent is None else dataclasses.asdict(spent),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
