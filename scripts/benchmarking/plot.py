"""A bar chart of throughput and peak memory, an arm a bar, from the JSON's rows."""

from pathlib import Path
from typing import Any

from .arms import ARMS, label

Row = dict[str, Any]
_BARS = "#4c78a8"
_BASELINE = "#9d9d9d"


def draw(rows: list[Row], machine: str, path: Path) -> None:
    """Write a PNG: one row of two panels for each (devices, MBS, T).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    shapes = sorted({_shape(row) for row in rows}, key=lambda shape: (-shape[0], *shape[1:]))
    height = 3.2 * len(shapes) + 0.6
    figure, axes = pyplot.subplots(
        len(shapes), 2, figsize=(12, height), squeeze=False, layout="constrained"
    )
    for (throughput, memory), shape in zip(axes, shapes, strict=True):
        here = [row for row in rows if _shape(row) == shape]
        devices, mbs, seq_len = shape
        title = f"{devices} process{'es' if devices > 1 else ''}, MBS {mbs}, T {seq_len:,}"
        _bars(throughput, here, "tokens_per_second_per_device", "tokens/s per device", ",.0f")
        _bars(memory, here, "peak_memory_gib", "peak memory, GiB a process", ".2f")
        throughput.set_title(f"Throughput: {title}", fontsize=10)
        memory.set_title(f"Peak memory: {title}", fontsize=10)
    figure.suptitle(f"{machine} (dashed: non-DP)", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shape(row: Row) -> tuple[int, int, int]:
    return row["world_size"], row["local_batch_size"], row["seq_len"]


def _bars(axes: Any, rows: list[Row], key: str, unit: str, form: str) -> None:
    """One panel; an arm without a number has its status written where the bar would be."""
    values = [row[key] or 0.0 for row in rows]
    colors = [_BASELINE if row["name"] == ARMS[row["name"]].baseline else _BARS for row in rows]
    axes.bar(range(len(rows)), values, color=colors, width=0.7)
    top = max([*values, 1e-9])
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        text = format(value, form) if row[key] is not None else row["status"]
        axes.text(
            place,
            value + 0.02 * top,
            text,
            ha="center",
            va="bottom",
            fontsize=8,
            bbox={"color": "white", "pad": 0.5},  # over the dashed line
        )
    plain = next((row[key] for row in rows if row["name"] == "non-DP"), None)
    if plain is not None:
        axes.axhline(plain, color="black", linestyle="--", linewidth=0.8, zorder=1.5)
    axes.set_ylim(0, 1.15 * top)
    axes.set_ylabel(unit)
    names = [_in_two_lines(label(row["name"])) for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _in_two_lines(name: str) -> str:
    """Broken at its first space."""
    return name.replace(" ", "\n", 1)
