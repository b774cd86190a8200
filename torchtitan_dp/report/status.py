"""The status of a run: a few rows, for the page and for a terminal."""

import datetime
import math
from dataclasses import dataclass

from torchtitan_dp.report.run_folder import RunFolder
from torchtitan_dp.report.scalars import SECONDS


@dataclass(frozen=True)
class Row:
    """A fact on the run, and whether it may be published."""

    name: str
    value: str
    public: bool


def status_rows(run: RunFolder, spent: list[Row]) -> list[Row]:
    """Return the status.

    Args:
        spent: the rows on epsilon.
    """
    step = max(run.ledger.steps, run.begun) if run.alive else run.ledger.steps
    rows = [Row("state", _state(run), False), Row("step", f"{step:,} of {run.total:,}", True)]
    if not run.private:
        why = "; ".join(run.caveats) or "it trains without privacy"
        rows.append(Row("privacy", f"NOT private: {why}", True))
    rows += spent
    if run.alive and not run.finished:
        rows.append(Row("time left", _time_left(run, step), False))
    checkpoint = "none"
    if run.checkpoint >= 0:
        when = datetime.datetime.fromtimestamp(run.checkpoint_time, datetime.timezone.utc)
        checkpoint = f"step {run.checkpoint:,}, {when:%Y-%m-%d %H:%M} UTC"
    rows.append(Row("last checkpoint", checkpoint, False))
    for name, words in (("loss", "loss"), ("heldout_loss", "held-out loss")):
        if (last := run.scalars.of(name).last) is not None:
            rows.append(Row(words, f"{last.value:.4f} at step {last.step:,}", False))
    return rows


def as_text(title: str, rows: list[Row], faults: list[str]) -> str:
    """Write the status for a terminal."""
    width = max(len(row.name) for row in rows)
    lines = [title, *(f"  {row.name:{width}}  {row.value}{_label(row)}" for row in rows)]
    return "\n".join([*lines, *(f"  FAULT: {fault}" for fault in faults)])


def _label(row: Row) -> str:
    return "" if row.public else "  (not private)"


def _state(run: RunFolder) -> str:
    if run.alive:
        return "alive: a process has the folder's lock"
    if run.finished:
        return "finished"
    if run.checkpoint < 0:
        return "stopped, without a checkpoint; the same command starts it"
    return f"stopped; the same command goes on from step {run.checkpoint:,}"


def _time_left(run: RunFolder, step: int) -> str:
    """Estimate it from the median time of the last few steps."""
    seconds = sorted(p.value for p in run.scalars.of(SECONDS).kept[-9:] if math.isfinite(p.value))
    if not seconds:
        return "not known until two steps are logged"
    left = max(run.total - step, 0) * seconds[len(seconds) // 2]
    return f"about {datetime.timedelta(seconds=round(left))}"
