"""What one GPU can show in so many minutes: proofs side by side, then timings, each alone.

    scripts/gpu_report.sh --minutes N [--out FOLDER] [--dry_run | --rehearse] [PART …]
    scripts/gpu_report.sh --row ARM T MBS CONFIG [--section.key value …] | --predict FOLDER

Parts start in the order of their value, if their estimate fits what is left of the minutes, and are
killed at their limit with all that they started. FOLDER (outputs/gpu_report) gets three files as
each part ends: report.json, report.md and log.txt, the ends of all logs. Parts that succeeded are
not run again. Without a CUDA device nothing runs, or with --rehearse each, on small sizes. Exit
code 1 if a part failed.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
_FILE = Path(__file__).resolve().relative_to(ROOT)
RUNS = ROOT / "outputs/gpu_report"  # folders of runs, and whole logs
PART = "GPU_REPORT_PART"  # in the environment of all that a part starts
MORE = 30  # seconds beyond half as many again as estimated
_LOG = 20_000  # characters of each
_GRACE = 10  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Part:
    """A command; `seconds` are an estimate. A proof runs beside others, a timing alone."""

    name: str
    seconds: int
    command: str
    proof: bool = True


def all_parts(*, small: bool) -> list[Part]:
    """List the parts in the order of their value."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))  # by name: all take long to collect
    names = [str(p.relative_to(ROOT)) for p in files if "pytest.mark." + "cuda" in p.read_text()]
    checks = [name for name in names if name.startswith("tests/selfcheck")]
    python, runs = shlex.quote(sys.executable), shlex.quote(str(RUNS))
    tests = "./scripts/run_tests.sh -m cuda -q -rfs --tb=short"
    check = f"env TORCH_LOGS=recompiles {python} -m"
    ranks = "torch.distributed.run --local-addr 127.0.0.1 --nproc_per_node 2 -m"
    shared = "tests.selfcheck.shared_device"  # NCCL refuses two ranks on a device
    train = "env NGPU=1 ./run_train.sh train_configs/llama3_debug.toml --training.steps 12"
    compiled = "--compile.enable --training.mixed_precision_param bfloat16 --data.length_buckets"
    trained = [
        ("compile", f"--training.seq_len 2048 {compiled}"),
        ("mbs4", "--training.seq_len 2048 --training.local_batch_size 4"),
        ("offload", "--activation_checkpoint.mode full --activation_checkpoint.offload_inputs"),
    ]
    commands = [
        ("machine", 20, f"{python} -m torch.utils.collect_env"),
        ("kernels", 150, f"{tests} {' '.join(name for name in names if name not in checks)}"),
        ("selfcheck", 120, f"{check} torchtitan_dp.selfcheck"),
        ("two_ranks", 150, f"{check} {ranks} {shared} --backend cpu:gloo,cuda:gloo"),
        ("demo", 60, f"env NGPU=1 ./run_train.sh --job.dump_folder={runs}/demo"),
        ("resume", 120, f"env NGPU=1 bash scripts/benchmarking/stop_and_resume.sh {runs}/resume"),
        *((name, 100, f"{train} --job.dump_folder={runs}/{name} {of}") for name, of in trained),
        ("selfcheck_tests", 200, f"{tests} -n 8 {' '.join(checks)}"),
    ]
    parts = [Part(*one) for one in commands]
    for seconds, arm, tokens, mbs, config, more in ROWS:
        name = f"{arm.replace(' + ', '_')}_{tokens >> 10}k_mbs{mbs}_{config}{more.replace(' ', '')}"
        if small:
            tokens, config = 256, "llama3_debug"
        given = f"'{arm}' {tokens} {mbs} train_configs/{config}.toml {more}"
        parts.append(Part(name, seconds, f"{python} {_FILE} --row {given}", proof=False))
    return parts


