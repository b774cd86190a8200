"""scripts/slurm/train.sbatch and node.sh with stubs of Python, scontrol and srun: as test_slurm.py
sees the real one do, it hands SIGUSR1 to each node's task, and ends them by SIGKILL at SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.clusters import stub
from tests.processes.runs import ROOT

WAIT_S = 40  # for failing only
_SRUN = """#!{python}
import os, signal, subprocess, sys
argv = sys.argv[1:]
nodes = int(next(a for a in argv if a.startswith("--nodes=")).partition("=")[2])
command = [a for a in argv[next(i for i, a in enumerate(argv) if not a.startswith("--")):]]
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(node)}})
    for node in range(nodes)
]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
raise SystemExit(max(code if code >= 0 else 128 - code for code in [t.wait() for t in tasks]))
"""
_SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") echo node1; echo node2 ;;
    "show job") cat {folder}/job ;;
    "requeue $SLURM_JOB_ID") echo requeued >>{folder}/requeued ;;
esac
"""


class Job:
    """The script, started as Slurm starts it."""

    def __init__(
        self, folder: Path, argv: tuple[str, ...], nodes: int, left_s: int, **environment: str
    ) -> None:
        self._folder, self._log = folder, folder / "log"
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
            (folder / name).write_text(text.format(python=sys.executable, folder=folder))
            (folder / name).chmod(0o700)
        ends = datetime.now() + timedelta(seconds=left_s)
        self._times = f"StartTime=2026-01-01T00:00:00 EndTime={ends:%Y-%m-%dT%H:%M:%S}"
        self.is_preempted("None")
        environment |= {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "TORCHTITAN_DP_PYTHON": str(stub.write(folder)),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SELFCHECK": "1",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", str(ROOT / "scripts/slurm/train.sbatch"), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def is_preempted(self, at: str) -> None:
        (self._folder / "job").write_text(f"   {self._times} Deadline=N/A\n   PreemptTime={at}\n")

    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.output().count(text) < times:
            assert time.monotonic() < deadline, f"no '{text}':\n{self.output()}"
            time.sleep(0.02)

    def ends(self) -> tuple[int, bool]:
        """Wait for the script; its exit code, and whether it queued the job again."""
        return self.process.wait(WAIT_S), (self._folder / "requeued").exists()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def started(*argv: str, nodes: int = 1, left_s: int = 120, **environment: str) -> Job:
        jobs.append(Job(tmp_path, argv, nodes, left_s, **environment))
        return jobs[-1]

    yield started
    for job in jobs:
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.slow
def test_the_time_limit_saves_on_every_node_and_queues_again(start):
    job = start(nodes=2)
    job.wait_for("training starts at step 1", 2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.ends() == (0, True)
    assert job.output().count("stopped by SIGUSR1") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "ends"), [("2026-01-01T00:00:09", (0, True)), ("None", (75, False))]
)
def test_tasks_that_are_asked_to_end_queue_again_if_it_is_a_preemption(at, ends, start, tmp_path):
    job = start()
    job.wait_for("training starts")
    job.is_preempted(at)
    srun = subprocess.run(
        ["pgrep", "-P", str(job.process.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(srun.stdout), signal.SIGUSR1)
    assert job.ends() == ends
    assert "stopped by SIGUSR1" in job.output()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["--slow-plan", "--slow-check"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 75)])
def test_a_signal_before_training_is_heard_at_once(before, number, code, start):
    job = start(before)
    job.wait_for("selfcheck on node" if before == "--slow-check" else "planning")
    job.process.send_signal(number)
    assert job.ends() == (code, False)
    assert "before training began" in job.output()
    assert "training starts" not in job.output()


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "code"), [("--mistake", 2), ("--fault", 1)])
def test_mistakes_and_faults_are_not_queued_again(argument, code, start):
    assert start(argument).ends() == (code, False)


@pytest.mark.parametrize(
    ("node", "shown", "local"), [(0, "0", "0"), (1, "0,9", "-8,1"), (0, "0,9", "0,9")]
)
def test_ranks_that_are_shown_are_those_of_the_job(node, shown, local, tmp_path):
    """torchrun is given a node's own ranks, and prints the job's."""
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\necho "$TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" "$@"\n')
    program.chmod(0o700)
    found = subprocess.run(
        [ROOT / "scripts/slurm/node.sh", shown, "-m", "train"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PY": str(program), "NGPU": "8", "SLURM_NODEID": str(node)},
    )
    assert found.stdout.startswith("[rank${rank}]: -m torchtitan_dp.launch ")
    assert f" --node_rank={node} " in found.stdout
    assert f" --local-ranks-filter={local} " in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "processes"), [(None, 2), ("0", 2), ("4", 4)])
def test_a_node_without_gpus_has_two_processes(gpus, processes, start):
    job = start("--fault", **({} if gpus is None else {"SLURM_GPUS_ON_NODE": gpus}))
    assert job.ends() == (1, False)
    assert f" --nproc_per_node={processes} " in job.output()
    assert " --fault --parallelism.context_parallel_degree=2\n" in job.output()  # as the plan chose
