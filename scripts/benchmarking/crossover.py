"""`--table crossover`: throughput and memory of methods against T, at equal tokens a step.

A ghost norm's work grows with T squared, and what `ghost` keeps with T; `V2` keeps the gradients of
all samples of a microbatch, B x P values, whatever T is. Where their curves cross, the better
choice changes.
"""

from itertools import combinations, pairwise
from typing import Any

from .arms import ARMS, label
from .tables import arms_tables

Row = dict[str, Any]


def section(rows: list[Row]) -> str:
    """The tables, and where arms change places."""
    lines = [f"- {line}" for line in crossings(rows)] or ["- nowhere"]
    title = "### Where private arms change places, beyond the rounds' scatter"
    return "\n\n".join([arms_tables(rows), title, "\n".join(lines)])


def crossings(rows: list[Row]) -> list[str]:
    """Say between which lengths one private arm overtakes another, in time and in memory.

    Told apart are times whose rounds, least to most, do not overlap, and memory by 2%.
    """
    rows = [row for row in rows if row["name"] != ARMS[row["name"]].baseline]
    found = []
    for what, bounds in (
        ("tokens/s", _speeds),
        ("memory allocated", _memories),
    ):
        arms = [name for name in ARMS if name in {row["name"] for row in rows}]
        ranges = {
            (row["name"], row["seq_len"]): bounds(row) for row in rows if bounds(row) is not None
        }
        for one, other in combinations(arms, 2):
            both = sorted(t for name, t in ranges if name == one and (other, t) in ranges)
            order = [(t, _order(ranges[one, t], ranges[other, t])) for t in both]
            for (short, before), (long, after) in pairwise((t, o) for t, o in order if o):
                if before != after:
                    more, less = (one, other) if after > 0 else (other, one)
                    found.append(
                        f"{what}: from T = {short:,} to {long:,} {label(more)} passes {label(less)}"
                    )
    return found


def _speeds(row: Row) -> tuple[float, float] | None:
    rounds = row.get("throughput_vs_non_dp_rounds")
    return None if rounds is None else (rounds[0], rounds[-1])


def _memories(row: Row) -> tuple[float, float] | None:
    peak = row.get("peak_allocated_gib")
    return None if peak is None else (0.99 * peak, 1.01 * peak)


def _order(one: tuple[float, float], other: tuple[float, float]) -> int:
    """1 where all of one is above all of the other, -1 where it is below, 0 where they overlap."""
    return (one[0] > other[1]) - (one[1] < other[0])
