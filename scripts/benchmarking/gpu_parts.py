"""What `scripts/gpu_report.sh` measures by itself, and how it writes its report.

python scripts/benchmarking/gpu_parts.py machine|plan [--json FILE] …
python scripts/benchmarking/gpu_parts.py report FOLDER PART STATUS SECONDS COMMAND
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
CONFIG = str(ROOT / "train_configs/llama3_1b_64k.toml")
GIB = 2**30
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="part", required=True)
    for name in PARTS:
        kinds.add_parser(name).add_argument("--json", type=Path)
    kinds.choices["plan"].add_argument("rows", nargs="+", type=Path)
    report_ = kinds.add_parser("report")
    for argument in ("folder", "named", "status", "seconds", "command"):
        report_.add_argument(argument)
    options = parser.parse_args()
    if options.part == "report":
        written = {"part": options.named, "status": options.status}
        written |= {"seconds": int(options.seconds), "command": options.command}
        write_report(Path(options.folder), written)
        return
    text = json.dumps(PARTS[options.part](options), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


def machine(_: argparse.Namespace) -> Row:
    """Name the versions that decide which kernels run, and what Triton builds its launcher with."""
    cuda = torch.cuda.is_available()
    cudnn: Any = torch._C._cudnn if cuda else None  # type: ignore[attr-defined]
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "free_gib, total_gib": ", ".join(f"{n / GIB:.1f}" for n in torch.cuda.mem_get_info())
        if cuda
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn_compiled": ".".join(map(str, cudnn.getCompileVersion())) if cuda else None,
        "cudnn_running": ".".join(map(str, cudnn.getRuntimeVersion())) if cuda else None,
        "triton": _version("triton"),
        "compiler": shutil.which(os.environ.get("CC", "cc")),
    }


def predictions(options: argparse.Namespace) -> Row:
    """Hold the plan's predictions against what the benchmark measured: what tensors took, what the
    allocator reserved, and what the device had in use with all that lies beside its pool. The
    plan's headroom must cover what is in use beyond the prediction.
    """
    from torchtitan_dp.plan.memory import predict

    rows = []
    for path in options.rows:
        for row in json.loads(path.read_text(encoding="utf-8"))["arms"]:
            if row["name"].startswith("non-DP") or row["peak_memory_gib"] is None:
                continue
            overrides = ["--job.config_file", CONFIG, f"--training.seq_len={row['seq_len']}"]
            overrides.append(f"--activation_checkpoint.mode={row['activation_checkpoint']}")
            plan = predict(overrides, 1, 80.0, longest=False)
            predicted, reserved = plan.peak_bytes / GIB, row["peak_reserved_gib"]
            beside = row["beside_the_pool_gib"]
            in_use = None if reserved is None or beside is None else reserved + beside
            rows.append(
                {
                    "seq_len": row["seq_len"],
                    "activation_checkpoint": row["activation_checkpoint"],
                    "predicted_gib": predicted,
                    "allocated_gib": row["peak_memory_gib"],
                    "reserved_gib": reserved,
                    "in_use_gib": in_use,
                    "predicted_vs_allocated": predicted / row["peak_memory_gib"],
                    "predicted_vs_reserved": None if reserved is None else predicted / reserved,
                    "headroom_gib": plan.headroom_gib,
                    "headroom_needed_gib": None if in_use is None else in_use - predicted,
                }
            )
    return {"predictions": rows}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


PARTS: dict[str, Callable[[argparse.Namespace], Row]] = {"machine": machine, "plan": predictions}


# The report.

COLUMNS = ("tokens_per_second", "throughput_vs_non_dp", "peak_memory_gib", "memory_vs_non_dp")


def write_report(folder: Path, written: Row) -> None:
    """Write down how a part ended, and the report of all parts so far."""
    text = json.dumps(written, indent=2) + "\n"
    (folder / f"{written['part']}.json").write_text(text, encoding="utf-8")
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


def figures(result: Row) -> list[str]:
    """A Markdown table of each list of rows, and a line for each other value."""
    lines = []
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = value if name != "arms" else [_brief(row) for row in value]
            lines += ["", *_table(rows), ""]
        elif not isinstance(value, list | dict):
            lines.append(f"- {name.replace('_', ' ')}: {_shown(value)}")
    return lines


def _brief(row: Row) -> Row:
    """What a row of the benchmark says in one line."""
    return {key: row[key] for key in ("name", "seq_len", "status", *COLUMNS) if key in row}


def _table(rows: list[Row]) -> list[str]:
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
    main()
