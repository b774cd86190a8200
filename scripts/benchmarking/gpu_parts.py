"""What `scripts/gpu_report.sh` measures by itself, and how it writes its report.

    python scripts/benchmarking/gpu_parts.py machine|timings|plan|long|tiles|profile [--json FILE] …
    python scripts/benchmarking/gpu_parts.py report FOLDER PART STATUS SECONDS COMMAND

Times are of CUDA events around one call, medians of the rounds. On a CPU they are of the clock, so
that this file can be tried there; they say nothing of a GPU.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
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
    for name, (_, defaults) in PARTS.items():
        part = kinds.add_parser(name)
        for option, default in defaults.items():
            part.add_argument(f"--{option}", type=type(default), default=default)
        part.add_argument("--json", type=Path)
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
    run, _ = PARTS[options.part]
    text = json.dumps(run(options), indent=2)
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


def timings(options: argparse.Namespace) -> Row:
    """Time a norm, one sample's clip-and-add, a step's noise, and the loss head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = _time_sums(options.values, options.rounds, device)
    for chunk in (2048, 8192):
        rows.append(_time_loss_head(options, chunk, device))
    return {"device": _device_name(device), "timings": rows}


def _time_sums(values: int, rounds: int, device: torch.device) -> list[Row]:
    from torchtitan_dp.privacy.clipping import add_clipped_, squared_norm
    from torchtitan_dp.privacy.noise import add_gaussian_noise_
    from torchtitan_dp.privacy.secure_noise import add_secure_gaussian_noise_

    gradient = torch.full((values,), 1e-6, device=device)
    total = torch.zeros_like(gradient)
    factor, rejected = torch.tensor(0.5, device=device), torch.tensor(False, device=device)
    noise = {"std": 1.0, "key": bytes(32), "name": "w", "start": 0}
    calls: dict[str, Callable[[], object]] = {
        "squared norm": lambda: squared_norm(gradient),
        "clip and add": lambda: add_clipped_(total, gradient, factor, rejected),
        "noise": lambda: add_gaussian_noise_(total, **noise),
        "secure noise": lambda: add_secure_gaussian_noise_(total, **noise),
    }
    return [
        {"what": what, "of": f"{values:,} values", "ms": _median_ms(call, rounds)}
        for what, call in calls.items()
    ]


def _time_loss_head(options: argparse.Namespace, chunk: int, device: torch.device) -> Row:
    """Forward and backward, in bf16."""
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torchtitan_dp.models.loss_head import LossHead

    tokens, dim = options.tokens, options.dim
    output = torch.nn.Linear(dim, options.vocabulary, bias=False, device=device)
    head = LossHead.over(output.to(torch.bfloat16), chunk)
    h_BTD = torch.randn(1, tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    targets_B = torch.tensor([tokens], device=device)

    def both() -> None:
        head.weight.grad = h_BTD.grad = None
        head(h_BTD, labels_BT, targets_B).sum().backward()

    milliseconds = _median_ms(both, options.rounds)
    products = 6 * tokens * dim * options.vocabulary
    return {
        "what": f"loss head, chunks of {chunk:,}: {products / milliseconds / 1e9:.4g} TFLOP/s",
        "of": f"{tokens:,} tokens",
        "ms": milliseconds,
    }


def _median_ms(call: Callable[[], object], rounds: int) -> float:
    """Of single calls, after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


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


def offloaded(options: argparse.Namespace) -> Row:
    """Weigh steps of long samples, activations recomputed, without and with offloaded inputs."""
    from benchmarking.arms import ARMS

    rows = []
    for offload in (False, True):
        flag = f"--activation_checkpoint.{'' if offload else 'no-'}offload_inputs"
        found = _of_one_process(weigh_steps, ARMS["microbatch + AC"], options.seq_len, 1, 2, [flag])
        rows.append({"seq_len": options.seq_len, "offload_inputs": offload, **found})
    return {"steps": rows}


def tiled(options: argparse.Namespace) -> Row:
    """Weigh and time steps of one long sample, without and with blocks in tiles, inputs offloaded;
    beside them the plan's predictions."""
    from benchmarking.arms import ARMS
    from torchtitan_dp.plan.memory import predict

    rows = []
    for chunk in ("0", "auto"):
        flags = ["--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs"]
        flags.append(f"--training.feed_forward_chunk={chunk}")
        given = [f"--job.config_file={options.config}", f"--training.seq_len={options.seq_len}"]
        plan = predict([*given, *flags], 1, 80.0, longest=False)
        found = _of_one_process(
            weigh_steps, ARMS["microbatch + AC"], options.seq_len, 1, 1, flags, options.config
        )
        rows.append(
            {
                "seq_len": options.seq_len,
                "feed_forward_chunk": chunk,
                "predicted_gib": plan.peak_bytes / GIB,
                "tokens_per_second": options.seq_len / found["seconds"],
                **found,
            }
        )
    return {"steps": rows}


def weigh_steps(arm: Any, setting: Any, folder: str) -> Row:
    """In a process of its own: what the allocator counted over three steps, and the last's time."""
    from benchmarking.worker import build, draws_of_fixed_size

    with draws_of_fixed_size(setting.records):
        step = build(arm, setting, folder)
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
        "reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "alloc_retries": stats["num_alloc_retries"],
        "seconds": time.perf_counter() - began,
    }


