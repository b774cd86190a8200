"""Runs two neighbours, the second one by the outputs of the first, and lists their differences."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from tests.processes.runs import CONFIG, Run, with_sigma
from tests.replay import allowed, records
from tests.replay.job import ENVIRONMENT, Job
from torchtitan_dp.release.__main__ import main as release
from torchtitan_dp.report.__main__ import main as report

C, STEPS = 0.7, 4
_NAMES = "first_run", "other_run"  # of one length: messages and checkpoints hold paths
_UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # DCP's, of a save
_JOBS = 16  # at most, where a clock cuts a run


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, the neighbours that it is run on, and what becomes of its jobs."""

    name: str
    overrides: tuple[str, ...] = ()
    kind: str = "text"
    seed: int = 0
    context_parallel: int = 1
    dp_shard: int = 1
    jobs: tuple[Job, ...] = (Job(),)
    """The last one is repeated until all steps are taken."""
    batch: int = 5
    """The expected batch size."""
    buckets: bool = False
    """Whether microbatches are as long as their samples, which shows in their collectives."""

    def argv(self, root: Path, data: Path) -> list[str]:
        return [
            f"--job.config_file={CONFIG}",
            f"--job.dump_folder={root / 'out'}",
            f"--training.dataset_path={data}",
            *(("--training.dataset=jsonl",) if data.suffix == ".jsonl" else ()),
            *("--training.seq_len=64", f"--training.global_batch_size={self.batch}"),
            *(f"--training.steps={STEPS}", f"--privacy.max_grad_norm={C}"),
            *("--privacy.accountant=rdp", "--privacy.delta=1e-3", *with_sigma(1.0)),
            *("--data.heldout_fraction=0", "--validation.no-enable"),
            *("--metrics.log_freq=1", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"),
            "--lr_scheduler.warmup_steps=1",
            f"--parallelism.context_parallel_degree={self.context_parallel}",
            f"--parallelism.data_parallel_shard_degree={self.dp_shard}",
            *(() if self.buckets else ("--data.no-length_buckets",)),
            *self.overrides,
        ]


@dataclasses.dataclass
class Side:
    """All that can be seen of one of the two runs."""

    root: Path
    codes: list[int]
    seen: list[list[dict[str, Any]]]
    """By job and rank."""
    console: list[dict[str, list[str]]]
    released: int

    def name(self) -> bytes:
        """The random name of the run."""
        path = self.root / "out" / "privacy.json"
        return json.loads(path.read_text())["run"].encode() if path.exists() else b"no name"


def differences(case: Case, root: Path, *, fault: str | None = None) -> list[str]:
    """Run `case` on both neighbours below the empty `root`, with the `fault` of `faults.FAULTS` in
    both; each difference that is not allowed, in a line."""
    tape = root / "tape"
    tape.mkdir()
    first = _run(case, root / _NAMES[0], tape, changed=True, fault=fault)
    (tape / "recorded").touch()
    second = _run(case, root / _NAMES[1], tape, changed=False, fault=fault)
    cut = any(job.clock is not None for job in case.jobs)
    found = [] if cut else _compare_jobs(first, second, buckets=case.buckets)
    found += _compare_courses(first, second) + _compare_outputs(first, second, case.batch)
    found += _compare_files(first, second, "out", published_alone=cut)
    found += _compare_files(first, second, "released", published_alone=False)
    return found


def _run(case: Case, root: Path, tape: Path, *, changed: bool, fault: str | None) -> Side:
    data = records.write(case.kind, root, case.seed, changed)
    side, out = Side(root, [], [], [], 0), root / "out"
    ranks = case.context_parallel * case.dp_shard
    for number in range(_JOBS):
        job = case.jobs[min(number, len(case.jobs) - 1)]
        if job.damages:
            _damage(out)
        plan = {
            "job": dataclasses.asdict(job),
            "tape": str(tape),
            "seen": str(root / f"seen_{number}"),
            "number": number,
            "fault": fault,
            "collectives": not case.buckets,
        }
        with Run(
            case.argv(root, data),
            world_size=ranks,
            program=("-m", "tests.replay.job"),
            env={ENVIRONMENT: json.dumps(plan)},
            log=root / f"log_{number}",
        ) as run:
            side.codes.append(run.process.wait(300))
        side.console.append(allowed.public_lines(run.output(), str(root)))
        side.seen.append(
            [json.loads((root / f"seen_{number}_{rank}.json").read_text()) for rank in range(ranks)]
        )
        expected = job.crash_at is None and job.crash_clock is None and job.full_at is None
        if expected and side.codes[-1] not in (0, 75):  # a fault, which is compared
            break
        taken = {step for seen in side.seen for step in seen[0]["steps"]}
        if number >= len(case.jobs) - 1 and STEPS in taken:
            break
    if side.codes[-1] == 0:
        side.released = _exit_code(release, [str(out), str(root / "released")])
        _exit_code(report, [str(out), "--public"])
    return side


def _exit_code(command: Any, argv: list[str]) -> int:
    try:
        command(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _damage(out: Path) -> None:
    """Overwrite a few bytes in the middle of the newest checkpoint's largest file."""
    newest = max((out / "checkpoint").glob("step-*"), key=lambda path: int(path.name[5:]))
    largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(bytes(64))


def _compare_jobs(one: Side, other: Side, *, buckets: bool) -> list[str]:
    """Compare job by job and rank by rank, where no clock decides what a job does."""
    found = []
    if (one.codes, one.released) != (other.codes, other.released):
        found.append(f"exit codes: {one.codes}, {one.released}; {other.codes}, {other.released}")
    for number, (ours, theirs) in enumerate(zip(one.seen, other.seen, strict=False)):
        for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for what in ("steps", "draws", *(() if buckets else ("collectives",))):
                if a[what] != b[what]:
                    found.append(f"job {number}, rank {rank}: {what}: {_first(a[what], b[what])}")
    for number, (a, b) in enumerate(zip(one.console, other.console, strict=False)):
        for process in sorted((a.keys() | b.keys()) - {""}):  # which rank ended first is chance
            left, right = a.get(process, []), b.get(process, [])
            if left != right:
                found.append(f"job {number}, console {process}: {_first(left, right)}")
    return found


def _compare_courses(one: Side, other: Side) -> list[str]:
    """Compare learning rates and steps, however they were cut into jobs."""

    def course(side: Side) -> dict[int, float]:
        parts = [part for job in side.seen for part in job]
        return {s: r for part in parts for s, r in zip(part["steps"], part["rates"], strict=False)}

    a, b = course(one), course(other)
    return [] if a == b else [f"steps and learning rates: {a}; {b}"]


def _compare_outputs(one: Side, other: Side, batch: int) -> list[str]:
    """Compare the second run's own outputs with the tape's: C over the batch size is the most, and
    L / n of a published held-out loss."""
    found, squares = [], {}
    for job in other.seen:
        for part in job:
            found += [f"step {step} has no tape" for step in part["without_tape"]]
        for step in {step for part in job for step in part["squared_distances"]}:
            squares[step] = sum(part["squared_distances"].get(step, 0.0) for part in job)
    for step, square in sorted(squares.items()):
        if not math.sqrt(square) <= C / batch * (1 + 1e-4):
            found.append(
                f"clipped sums of step {step} differ by {math.sqrt(square) * batch / C:.4f} C"
            )
    distances = [x for job in other.seen for part in job for x in part["loss_distances"]]
    if not max(distances, default=0.0) <= 1 + 1e-4:  # the grid that noised losses are rounded to
        found.append(f"published held-out losses differ by {max(distances):.4f} L / n")
    return found


def _compare_files(one: Side, other: Side, folder: str, *, published_alone: bool) -> list[str]:
    """Compare names and bytes of all files that may be published."""
    ours, theirs = (_files(side.root / folder) for side in (one, other))
    if published_alone:
        ours, theirs = (
            {name: path for name, path in files.items() if "/" not in name}
            for files in (ours, theirs)
        )
    if ours.keys() != theirs.keys():
        return [f"{folder}: files {sorted(ours.keys() ^ theirs.keys())}"]
    found = []
    for name, path in ours.items():
        a, b = _content(path, one.name()), _content(theirs[name], other.name())
        if a != b:
            found.append(f"{folder}/{name}: {_first(a.splitlines(), b.splitlines())}")
    return found


def _files(folder: Path) -> dict[str, Path]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in sorted(files.items()) if not allowed.is_private(name)}


def _content(path: Path, run: bytes) -> bytes:
    """A file's bytes, without names that are drawn at random."""
    content = path.read_bytes()
    if path.name == ".metadata":  # DCP's, which holds the run's folder
        return _UUID.sub(b"UUID", content.replace(_NAMES[0].encode(), _NAMES[1].encode()))
    if path.name == "SHA256SUMS":  # of files that are compared themselves
        return b""
    if path.name != "privacy.json":
        return content.replace(run, b"RUN")
    terms = json.loads(content)
    terms["run"] = ""
    return json.dumps(terms, indent=1).encode()


def _first(one: Any, other: Any) -> str:
    """Show the first of their lines that differs."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a!r:.300}; {b!r:.300}"
    return f"{len(one)} and {len(other)}: {[*one, *other][min(len(one), len(other))]!r:.300}"
