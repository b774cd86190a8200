"""Starts real training runs as `run_train.sh` does: a launcher, its workers, one folder a run.

The runs are tiny: 4 steps of about 3 short records. Their processes are forked from one that has
imported everything (`forks`), except in the few tests that are about the launcher itself
(`Run(…, real=True)`).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.processes import forks, launcher

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "train_configs" / "llama3_debug.toml"
TIMEOUT_S = 500  # for failing only: less than a test has, which then tells what was said
_MARK = "TORCHTITAN_DP_TEST_RUN"


def write_records(folder: Path, count: int = 24) -> Path:
    """A directory of short text files, each one record; every fifth is empty."""
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"record_{i:03}.txt").write_text(f"record {i} says {i * i} " * (i % 5))
    return folder


def arguments(folder: Path, data: Path, *overrides: str) -> list[str]:
    """The command line of a tiny run; later overrides win. The TOML sets `target_epsilon = 8`."""
    return [
        f"--job.config_file={CONFIG}",
        f"--job.dump_folder={folder}",
        f"--training.dataset_path={data}",
        "--training.seq_len=32",
        "--training.global_batch_size=3",
        "--training.steps=4",
        "--privacy.accountant=rdp",  # quick
        "--privacy.delta=1e-3",
        "--data.heldout_fraction=0",
        "--validation.no-enable",
        "--metrics.log_freq=1",
        "--checkpoint.interval=2",
        "--checkpoint.keep_latest_k=0",
        "--lr_scheduler.warmup_steps=1",
        *overrides,
    ]


def with_sigma(sigma: float) -> tuple[str, str]:
    """The overrides that replace the debug configuration's `target_epsilon` by a given noise."""
    return "--privacy.target_epsilon=None", f"--privacy.noise_multiplier={sigma}"


class Run(contextlib.AbstractContextManager):
    """A started run. `finish` waits for its end; leaving its context kills what is left of it."""

    def __init__(
        self,
        overrides: list[str],
        *,
        world_size: int = 2,
        program: tuple[str, ...] = ("-m", "torchtitan_dp.train"),
        env: dict[str, str] | None = None,
        log: Path,
        real: bool = False,
    ) -> None:
        """
        Args:
            program: what torchrun starts on each rank.
            log: file for the output of all ranks.
            real: start `torchtitan_dp.launch` as a user does, and not `tests.processes.launcher`.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_CACHE_HOME": str(log.parent / "cache"),
            **(env or {}),
        }
        start = _Launched if real else _Forked
        self._started = start(world_size, program, overrides, environment, log)
        self.process = self._started.process

    def finish(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait for a good end; the output."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"no end in {timeout_s} s:\n{self.output()}") from None
        assert code == 0, f"exit code {code}:\n{self.output()}"
        return self.output()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until the condition holds; a run that ends before, or is too slow, is a failure."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if (self.process.poll() is not None and not condition()) or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"{what} did not happen:\n{self.output()}")
            time.sleep(0.02)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All living processes of this run, the launcher first if it lives."""
        found = filter(self._started.owns, _living())
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def workers(self) -> list[int]:
        """Its living ranks, by process id."""
        return list(filter(self._started.is_rank, self.processes()))

    def kill(self, pids: list[int]) -> None:
        """SIGKILL, at once."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def dies(self, timeout_s: float = 120) -> bool:
        """Whether every process of the run ends by itself in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.process.poll()  # reaps the launcher
            if not self.processes():
                return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """Clean up, whatever state it is in."""
        while pids := self.processes():
            self.kill(pids)
            self.process.poll()
            time.sleep(0.02)
        self.process.wait(60)

    def __exit__(self, *_: object) -> None:
        self.end()


class _Forked:
    """Processes of `launcher`: each rank and the launcher has a session of its own."""

    def __init__(self, world_size: int, program: Any, argv: Any, env: Any, log: Path) -> None:
        self.process = forks.Process(launcher.launch, world_size, program, argv, env, str(log))
        self._ranks = self.process.connection.recv()
        if isinstance(self._ranks, forks.Ended):
            self.process.ended(self._ranks)
            raise AssertionError(f"the launcher did not start: {log.read_text()}")

    def owns(self, pid: int) -> bool:
        return int(_stat(pid)[3]) in (self.process.pid, *self._ranks)

    def is_rank(self, pid: int) -> bool:
        return pid in self._ranks


class _Launched:
    """Processes of `torchtitan_dp.launch`, whose environment bears a mark of their own."""

    def __init__(self, world_size: int, program: Any, argv: Any, env: Any, log: Path) -> None:
        forks.need()
        self._mark = uuid.uuid4().hex
        torchrun = [
            *(sys.executable, "-m", "torchtitan_dp.launch"),
            *("--nproc_per_node", str(world_size), "--rdzv_backend", "c10d"),
            *("--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1"),
            *("--role", "rank", "--tee", "3"),
            *program,
            *argv,
        ]
        # exec keeps the process id: the launcher is the process that `TORCHTITAN_DP_LAUNCHER_PID`
        # names, as in run_train.sh.
        script = 'export TORCHTITAN_DP_LAUNCHER_PID=$$; exec "$@"'
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "bash", *torchrun],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**env, _MARK: self._mark},
                start_new_session=True,  # a process group, as a terminal's command has
            )

    def owns(self, pid: int) -> bool:
        return f"{_MARK}={self._mark}".encode() in _environment(pid)

    def is_rank(self, pid: int) -> bool:
        return any(entry.startswith(b"LOCAL_RANK=") for entry in _environment(pid))


def _living() -> list[int]:
    """All processes of this machine that have not ended (Linux)."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _stat(pid)[0] != "Z"]


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session and so on; as of a zombie, if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", "0", "0"]


def parent(pid: int) -> int:
    """The process that a living process dies with."""
    return int(_stat(pid)[1])


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return []


def train(overrides: list[str], *, log: Path, **options: Any) -> str:
    """Run to the end; the output."""
    with Run(overrides, log=log, **options) as run:
        return run.finish()


def said(
    *command: object, cwd: Path = ROOT, timeout_s: float = TIMEOUT_S, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, however it ends; its exit code and what it says."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def privacy(folder: Path) -> dict[str, Any]:
    """What `privacy.json` says."""
    return json.loads((folder / "privacy.json").read_text())


def load(checkpoint: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds: whole tensors and values, by key."""
    reader = dcp.FileSystemReader(checkpoint)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters that a checkpoint holds."""
    others = ("optimizer.", "lr_scheduler.", "train_state.", "ema.", "model_settings")
    return {k: v for k, v in load(checkpoint).items() if not k.startswith(others)}