def profiled(options: argparse.Namespace) -> Row:
    """Profile one private step, and say for which part of it the device had nothing to do."""
    from benchmarking.arms import ARMS

    arm, batch_size = ARMS[options.arm], options.batch_size
    found = _of_one_process(profile_step, arm, options.seq_len, batch_size, 4, [])
    return {"seq_len": options.seq_len, "arm": arm.name, "batch_size": batch_size, **found}


def _of_one_process(
    work: Callable[..., Row],
    arm: Any,
    seq_len: int,
    batch_size: int,
    microbatches: int,
    overrides: list[str],
    config: str = CONFIG,
) -> Row:
    """Run `work` on steps of a configuration (of 1B by default), in a process of its own."""
    from benchmarking.measure import make_setting
    from benchmarking.processes import on_processes

    setting = make_setting(
        config,
        [f"--training.seq_len={seq_len}", *overrides],
        1,
        local_batch_size=batch_size,
        microbatches=microbatches,
    )
    (result,) = on_processes(1, work, arm, setting)
    return result


def profile_step(arm: Any, setting: Any, folder: str) -> Row:
    """In a process of its own: the third step, under the profiler."""
    from benchmarking.worker import build, draws_of_fixed_size

    activity = torch.profiler.ProfilerActivity
    with draws_of_fixed_size(setting.records):
        step = build(arm, setting, folder)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [event for event in profile.events() if event.device_type == on_device]
    return idle([(event.time_range.start, event.time_range.end) for event in kernels])


def idle(busy: Iterable[tuple[float, float]]) -> Row:
    """From the times in µs at which kernels began and ended: how long none ran.

    >>> idle([(0, 10), (5, 20), (30, 40)])["gaps_ms"]
    [0.01]
    """
    end, gaps, first = None, [], None
    for start, stop in sorted(busy):
        first = start if first is None else first
        if end is not None and start > end:
            gaps.append(start - end)
        end = stop if end is None else max(end, stop)
    assert first is not None
    assert end is not None
    return {
        "step_ms": (end - first) / 1e3,
        "idle_ms": sum(gaps) / 1e3,
        "idle_share": sum(gaps) / (end - first),
        "gaps_ms": [gap / 1e3 for gap in sorted(gaps, reverse=True)[:10]],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Row], dict[str, Any]]] = {
    "machine": (machine, {}),
    "timings": (  # of a 1B model
        timings,
        {"values": 1_235_814_400, "tokens": 16384, "dim": 2048, "vocabulary": 128256, "rounds": 10},
    ),
    "plan": (predictions, {}),
    "long": (offloaded, {"seq_len": 131072}),
    "tiles": (tiled, {"seq_len": 65536, "config": CONFIG}),
    "profile": (profiled, {"seq_len": 16384, "arm": "microbatch", "batch_size": 1}),
}


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
