"""`--table crossover`: throughput and memory of methods against T, at equal tokens a step.

A ghost norm's work grows with T squared, and what `ghost` keeps with T; `V2` keeps the gradients of
all samples of a microbatch, B x P values, whatever T is. Where their curves cross, the better
choice changes.
"""

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from .arms import ARMS, label
from .tables import arms_tables

Row = dict[str, Any]
_COLORS = ("#7f7f7f", "#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518")
_MARKS = "so^Dvp"


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


def _is_private(name: str) -> bool:
    return name != ARMS[name].baseline


def _curves(rows: list[Row], key: str) -> dict[str, dict[int, float]]:
    """By arm: the value by T; arms in the order of the catalogue."""
    found: dict[str, dict[int, float]] = {}
    for name in ARMS:
        curve = {r["seq_len"]: r[key] for r in rows if r["name"] == name and r.get(key) is not None}
        if curve:
            found[name] = curve
    return found


def draw(rows: list[Row], machine: str, path: Path) -> None:
    """Write a PNG for the largest MBS: throughput, throughput over non-DP's, and memory.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    mbs = max(row["local_batch_size"] for row in rows)
    rows = [row for row in rows if row["local_batch_size"] == mbs]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    figure.set_facecolor("white")
    panels: list[tuple[str, str, Callable[[float], float]]] = [
        ("tokens_per_second_per_device", "throughput, tokens/s per device", lambda x: x),
        ("throughput_vs_non_dp", "throughput over non-DP's; bars: rounds", lambda x: x),
        ("peak_allocated_gib", "allocated by PyTorch at the peak, MiB a process", _mib),
    ]
    for panel, (key, unit, scaled) in zip(axes, panels, strict=True):
        curves = _curves(rows, key)
        for name, curve in curves.items():
            if key == "throughput_vs_non_dp" and not _is_private(name):
                continue
            style = list(_curves(rows, "seq_len")).index(name)  # the same in all panels
            lengths = sorted(curve)
            panel.errorbar(
                lengths,
                [scaled(curve[t]) for t in lengths],
                yerr=_spread(rows, name, lengths) if key == "throughput_vs_non_dp" else None,
                color=_COLORS[style % len(_COLORS)],
                marker=_MARKS[style % len(_MARKS)],
                linestyle="-" if _is_private(name) else "--",
                markersize=10 - 2 * min(style, 3),  # what lies under another stays seen
                capsize=3,
                label=label(name),
            )
        ticks = sorted({row["seq_len"] for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{t:,}" for t in ticks])
        panel.set_xlabel("T, tokens of a sample")
        panel.set_ylabel(unit)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(bottom=0)
        if key == "throughput_vs_non_dp":
            panel.axhline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes[0].legend(frameon=False)
    tokens = {r["seq_len"] * r["local_batch_size"] * r["microbatches"] for r in rows}
    each = " or ".join(f"{n:,}" for n in sorted(tokens))
    figure.suptitle(
        f"MBS {mbs} (microbatch: one sample at a time), {each} tokens a step. {machine}", fontsize=9
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mib(gib: float) -> float:
    return 1024 * gib


def _spread(rows: list[Row], name: str, lengths: list[int]) -> list[list[float]]:
    """How far the least and the most of the rounds are from their median, by length."""
    by_length = {row["seq_len"]: row for row in rows if row["name"] == name}
    found: list[list[float]] = [[], []]
    for length in lengths:
        median, rounds = (
            by_length[length][key]
            for key in ("throughput_vs_non_dp", "throughput_vs_non_dp_rounds")
        )
        found[0].append(median - rounds[0])
        found[1].append(rounds[-1] - median)
    return found
