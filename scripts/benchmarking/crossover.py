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
    lines = [f"- {line}" for line in crossings(rows)] or ["- no two private arms change places"]
    return "\n\n".join([arms_tables(rows), "### Where arms change places", "\n".join(lines)])


def crossings(rows: list[Row]) -> list[str]:
    """Say between which lengths one private arm overtakes another, in time and in memory."""
    found = []
    for what, key in (
        ("tokens/s", "tokens_per_second_per_device"),
        ("memory allocated", "peak_allocated_gib"),
    ):
        curves = {name: curve for name, curve in _curves(rows, key).items() if _is_private(name)}
        for one, other in combinations(curves, 2):
            both = sorted(curves[one].keys() & curves[other].keys())
            for short, long in pairwise(both):
                before, after = (curves[one][t] - curves[other][t] for t in (short, long))
                if before * after < 0:
                    more, less = (one, other) if after > 0 else (other, one)
                    found.append(
                        f"{what}: from T = {short:,} to {long:,} {label(more)} passes {label(less)}"
                    )
    return found


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
        ("throughput_vs_non_dp", "throughput over non-DP's (bars: least to most)", lambda x: x),
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
