"""Writes down how a part of `scripts/gpu_report.sh` ended, and the report of all parts so far.

python scripts/benchmarking/gpu_table.py FOLDER PART STATUS SECONDS COMMAND
"""

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("tokens_per_second", "throughput_vs_non_dp", "peak_memory_gib", "memory_vs_non_dp")


def main(folder: Path, part: str, status: str, seconds: str, command: str) -> None:
    written = {"part": part, "status": status, "seconds": int(seconds), "command": command}
    (folder / f"{part}.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report(folder), encoding="utf-8")


def report(folder: Path) -> str:
    """All parts that were tried, in the order of their names' files, and what they measured."""
    results = {path.name.removesuffix(".result.json") for path in folder.glob("*.result.json")}
    paths = [p for p in folder.glob("*.json") if not p.name.endswith(".result.json")]
    lines = ["# One GPU's report", "", "| part | status | seconds |", "| --- | --- | --- |"]
    details = []
    for path in sorted(paths, key=lambda p: p.stat().st_mtime_ns):
        one = json.loads(path.read_text(encoding="utf-8"))
        lines.append(f"| {one['part']} | {one['status']} | {one['seconds']} |")
        if one["part"] in results:
            content = (folder / f"{one['part']}.result.json").read_text(encoding="utf-8")
            details += ["", f"## {one['part']}", "", *figures(json.loads(content))]
    return "\n".join([*lines, *details]) + "\n"


def figures(result: dict[str, Any]) -> list[str]:
    """A Markdown table of each list of rows, and a line for each other value."""
    lines = []
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = value if name != "arms" else [_brief(row) for row in value]
            lines += ["", *_table(rows), ""]
        elif not isinstance(value, list | dict):
            lines.append(f"- {name.replace('_', ' ')}: {_shown(value)}")
    return lines


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of the benchmark says in one line."""
    return {key: row[key] for key in ("name", "seq_len", "status", *COLUMNS) if key in row}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = list(rows[0])
    cells = [[_shown(row.get(key)) for key in head] for row in rows]
    return [
        f"| {' | '.join(head)} |",
        "|" + " --- |" * len(head),
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
