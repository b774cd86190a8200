"""scripts/slurm/train.sbatch under a real SLURM of two nodes, with a stub and with the debug model;
thorough, and skipped where there is no SLURM to start (tests/clusters/slurm.py)."""

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import stub
from tests.clusters.slurm import Cluster
from tests.processes.runs import parent, write_records

SCRIPT = "scripts/slurm/train.sbatch"
pytestmark = pytest.mark.thorough
ONE = ("--gpus-per-node=0", "--cpus-per-task=1")
TWO = (*ONE, "--nodes=2")
ASKED = "asking the run to save a checkpoint and to stop"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster") / "slurm") as cluster:
        yield cluster


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path):
    """Submit the script with the stub for a Python; the job is ended after the test."""
    jobs = []

    def start(*options: str, argv: tuple[str, ...] = (), **environment: str) -> str:
        environment["TORCHTITAN_DP_PYTHON"] = str(stub.write(tmp_path))
        jobs.append(cluster.submit(*options, SCRIPT, *argv, environment=environment))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.command("scancel", job)
        cluster.wait_for_end(job)


def starts(log: str, node: int) -> list[int]:
    """The steps that training was started at on a node."""
    return [int(n) for n in re.findall(rf"training starts at step (\d+) on node {node}", log)]


def stops(log: str, node: int) -> list[int]:
    """The steps that were saved when a node's launcher was asked to stop."""
    return [int(n) for n in re.findall(rf"stopped by SIG\w+ at step (\d+) on node {node}", log)]


def require_resumed(log: str) -> None:
    for node in (0, 1):
        assert starts(log, node) == [1, *(step + 1 for step in stops(log, node))]


def test_the_time_limit_saves_and_queues_again_on_every_node(cluster, submit):
    job = submit(*TWO)
    cluster.wait_for_log(job, "training starts", 2)
    cluster.reach_limit(job)
    cluster.wait_for_log(job, "training starts", 4)
    log = cluster.log(job)
    assert cluster.fields(job)["Restarts"] == "1"
    require_resumed(log)
    assert log.index(ASKED) < log.index("saved") < log.index("The run has ended with exit code")
    assert "forcing job termination" not in log
    assert stat.S_IMODE((cluster.folder / f"{job}.out").stat().st_mode) == 0o600


def test_a_preemption_with_grace_saves_and_queues_again(cluster, submit):
    job = submit(*TWO)
    cluster.wait_for_log(job, "training starts", 2)
    cluster.submit("--partition=urgent", *TWO, "--exclusive", "--wrap", "sleep 1")
    cluster.wait_for_log(job, "training starts", 4)
    log = cluster.log(job)
    assert cluster.fields(job)["Restarts"] == "1"
    require_resumed(log)


def test_a_lost_slurmstepd_does_not_keep_the_job(cluster, submit):
    """srun waits for its task for ever: the job is queued again 15 s before its limit."""
    job = submit(*ONE, "--time=1", "--signal=B:USR1@1")
    cluster.wait_for_log(job, "training starts")
    (lost,) = cluster.processes(f"slurmstepd: [{job}.0]")
    os.kill(lost, signal.SIGKILL)
    cluster.reach_limit(job)
    cluster.wait_for_log(job, "The run has not ended in time")
    cluster.wait_for_log(job, "training starts", 2)


def test_the_debug_model_goes_on_from_what_its_time_limit_saved(cluster, tmp_path):
    """Two nodes of one process each, which share each sample; Slurm itself sends the signal."""
    data, out = write_records(tmp_path / "data"), tmp_path / "out"
    environment = {
        "TORCHTITAN_DP_PYTHON": sys.executable,
        "NGPU": "1",
        "MAX_REQUEUES": "1",
        "LOG_RANK": "0,1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    job = cluster.submit(
        *(*TWO, "--time=3", "--signal=B:USR1@60", SCRIPT),
        *(f"--job.dump_folder={out}", f"--training.dataset_path={data}"),
        *("--training.seq_len=32", "--training.global_batch_size=3", "--training.steps=100000"),
        *("--privacy.target_epsilon=None", "--privacy.noise_multiplier=1", "--privacy.delta=1e-3"),
        *("--privacy.accountant=rdp", "--data.heldout_fraction=0", "--validation.no-enable"),
        *("--checkpoint.interval=1000000", "--metrics.log_freq=1"),
        environment=environment,
    )
    cluster.wait_for_log(job, "[rank0]:", 1)
    cluster.wait_for_log(job, "Training starts at step 1", 2)
    cluster.wait_for_log(job, "as asked, saved", 2)
    time.sleep(1)
    log = cluster.log(job)
    (saved,) = {int(n) for n in re.findall(r"stopped at step (\d+) of 100000 as asked", log)}
    assert [path.name for path in out.glob("checkpoint/step-*")] == [f"step-{saved}"]
    cluster.wait_for_log(job, f"Training starts at step {saved + 1}", 2)
    for rank in (0, 1):  # one line each, after its rank in the job
        lines = [line for line in cluster.log(job).splitlines() if line.startswith(f"[rank{rank}]")]
        assert sum(f"Training starts at step {saved + 1}" in line for line in lines) == 1
    cluster.command("scancel", job)
    cluster.wait_for_end(job)


def test_a_lost_node_queues_the_job_again(cluster, submit):
    """srun waits until Slurm knows: `srun --wait` would end the job before."""
    job = submit(*TWO)
    cluster.wait_for_log(job, "training starts", 2)
    (launcher,) = cluster.processes("--node_rank=1", "torchtitan_dp.launch", "python -m")
    (slurmd,) = cluster.processes("slurmd -D -N node2")
    for pid in (slurmd, parent(launcher), launcher):  # slurmstepd is its task's parent
        os.kill(pid, signal.SIGKILL)
    fields = cluster.wait(job, lambda found: found["Restarts"] == "1", "restart")
    assert fields["JobState"] != "FAILED"
