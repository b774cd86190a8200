"""Verify runs, and add up what several of them spend.

    python -m torchtitan_dp.ledger RUN… [--delta D] [--overlapping] [--json FILE]

RUN is a `job.dump_folder`. Exit code 0 if all that the runs' files say holds together, 1 if not,
2 for a mistake on the command line.
"""

import dataclasses
import sys
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("ledger", __doc__)

# isort: split
from rich.console import Console
from rich.table import Column, Table

from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.ledger.spending import Run, Total, total
from torchtitan_dp.privacy.accounting import rounded_up

_LOG_WIDTH = 250  # where there is no terminal that a table could be too wide for


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    options, _ = parsed("ledger", __doc__, argv)
    with exit_on_mistake():
        runs = [verify(folder) for folder in options.runs]
        holds = not any(run.faults for run in runs)
        spent = total(runs, options.delta, overlapping=options.overlapping) if holds else None
        if options.json:
            write_json(options.json, for_programs(runs, spent))
    _show(runs, spent, overlapping=options.overlapping)
    return 0 if holds else 1


def _show(runs: list[Run], spent: Total | None, *, overlapping: bool) -> None:
    """Print a table of the runs and their sum on stderr."""
    width = None if sys.stderr.isatty() else _LOG_WIDTH
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
    table = Table(Column("run", overflow="fold"), Column("name", no_wrap=True))
    for head in ("steps", "epsilon", "begun", "of all begun", "and planned", "verified"):
        table.add_column(head, justify="right")
    for run in runs:
        table.add_row(
            run.folder,
            run.ledger.run,
            f"{run.ledger.steps:,}",
            _word(run.epsilon),
            f"{run.ledger.steps_executed:,}",
            _word(run.epsilon_executed),
            _word(run.epsilon_planned),
            "NO" if run.faults else "yes",
        )
    console.print(table)
    for run in runs:
        for kind, lines in (("FAULT", run.faults), ("note", run.notes)):
            for line in lines:
                console.print(f"{kind}: {run.folder}: {line}", markup=False)
        for caveat in run.caveats():
            console.print(f"assumed: {run.folder}: {caveat}", markup=False)
    if spent is None:
        console.print("runs are not composed while their files contradict each other")
        return
    many = f"all {len(runs)} runs together" if len(runs) > 1 else "the run"
    console.print(
        f"{many}: epsilon = {_word(spent.epsilon)}, delta = {spent.delta:g} "
        f"({spent.accountant}; {spent.steps_executed:,} steps; unit: one "
        f"{runs[0].ledger.settings.privacy_unit}; neighbours: {spent.neighbouring_relation})"
    )
    if spent.epsilon != spent.epsilon_planned:
        console.print(
            f"with the planned steps that were not taken: {_word(spent.epsilon_planned)}, which "
            "is valid if only weights decided when to stop"
        )
    if spent.heldout_epsilon is not None:
        console.print(
            f"published held-out losses: epsilon = {_word(spent.heldout_epsilon)}, delta = "
            f"{spent.delta:g}, of a unit that is held out; it pays this in place of the above"
        )
    if len(runs) > 1:
        console.print(
            "assumed: the number of runs and their noise, rates and steps did not follow from "
            "private results"
        )
    if len(runs) > 1 and overlapping:
        console.print("this is the cost to a unit with records in all of them")
    if any(run.ledger.audit is not None for run in runs):
        console.print(
            "of an audited run this counts the audit's published result; its weights stay NOT "
            "private"
        )


def _word(value: float | None) -> str:
    """Return an epsilon in a word or two."""
    return "NOT private" if value is None else rounded_up(value)


def for_programs(runs: list[Run], spent: Total | None) -> dict[str, Any]:
    """Return the content of `--json`."""
    return {
        "runs": [
            {
                "folder": run.folder,
                "run": run.ledger.run,
                "private": run.ledger.private,
                "steps": run.ledger.steps,
                "epsilon": run.epsilon,
                "steps_executed": run.ledger.steps_executed,
                "epsilon_executed": run.epsilon_executed,
                "epsilon_planned": run.epsilon_planned,
                "delta": run.ledger.settings.delta,
                "verified": not run.faults,
                "faults": run.faults,
                "notes": run.notes,
                "caveats": run.caveats(),
            }
            for run in runs
        ],
        "total": None if spent is None else dataclasses.asdict(spent),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
