"""From what was measured to the rows of the JSON (medians over rounds, ratios within a round), and
to tables in Markdown."""

from statistics import median
from typing import Any

from .arms import LABELS, label
from .measure import Measured

GIB = 2**30
Row = dict[str, Any]
_TIMED = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "throughput_vs_non_dp",
    "throughput_vs_non_dp_rounds",
    "gap_to_non_dp",
    "throughput_vs_non_dp_without_ac",
)
_WEIGHED = ("peak_memory_gib", "peak_reserved_gib", "memory_vs_non_dp", "peak_allocated_gib")


def arm_rows(found: Measured) -> list[Row]:
    """One row an arm that was run, numbers None where memory did not suffice or none was timed."""
    return [_arm_row(arm, found) for arm in found.arms if arm.name not in found.skipped]


def _arm_row(arm: Any, found: Measured) -> Row:
    setting, name = found.setting, arm.name
    row: Row = {
        "name": name,
        "label": LABELS.get(name, name),
        "seq_len": setting.seq_len,
        "local_batch_size": setting.local_batch_size,
        "world_size": setting.devices,
        "microbatches": setting.microbatches,
        "activation_checkpoint": "full" if arm.checkpointed else "none",
        "status": _status(name, found),
    }
    return {
        **row,
        **_time_columns(name, arm.baseline, found),
        **_memory_columns(name, arm.baseline, found),
    }


def _status(name: str, found: Measured) -> str:
    if name in found.no_memory:
        return "OOM"
    return "ok" if name in found.weighed else "pending"  # while the benchmark runs


def _time_columns(name: str, baseline: str, found: Measured) -> Row:
    seconds = found.seconds.get(name)
    if seconds is None:
        return dict.fromkeys(_TIMED)
    tokens_per_second = found.setting.tokens / median(seconds)
    rounds = _speed_against(baseline, name, found)
    ratio = None if rounds is None else median(rounds)
    without_ac = _speed_against("non-DP", name, found)
    return {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / found.setting.devices,
        "throughput_vs_non_dp": ratio,
        "throughput_vs_non_dp_rounds": None if rounds is None else sorted(rounds),
        "gap_to_non_dp": None if ratio is None else 1 / ratio,
        "throughput_vs_non_dp_without_ac": None if without_ac is None else median(without_ac),
        "timed_in_turns": found.in_turns,
    }


def _speed_against(baseline: str, name: str, found: Measured) -> list[float] | None:
    """By round, how many times as fast as the baseline the arm was."""
    if baseline not in found.seconds:
        return None
    pairs = zip(found.seconds[baseline], found.seconds[name], strict=True)
    return [of_baseline / of_arm for of_baseline, of_arm in pairs]


def _memory_columns(name: str, baseline: str, found: Measured) -> Row:
    weighed, against = found.weighed.get(name), found.weighed.get(baseline)
    if weighed is None:
        return dict.fromkeys(_WEIGHED)
    peak, reserved = weighed["peak_bytes"], weighed["peak_reserved_bytes"]
    return {
        "peak_memory_gib": peak / GIB,
        "peak_reserved_gib": None if reserved is None else reserved / GIB,
        "memory_vs_non_dp": None if against is None else peak / against["peak_bytes"],
        "peak_allocated_gib": weighed["peak_allocated_bytes"] / GIB,
    }


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
    "counts": {
        **_MODEL,
        "method": ("method", ""),
        "FLOPs, DP / plain": ("flops_vs_non_dp", ".3f"),
        "bytes, DP / plain": ("bytes_vs_non_dp", ".3f"),
        "FLOPs": ("flops", ".4g"),
        "bytes, plain": ("non_dp_bytes", ".4g"),
        "bytes, DP": ("bytes", ".4g"),
    },
}


def table(kind: str, rows: list[Row]) -> str:
    """Write the rows of one kind."""
    lines = [[_cell(row, *column) for column in COLUMNS[kind].values()] for row in rows]
    return markdown([*COLUMNS[kind]], lines)


def _cell(row: Row, key: str, form: str) -> str:
    value = row.get(key)
    if value is None:  # not measured, or out of memory
        return "" if row.get("status", "ok") == "ok" else row["status"]
    return label(value) if key == "name" else format(value, form)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])
