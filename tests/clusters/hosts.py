"""Two hosts on this machine: network namespaces that one cable joins, each with a run's launcher.

    with TwoHosts(folder) as hosts:
        first, second = (hosts.start(number, argv) for number in (0, 1))

It needs root and iproute2. A host's processes are in a process namespace too, whose end is theirs,
and in a mount namespace, where it can have files of its own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.clusters.namespaces import APART, below, need
from tests.processes.runs import ROOT

WAIT_S = 300  # for failing only: less than a test has


class Launcher:
    """The launcher of one host, as scripts/slurm/node.sh starts it, with one rank."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self._log = process, log

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.output():
            assert self.process.poll() is None, f"ended without '{text}':\n{self.output()}"
            assert time.monotonic() < deadline, f"no '{text}':\n{self.output()}"
            time.sleep(0.05)

    def ends(self) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {WAIT_S} s:\n{self.output()}") from None

    def ask_to_stop(self) -> None:
        """SIGTERM to the launcher, and to nothing else of the host."""
        for pid, line in below(self.process.pid):
            if "torchtitan_dp.launch" in line:
                os.kill(pid, signal.SIGTERM)
                return
        raise AssertionError("no launcher runs on this host")

    def kill(self) -> None:
        """SIGKILL to all of the host at once: its kernel ends the connections."""
        self.process.kill()
        self.process.wait()


class TwoHosts:
    """Hosts 10.77.0.1 and 10.77.0.2."""

    def __init__(self, folder: Path) -> None:
        need("a network of two hosts", ("ip", "mount"), "iproute2")
        self._folder = folder
        self._names = [f"tests-{os.getpid()}-{number}" for number in (0, 1)]
        self._started: list[Launcher] = []

    def __enter__(self) -> "TwoHosts":
        for name in self._names:
            _ip("netns", "add", name)
        cable = ("type", "veth", "peer", "name", "cable", "netns", self._names[1])
        _ip("-n", self._names[0], "link", "add", "cable", *cable)
        for number, name in enumerate(self._names):
            _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._started:
            launcher.kill()
        for name in self._names:
            _ip("netns", "delete", name)

    def cut(self) -> None:
        """Take the link down: packets are lost without an error on either side."""
        _ip("-n", self._names[0], "link", "set", "cable", "down")

    def start(
        self, number: int, argv: list[str], *, in_place_of: dict[Path, Path] | None = None
    ) -> Launcher:
        """Start a host's launcher; `in_place_of` is what it has at paths that both know."""
        log = self._folder / f"host{number}.log"
        mounts = [f"mount --bind {own} {path}" for path, own in (in_place_of or {}).items()]
        node = (str(ROOT / "scripts/slurm/node.sh"), "0,1", "--nnodes=2", "--nproc_per_node=1")
        torchrun = ("--rdzv_endpoint=10.77.0.1:29400", "--rdzv_id=tests")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._names[number], *APART, "bash", "-ec"),
                    "\n".join([*mounts, 'exec "$@"']),
                    *("bash", *node, *torchrun, "-m", "torchtitan_dp.train", *argv),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PY": sys.executable,
                    "NGPU": "1",
                    "SLURM_NODEID": str(number),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "cable",
                    "CUDA_VISIBLE_DEVICES": "",
                    "XDG_CACHE_HOME": str(self._folder / f"cache{number}"),
                },
            )
        self._started.append(Launcher(process, log))
        return self._started[-1]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
