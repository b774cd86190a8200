"""What `scripts/gpu_report.sh` measures by itself: versions, kernels, memory, a profiled step.

    python scripts/benchmarking/gpu_parts.py machine [--json FILE]
    python scripts/benchmarking/gpu_parts.py timings [--json FILE] [--values N] [--tokens N] …
    python scripts/benchmarking/gpu_parts.py plan ROWS.json … [--json FILE]
    python scripts/benchmarking/gpu_parts.py long [--seq_len T] [--json FILE]
    python scripts/benchmarking/gpu_parts.py tiles --config FILE --seq_len T [--json FILE]
    python scripts/benchmarking/gpu_parts.py profile [--seq_len T] [--arm A] [--batch_size B] …

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
    machine_ = kinds.add_parser("machine")
    times = kinds.add_parser("timings")
    times.add_argument("--values", type=int, default=1_235_814_400, help="of a 1B model")
    times.add_argument("--tokens", type=int, default=16384)
    times.add_argument("--dim", type=int, default=2048)
    times.add_argument("--vocabulary", type=int, default=128256)
    times.add_argument("--rounds", type=int, default=10)
    plan = kinds.add_parser("plan")
    plan.add_argument("rows", nargs="+", type=Path)
    long_ = kinds.add_parser("long")
    long_.add_argument("--seq_len", type=int, default=131072)
    tiles = kinds.add_parser("tiles")
    tiles.add_argument("--config", required=True)
    tiles.add_argument("--seq_len", type=int, required=True)
    profile = kinds.add_parser("profile")
    profile.add_argument("--seq_len", type=int, default=16384)
    profile.add_argument("--arm", default="microbatch")
    profile.add_argument("--batch_size", type=int, default=1)
    for part in (machine_, times, plan, long_, tiles, profile):
        part.add_argument("--json", type=Path)
    options = parser.parse_args()
    run: dict[str, Callable[[argparse.Namespace], Row]] = {
        "machine": machine,
        "timings": timings,
        "plan": predictions,
        "long": offloaded,
        "tiles": tiled,
        "profile": profiled,
    }
    result = run[options.part](options)
    text = json.dumps(result, indent=2)
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
    from benchmarking.worker import _build, _draws_of_fixed_size

    with _draws_of_fixed_size(setting.records):
        step = _build(arm, setting, folder)
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
    from benchmarking.worker import _build, _draws_of_fixed_size

    activity = torch.profiler.ProfilerActivity
    with _draws_of_fixed_size(setting.records):
        step = _build(arm, setting, folder)
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


if __name__ == "__main__":
    main()
