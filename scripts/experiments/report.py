"""From the runs' numbers to the tables of docs/results.md: medians, least and most, ranks."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_dp.plan.signal import FEWEST_STEPS

from . import figures
from .arms import EPSILONS, RANK, Arm, groups, of_bands
from .ranks import spearman
from .runs import Folder

Told = dict[str, Any]
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
WHAT = {0: "all weights", RANK: f"LoRA, rank {RANK}"}


def write(folder: Folder, docs: Path, only: Sequence[str] = ()) -> None:
    """Collect the runs that are done, and the facts of the text, in `results/`.

    Args:
        only: ["bands"] writes `bands.json` alone, whose runs have starting weights of their own.
    """
    known = {arm.name for group in groups().values() for arm in group}
    files = {"runs": known, "bands": {arm.name for arm in of_bands()}}
    told = [json.loads(path.read_text()) for path in sorted(folder.told("*").parent.glob("*.json"))]
    corpus = json.dumps(json.loads((folder.corpus / "corpus.json").read_text()))
    (docs / "results").mkdir(exist_ok=True)
    for name in only or files:
        kept = ",\n".join(json.dumps(one) for one in told if one["name"] in files[name])
        target = docs / "results" / f"{name}.json"
        target.write_text(f'{{"corpus": {corpus},\n"runs": [\n{kept}\n]}}\n', encoding="utf-8")


def render(docs: Path) -> None:
    """Draw figures and fill in tables from `results/runs.json` and `results/bands.json` alone."""
    runs = read(docs)
    made = tables(runs) | {"bands": bands_table(read(docs, "bands"))}
    page = docs / "results.md"
    page.write_text(filled_in(page.read_text(), made))
    figures.draw_losses(main_rows(runs), docs / "results" / "losses.png")
    figures.draw_positions(position_rows(runs), docs / "results" / "positions.png")
    figures.draw_splits(split_rows(runs), docs / "results" / "splits.png")


def read(docs: Path, name: str = "runs") -> dict[str, Told]:
    """Return the runs that were committed, by name."""
    content = json.loads((docs / "results" / f"{name}.json").read_text())
    return {one["name"]: one for one in content["runs"]}


def filled_in(page: str, made: dict[str, str]) -> str:
    """Put each table between its two marks."""
    for name, text in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        assert page.count(begin) == page.count(end) == 1, name
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        whole = f"{begin}\n{text}\n{end}"
        page = re.sub(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL)
    return page


def tables(runs: dict[str, Told]) -> dict[str, str]:
    """Return all tables in Markdown, by the names of their marks."""
    return {
        "main": main_table(main_rows(runs)),
        "positions": positions_table(position_rows(runs)),
        "splits": splits_table(split_rows(runs), considered_rows(runs)),
        "tried": tried_table(runs),
    }


def spread(losses: Sequence[float]) -> str:
    """Write a median, with least and most where there are several."""
    middle = f"{statistics.median(losses):.3f}"
    if len(losses) == 1:
        return middle
    return f"{middle} ({min(losses):.3f}–{max(losses):.3f})"


def main_rows(runs: dict[str, Told]) -> list[Told]:
    """Collect the seeds of each kind of run; kinds without a run are left out."""
    found: dict[tuple[str, int, float], list[Told]] = {}
    for arm in (*groups()["none"], *groups()["main"]):
        if arm.name in runs:
            found.setdefault((arm.kind, arm.rank, arm.epsilon), []).append(runs[arm.name])
    rows: list[Told] = []
    for (kind, rank, epsilon), told in found.items():
        losses = [one["loss"] for one in told]
        privacy = told[0].get("privacy", {})
        rows.append(
            {
                "kind": kind,
                "rank": rank,
                "epsilon": epsilon,
                "losses": losses,
                "loss": statistics.median(losses),
                "sigma": privacy.get("noise_multiplier"),
                "noise": privacy.get("averaged_noise_norm"),
            }
        )
    return rows


def gap_closed(loss: float, rows: Iterable[Told]) -> float | None:
    """Return which share a loss is of the way from no tuning to the best without privacy."""
    untuned = [row["loss"] for row in rows if row["kind"] == "none"]
    best = [row["loss"] for row in rows if row["kind"] == "plain"]
    if not untuned or not best:
        return None
    return float((untuned[0] - loss) / (untuned[0] - min(best)))


_ORDER = {"none": 0, "noise": 1, "private": 2, "plain": 3}


def main_table(rows: list[Told]) -> str:
    lines = [
        "| tuning | trained | held-out loss | runs | gap closed | σ | noise over C, averaged |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda r: (_ORDER[r["kind"]], r["epsilon"], r["rank"])):
        title = {
            "none": "none",
            "noise": f"noise alone, as at ε = {row['epsilon']:g}",
            "private": f"ε = {row['epsilon']:g}",
            "plain": "without privacy",
        }[row["kind"]]
        closed = gap_closed(row["loss"], rows)
        of_noise = row["kind"] == "private"
        cells = (
            title,
            "" if row["kind"] == "none" else WHAT[row["rank"]],
            spread(row["losses"]),
            str(len(row["losses"])),
            "" if row["kind"] == "none" or closed is None else f"{closed:.0%}",
            f"{row['sigma']:.3f}" if of_noise else "",
            f"{row['noise']:.2f}" if row["noise"] is not None else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def position_rows(runs: dict[str, Told]) -> list[Told]:
    """Collect the losses by position: no tuning, and each kind's best rank (medians of seeds)."""
    of = groups()
    kinds: list[tuple[str, list[Arm]]] = [("no tuning", of["none"])]
    for epsilon in EPSILONS[::-1]:
        private = [a for a in of["main"] if a.kind == "private" and a.epsilon == epsilon]
        kinds.append((f"ε = {epsilon:g}", private))
    kinds.append(("without privacy", [a for a in of["main"] if a.kind == "plain"]))
    rows = []
    for title, arms in kinds:
        by_rank: dict[int, list[Told]] = {}
        for arm in arms:
            if arm.name in runs:
                by_rank.setdefault(arm.rank, []).append(runs[arm.name])
        if not by_rank:
            continue
        rank = min(by_rank, key=lambda r: statistics.median(x["loss"] for x in by_rank[r]))
        seeds = zip(*(one["by_position"] for one in by_rank[rank]), strict=True)
        title += "" if title == "no tuning" else f", {WHAT[rank]}"
        rows.append({"title": title, "losses": [statistics.median(at) for at in seeds]})
    return rows


