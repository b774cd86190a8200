"""Markdown tables from the JSON's rows: a line for each, and for each table its columns."""

from itertools import combinations, pairwise
from typing import Any

from .arms import ARMS, label

Row = dict[str, Any]
_ARM = {"arm": ("name", ""), "processes": ("world_size", ""), "MBS": ("local_batch_size", "")}
_MODEL = {"model": ("model", ""), "MBS": ("local_batch_size", ""), "T": ("seq_len", ",")}
COLUMNS: dict[str, dict[str, tuple[str, str]]] = {  # by head: the row's key, and how it is written
    "arms": {
        **_ARM,
        "T": ("seq_len", ","),
        "tokens/s per device": ("tokens_per_second_per_device", ",.0f"),
        "gap": ("gap_to_non_dp", ".2f"),
        "peak, GiB a process": ("peak_memory_gib", ".3f"),
        "gap of peaks": ("memory_vs_non_dp", ".2f"),
        "allocated by PyTorch, GiB": ("peak_allocated_gib", ".3f"),
    },
    "lengths": {
        **_ARM,
        "T": ("seq_len", ","),
        "non-DP s/step": ("non_dp_seconds_per_step", ".3f"),
        "s/step": ("seconds_per_step", ".3f"),
        "extra s/step": ("extra_seconds_per_step", ".3f"),
        "extra µs/token": ("extra_microseconds_per_token", ".2f"),
    },
    "ranks": {
        **_ARM,
        "per-sample gradients, bytes": ("per_sample_gradient_bytes", ",.0f"),
        "sent in a step, bytes": ("bytes_sent_per_step", ",.0f"),
        "by kind": ("bytes_sent_by_kind", ""),
    },
    "counts": {
        **_MODEL,
        "method": ("method", ""),
        "FLOPs, DP / plain": ("flops_vs_non_dp", ".3f"),
        "bytes, DP / plain": ("bytes_vs_non_dp", ".3f"),
        "FLOPs": ("flops", ".4g"),
        "bytes, plain": ("non_dp_bytes", ".4g"),
        "bytes, DP": ("bytes", ".4g"),
        "by part": ("bytes_by_part", ""),
    },
    "tiles": {
        "model": ("model", ""),
        "trained": ("trained", ""),
        "T": ("seq_len", ","),
        "ranks": ("world_size", ""),
        "FLOPs, tiles / none": ("flops_vs_no_tiles", ".4f"),
        "bytes, tiles / none": ("bytes_vs_no_tiles", ".4f"),
    },
    "data": {  # which is no longer measured
        "ranks of one cp group": ("world_size", ""),
        "epoch": ("epoch", ""),
        "share of a step that waits": ("wait_fraction", ".3f"),
        "with an all-reduce alone": ("without_loader", ".3f"),
    },
}
COLUMNS["crossover"] = COLUMNS["arms"]


def table(kind: str, rows: list[Row]) -> str:
    """Write the rows of one kind, of a crossover with where arms change places."""
    lines = [[_cell(row, *column) for column in COLUMNS[kind].values()] for row in rows]
    found = markdown([*COLUMNS[kind]], lines)
    if kind == "crossover":
        title = "Where private arms change places, beyond the rounds' scatter:"
        found += "\n\n".join(["", title, "\n".join(f"- {line}" for line in crossings(rows))])
    return found


def _cell(row: Row, key: str, form: str) -> str:
    value = row.get(key)
    if value is None:  # not measured, or out of memory
        return "" if row.get("status", "ok") == "ok" else row["status"]
    if isinstance(value, dict):
        return ", ".join(f"{name}: {number:.4g}" for name, number in value.items())
    return label(value) if key == "name" else format(value, form)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


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