_1B, _8B = "llama3_1b_64k", "llama3_8b_64k_lora"
_OFFLOAD = "--activation_checkpoint.mode=full --activation_checkpoint.offload_inputs"
ROWS = [  # seconds, arm, T, MBS, configuration, overrides; first those that nobody has measured
    (45, "V2", 2_048, 4, _1B, ""),
    (45, "ghost", 2_048, 4, _1B, ""),
    (90, "microbatch", 16_384, 1, _1B, "--compile.enable"),
    (110, "microbatch + AC", 131_072, 1, _1B, _OFFLOAD),
    (200, "non-DP + AC", 65_536, 1, _8B, ""),
    (50, "non-DP", 16_384, 1, _1B, ""),
    (50, "microbatch", 16_384, 1, _1B, ""),
    (55, "V2 + AC", 16_384, 1, _1B, ""),
    (50, "non-DP + AC", 16_384, 1, _1B, ""),
    (80, "microbatch + AC", 65_536, 1, _1B, ""),
    (65, "non-DP + AC", 65_536, 1, _1B, ""),
    (50, "non-DP", 2_048, 4, _1B, ""),
    (200, "microbatch + AC", 65_536, 1, _8B, ""),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--minutes", type=float)
    kinds.add_argument("--row", nargs=4, metavar=("ARM", "T", "MBS", "CONFIG"))
    kinds.add_argument("--predict", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RUNS)
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options, overrides = parser.parse_known_args()
    if options.row:
        arm, tokens, mbs, config = options.row
        print(json.dumps(row(arm, int(tokens), int(mbs), config, [*options.parts, *overrides])))
    elif options.predict:
        predict_rows(options.predict)
    elif overrides:
        parser.error(f"unknown options: {' '.join(overrides)}")
    else:
        parts = all_parts(small=options.rehearse)
        there = [part.name for part in parts]
        if unknown := {*options.parts} - {*there}:
            parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(there)}")
        parts = [part for part in parts if not options.parts or part.name in options.parts]
        if options.dry_run:
            for part in parts:
                kind = "proof" if part.proof else "timing, alone"
                print(f"{part.name}: {part.seconds} s, {kind}: {part.command}")
            return
        found = Report(options.out)
        run(parts, found, 60 * options.minutes, torch.cuda.is_available() or options.rehearse)
        sys.exit(any(one["status"][:6] in ("failed", "killed") for one in found.parts.values()))


class Report:
    """What was found, by part, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.parts = folder, dict[str, dict[str, Any]]()
        if (path := folder / "report.json").exists():
            self.parts = json.loads(path.read_text(encoding="utf-8"))

    def add(self, part: Part, status: str, seconds: float = 0, log: str = "") -> None:
        """Write down how a part ended."""
        print(f"{part.name}: {status}, {seconds:.0f} s", flush=True)
        lines = log.strip().splitlines() or [""]
        result = None
        with contextlib.suppress(ValueError):
            result = json.loads(lines[-1])
        one: dict[str, Any] = {"status": status, "seconds": round(seconds), "command": part.command}
        self.parts[part.name] = one | {"last_line": lines[-1][:400], "result": result}
        text = json.dumps(self.parts, indent=1)
        (self.folder / "report.json").write_text(text + "\n", encoding="utf-8")
        table = ["| part | status | seconds | last line |", "| --- | --- | --- | --- |"]
        for name, one in self.parts.items():
            last = one["last_line"].replace("|", "/")
            table.append(f"| {name} | {one['status']} | {one['seconds']} | {last} |")
        (self.folder / "report.md").write_text("\n".join(table) + "\n", encoding="utf-8")
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n=== {part.name}: {status}\n{log[-_LOG:]}\n")


def run(parts: list[Part], found: Report, seconds: float, possible: bool) -> None:
    """Run the parts that fit into so many seconds: proofs beside each other, timings alone."""
    waiting = [p for p in parts if found.parts.get(p.name, {}).get("status") != "ok"]
    jobs, deadline = max(1, (os.cpu_count() or 1) // 2), time.monotonic() + seconds
    running: list[tuple[Part, subprocess.Popen[bytes], float, float, Path]] = []
    RUNS.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        now, part = time.monotonic(), waiting[0] if waiting else None
        if part is not None and not possible:
            found.add(waiting.pop(0), "no CUDA device")
        elif part is not None and part.seconds > deadline - now:
            found.add(waiting.pop(0), f"skipped: {deadline - now:.0f} s left of {part.seconds}")
        elif part is not None and len(running) < (jobs if part.proof else 1):
            shutil.rmtree(RUNS / part.name, ignore_errors=True)  # of one that failed
            path = RUNS / f"{part.name}.log"
            with path.open("wb") as log:
                process = subprocess.Popen(
                    shlex.split(part.command),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, PART: part.name},
                    start_new_session=True,
                )
            limit = min(deadline, now + MORE + 1.5 * part.seconds)
            running.append((waiting.pop(0), process, now, limit, path))
        else:
            time.sleep(0.2)
        for one in [*running]:
            part, process, began, limit, path = one
            code = process.poll()
            status = "ok" if code == 0 else f"failed: {code}"
            if code is None:
                if time.monotonic() <= limit:
                    continue
                kill(part, process)
                status = "killed at its limit"
            running.remove(one)
            found.add(part, status, time.monotonic() - began, path.read_text(errors="replace"))


def kill(part: Part, process: subprocess.Popen[bytes]) -> None:
    """End a part: launchers end their workers; after some seconds all that it started dies."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{PART}={part.name}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()


