"""The figures of docs/results.md, from rows of `report`."""

from pathlib import Path
from typing import Any

Row = dict[str, Any]
_COLORS = ("#4c78a8", "#f58518")
_NAMES = ("all weights", "LoRA")


def draw_losses(rows: list[Row], path: Path) -> None:
    """Draw the held-out loss against ε, with no tuning and tuning without privacy as lines."""
    figure, axes = _new(8.0)
    for row in (r for r in rows if r["kind"] == "none"):
        axes.axhline(row["loss"], color="#555555", label="no tuning")
    for index, rank in enumerate(_ranks(rows)):
        of = [row for row in rows if row["rank"] == rank]
        private = sorted((r for r in of if r["kind"] == "private"), key=lambda r: r["epsilon"])
        x = [row["epsilon"] * (0.97, 1.03)[index] for row in private]
        _draw_medians(axes, x, private, index, f"private, {_NAMES[index]}")
        for kind, dashes, title in (("noise", ":", "noise alone"), ("plain", "--", "no privacy")):
            for row in (r for r in of if r["kind"] == kind):
                label = f"{title}, {_NAMES[index]}"
                axes.axhline(row["loss"], color=_COLORS[index], linestyle=dashes, label=label)
    axes.set_xscale("log")
    axes.set_xticks([1, 3, 8], ["1", "3", "8"])
    axes.minorticks_off()
    axes.set_xlabel("ε (δ = 1e-5)")
    axes.set_ylabel("held-out loss, nats a token")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, path)


def draw_positions(rows: list[Row], path: Path) -> None:
    """Draw the held-out loss by the token's place in its record."""
    figure, axes = _new(6.4)
    for row in rows:
        middles = [256 * i + 128 for i in range(len(row["losses"]))]
        axes.plot(middles, row["losses"], marker="o", label=row["title"])
    axes.set_xlabel("position in the record, tokens")
    axes.set_ylabel("held-out loss, nats a token")
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_splits(rows: list[Row], path: Path) -> None:
    """Draw the loss of each split of the compute against the noise that the plan tells."""
    figure, axes = _new(6.4)
    for index, rank in enumerate(_ranks(rows)):
        of = [row for row in rows if row["rank"] == rank]
        _draw_medians(axes, [row["averaged_noise_norm"] for row in of], of, index, _NAMES[index])
        for row in of:
            place = (row["averaged_noise_norm"], row["loss"])
            text, offset = f"{row['batch']}×{row['steps']}", ((6, 5), (-12, -22))[index]
            axes.annotate(text, place, offset, textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    ticks = [0.3, 0.5, 1, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.12, y=0.1)
    axes.set_xlabel("norm of the noise over C, averaged over the run")
    axes.set_ylabel("held-out loss at ε = 8, nats a token")
    axes.legend(fontsize=8)
    _save(figure, path)


def _ranks(rows: list[Row]) -> list[int]:
    return sorted({row["rank"] for row in rows})


def _draw_medians(axes: Any, x: list[float], rows: list[Row], index: int, label: str) -> None:
    """Draw each row's median, with the least and the most of its seeds."""
    below = [row["loss"] - min(row["losses"]) for row in rows]
    above = [max(row["losses"]) - row["loss"] for row in rows]
    style = {"color": _COLORS[index], "capsize": 4, "marker": "o"}
    axes.errorbar(x, [row["loss"] for row in rows], yerr=[below, above], label=label, **style)


def _new(width: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, 4.0), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    # Without the version of matplotlib: the same numbers are the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
