"""A SLURM of two nodes on this machine, in a folder and in namespaces of its own.

    with Cluster(folder) as cluster:
        job = cluster.submit("--time", "5", "scripts/slurm/train.sbatch")
        cluster.wait(job, lambda fields: fields["JobState"] == "COMPLETED")

It needs root, Debian's `slurm-wlm` and `munge`, and no systemd. The daemons are in a mount
namespace, whose /etc/hosts names the nodes, and in a process namespace, whose end is theirs.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.clusters.namespaces import APART, below, need
from tests.processes.runs import ROOT

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
WAIT_S = 200  # for failing only
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# How long a job that is queued again waits: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# CPUs that this machine does not have.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout=20
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=8 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=8 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_START = """
set -e
mount --bind {folder}/hosts /etc/hosts
munged --foreground --force --key-file {folder}/munge.key --socket {folder}/munge.socket \\
    --pid-file {folder}/munge.pid --log-file {folder}/munged.log --seed-file {folder}/munge.seed &
until [[ -S {folder}/munge.socket ]]; do sleep 0.05; done
slurmctld -D -c >{folder}/slurmctld.log 2>&1 &
slurmd -D -N node1 >{folder}/slurmd-node1.log 2>&1 &
slurmd -D -N node2 >{folder}/slurmd-node2.log 2>&1 &
wait
"""


class Cluster:
    """Two nodes, partitions `main` (jobs are preempted) and `urgent` (which preempts)."""

    def __init__(self, folder: Path, *, grace_s: int = 60) -> None:
        need("a SLURM", ("munged", "slurmctld", "slurmd", "sbatch"), "slurm-wlm munge")
        self.folder, host = folder, socket.gethostname()
        (folder / "state").mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} node1 node2\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "cgroup.conf").touch()
        ports = dict(zip(("controller", "node1", "node2"), _free_ports(3), strict=True))
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, host=host, kill_wait=30, grace=grace_s, **ports)
        )
        (folder / "start.sh").write_text(_START.format(folder=folder))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._unshare: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Cluster":
        with (self.folder / "start.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                [*APART, "bash", str(self.folder / "start.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )
        try:
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._unshare is not None
        self._unshare.kill()  # its child, and so the namespace, dies with it
        self._unshare.wait(60)

    def command(self, *words: str, **environment: str) -> str:
        """Run one of Slurm's commands at the repository's root; its output."""
        environment = {**self.environment, **environment}
        found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert found.returncode == 0, f"{' '.join(words)}: {found.stderr}"
        return found.stdout.strip()

    def submit(self, *options: str, environment: Mapping[str, str] | None = None) -> str:
        """Submit a job from the repository's root; its id. Its log is `log` of that."""
        output = f"--output={self.folder}/%j.out"
        return self.command("sbatch", "--parsable", output, *options, **(environment or {}))

    def log(self, job: str) -> str:
        """What a job has printed so far, over all restarts."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def fields(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: `JobState`, `Restarts`, `ExitCode` and others."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        pairs = (word.partition("=") for word in shown.split())
        return {name: value for name, _, value in pairs}

    def wait_for_log(self, job: str, text: str, times: int = 1) -> None:
        """Wait until a job has printed a text so many times."""
        self.wait(job, lambda _: self.log(job).count(text) >= times, f"{times} x '{text}'")

    def wait_for_end(self, job: str) -> dict[str, str]:
        """Wait for a job's end; its fields then."""
        return self.wait(job, lambda fields: fields["JobState"] in ENDED, "end")

    def reach_limit(self, job: str) -> None:
        """Send what `--signal=B:USR1@120` does when a job's time is almost up."""
        self.command("scancel", "-b", "-s", "USR1", job)

    def wait(
        self, job: str, condition: Callable[[dict[str, str]], bool], what: str
    ) -> dict[str, str]:
        """Poll until a condition on the job's fields holds; the fields then."""
        deadline = time.monotonic() + WAIT_S
        while not condition(fields := self.fields(job)):
            assert time.monotonic() < deadline, f"no {what}: {fields}\n{self.log(job)}"
            time.sleep(0.2)
        return fields

    def processes(self, *words: str) -> list[int]:
        """The cluster's processes whose command lines have all of these words, by process id."""
        assert self._unshare is not None
        found = below(self._unshare.pid)
        return [pid for pid, line in found if all(word in line for word in words)]

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%t"]
            states = subprocess.run(words, capture_output=True, text=True, env=self.environment)
            if states.stdout.split() == ["idle", "idle"]:
                return
            assert time.monotonic() < deadline, f"no nodes: {states}\n{self._logs()}"
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