def setting_of(tokens: int, mbs: int, config: str, overrides: list[str]) -> Any:
    from benchmarking import measure

    microbatches = min(8, max(1, 65_536 // (tokens * mbs)))
    overrides = [*overrides, f"--training.seq_len={tokens}"]
    return measure.make_setting(
        config, overrides, 1, local_batch_size=mbs, microbatches=microbatches
    )


def row(arm: str, tokens: int, mbs: int, config: str, overrides: list[str]) -> dict[str, Any]:
    """Time three steps of one arm on one device, and weigh it: of 8 microbatches or 64k tokens."""
    from benchmarking import processes, worker
    from benchmarking.arms import ARMS

    setting = setting_of(tokens, mbs, config, overrides)
    (found,) = processes.on_processes(1, worker.time_alone, ARMS[arm], setting, steps=3)
    batch = {name: getattr(setting, name) for name in _ALIKE[2:]}
    terms = {"arm": arm, "config": config, "overrides": setting.overrides, **batch, **found}
    return terms | {"tokens_per_second": round(setting.tokens / found["seconds"], 1)}


def predict_rows(folder: Path) -> None:
    """Print each row, its speed over that without privacy, and its memory beside the plan's."""
    from benchmarking import measure
    from benchmarking.arms import ARMS, NOT_PRIVATE
    from torchtitan_dp.plan.memory import predict

    rows = [one["result"] for one in Report(folder).parts.values() if one["result"]]
    speed = {str([one["arm"], *map(one.get, _ALIKE)]): one["tokens_per_second"] for one in rows}
    head = ["arm", *_ALIKE, "tokens_per_second", "over non-DP", "allocated_gib", "reserved_gib"]
    print(f"| {' | '.join([*head, 'predicted_gib'])} |\n|{' --- |' * (len(head) + 1)}")
    for one in rows:
        arm, batch = ARMS[one["arm"]], {name: one[name] for name in _ALIKE[2:]}
        setting = measure.make_setting(one["config"], one["overrides"], 1, **batch)
        memory = None  # the plan's, of private steps alone
        if not {*NOT_PRIVATE} & {*arm.overrides}:
            memory = predict(setting.arguments(arm, str(folder)), 1, 139.0, longest=False)
        plain = speed.get(str([arm.baseline, *map(one.get, _ALIKE)]))
        one["over non-DP"] = plain and round(one["tokens_per_second"] / plain, 3)
        cells = *map(one.get, head), memory and round(memory.peak_bytes / 2**30, 1)
        print("|", *(f"{cell} |" for cell in cells), flush=True)


_ALIKE = ("config", "overrides", "local_batch_size", "microbatches")  # of rows to compare


if __name__ == "__main__":
    main()