def positions_table(rows: list[Told]) -> str:
    starts = range(0, 2048, 256)
    lines = [
        f"| tuning | {' | '.join(f'{s:,}–{s + 255:,}' for s in starts)} |",
        "| --- |" + " --- |" * len(starts),
    ]
    for row in rows:
        lines.append(f"| {row['title']} | {' | '.join(f'{x:.3f}' for x in row['losses'])} |")
    return "\n".join(lines)


def split_rows(runs: dict[str, Told]) -> list[Told]:
    """Collect the splits of one compute over batch and steps, with their noise and their loss."""
    found: dict[tuple[int, int], Told] = {}
    for arm in groups()["splits"]:
        if arm.name in runs:
            one = runs[arm.name]
            noise = {k: one["privacy"][k] for k in ("noise_norm", "averaged_noise_norm")}
            row = {"rank": arm.rank, "batch": arm.batch, "steps": arm.steps, "lr": arm.lr}
            row |= {"sigma": one["privacy"]["noise_multiplier"], "losses": [], **noise}
            found.setdefault((arm.rank, arm.steps), row)["losses"].append(one["loss"])
    return [row | {"loss": statistics.median(row["losses"])} for row in found.values()]


def considered_rows(runs: dict[str, Told]) -> list[Told]:
    """Collect the settings that `--recommend` considers: enough steps, at every ε."""
    splits = [row for row in split_rows(runs) if row["steps"] >= FEWEST_STEPS]
    others = [
        row | {"averaged_noise_norm": row["noise"]}
        for row in main_rows(runs)
        if row["kind"] == "private" and row["epsilon"] != EPSILONS[0]
    ]
    return splits + others


def splits_table(rows: list[Told], considered: list[Told]) -> str:
    lines = [
        "| trained | batch × steps | learning rate | σ | noise over C, a step | averaged | "
        "held-out loss | runs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {WHAT[row['rank']]} | {row['batch']} × {row['steps']} | {row['lr']:.2g} | "
            f"{row['sigma']:.3f} | {row['noise_norm']:.2f} | {row['averaged_noise_norm']:.2f} | "
            f"{spread(row['losses'])} | {len(row['losses'])} |"
        )
    lines += [
        "",
        "Rank correlation (Spearman) of the noise, averaged over the run, with the median loss:",
        "",
        f"- all splits: {_told(rows)}",
        f"- splits of {FEWEST_STEPS} steps and more, with ε = 1 and 3 beside them: "
        f"{_told(considered)}",
    ]
    return "\n".join(lines)


def _told(rows: list[Told]) -> str:
    return "; ".join(f"{title}: {value:.2f}" for title, value in correlations(rows))


def correlations(rows: list[Told]) -> list[tuple[str, float]]:
    """Return the rank correlation of averaged noise and loss, of all rows and of each rank."""
    every = [("both", rows)]
    every += [(what, [r for r in rows if r["rank"] == rank]) for rank, what in WHAT.items()]
    return [
        (f"{title} ({len(of)})", spearman(*_noise_and_loss(of)))
        for title, of in every
        if len(of) > 2
    ]


def _noise_and_loss(rows: list[Told]) -> tuple[list[float], list[float]]:
    return [row["averaged_noise_norm"] for row in rows], [row["loss"] for row in rows]


def bands_table(runs: dict[str, Told]) -> str:
    """Return the runs with correlated noise beside those they are compared with."""
    reference = main_rows(runs)
    rows: dict[tuple[str, ...], list[Told]] = {}
    for arm in of_bands():
        if arm.name in runs:
            rows.setdefault(_bands_cells(arm, runs[arm.name]), []).append(runs[arm.name])
    lines = [
        "| trained | batch × steps | noise | optimizer | learning rate | σ | held-out loss | runs "
        "| gap closed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cells, seeds in rows.items():
        losses = [one["loss"] for one in seeds]
        closed = gap_closed(statistics.median(losses), reference)
        shown = "" if closed is None else f"{closed:.0%}"
        lines.append(f"| {' | '.join(cells)} | {spread(losses)} | {len(losses)} | {shown} |")
    return "\n".join(lines)


def _bands_cells(arm: Arm, one: Told) -> tuple[str, ...]:
    """Return the cells before the loss."""
    if arm.kind == "none":
        return ("no tuning", "", "", "", "", "")
    split = f"{arm.batch} × {arm.steps}"
    if arm.kind == "plain":
        return (WHAT[arm.rank], split, "without privacy", "AdamW", f"{arm.lr:g}", "")
    noise = "independent" if arm.bands == 1 else f"{arm.bands} bands"
    sigma = f"{one['privacy']['noise_multiplier']:.3f}"
    return (WHAT[arm.rank], split, noise, arm.optimizer, f"{arm.lr:g}", sigma)


def tried_table(runs: dict[str, Told]) -> str:
    """Return the runs that chose a rate and a bound, and what windows and averages bring; an arm
    that has not been run has an empty cell."""
    of = groups()
    lines = ["| tried | setting | held-out loss |", "| --- | --- | --- |"]
    for name, say in (
        ("rates", lambda a: f"learning rate {a.lr:g}"),
        ("bounds", lambda a: f"C = {a.max_grad_norm:g} instead of 1"),
        ("windows", lambda a: f"K = {a.windows}, windows anywhere in a file"),
        ("averages", lambda a: f"{a.batch} × {a.steps}, `ema.enable`; without"),
    ):
        said: dict[str, list[Told]] = {}
        for arm in of[name]:
            seeds = said.setdefault(f"{_kind(arm)}: {say(arm)}", [])
            seeds += [runs[arm.name]] if arm.name in runs else []
        for setting, seeds in said.items():
            losses = [
                spread([one[key] for one in seeds])
                for key in ("loss", "last_weights")
                if seeds and key in seeds[0]
            ]
            lines.append(f"| {name} | {setting} | {'; '.join(losses)} |")
    return "\n".join(lines)


def _kind(arm: Arm) -> str:
    kind = "without privacy" if arm.kind == "plain" else f"ε = {arm.epsilon:g}"
    return f"{kind}, {WHAT[arm.rank]}"
