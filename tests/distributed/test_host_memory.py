"""The host's memory that is left, by `/proc/meminfo` and cgroups; locked pages."""

from pathlib import Path

import pytest
import torch

from torchtitan_dp.distributed.devices import available_bytes
from torchtitan_dp.distributed.host_memory import page_locked, page_locked_bytes

GIB = 2**30


class Machine:
    """A `/proc` and mounted cgroups, below a folder of the test's."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc = root, root / "proc"
        self.mounts: list[str] = []
        (self.proc / "self").mkdir(parents=True)
        self.meminfo(100)
        self.own()

    def meminfo(self, gib: int) -> None:
        text = f"MemTotal: {1000 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {gib * 2**20} kB\n"
        (self.proc / "meminfo").write_text(text)

    def own(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, name: str, kind: str, options: str = "rw", root: str = "/") -> Path:
        folder = self.root / name
        folder.mkdir(parents=True)
        point = str(folder).replace(" ", "\\040")
        self.mounts.append(f"31 23 0:28 {root} {point} rw shared:9 - {kind} {kind} {options}\n")
        (self.proc / "self/mountinfo").write_text("".join(self.mounts))
        return folder

    def available(self) -> int | None:
        return available_bytes(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2(folder: Path, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon {used - cache}\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}\n"
    (folder / "memory.stat").write_text(stat)


def test_the_least_of_all_ancestors_counts(machine: Machine) -> None:
    """As in a job of Slurm: the limit is the job's, the process is in a step's task."""
    root = machine.mount("sys fs", "cgroup2")  # a blank in its name, which mountinfo escapes
    machine.own("0::/job_7/step_0/task_1")
    v2(root / "job_7", 64 * GIB, 4 * GIB)
    v2(root / "job_7/step_0", "max", 3 * GIB)
    v2(root / "job_7/step_0/task_1", 62 * GIB, GIB)
    assert machine.available() == 60 * GIB
    v2(root / "job_7/step_0/task_1", 32 * GIB, GIB)
    assert machine.available() == 31 * GIB
    v2(root, 8 * GIB, 0)  # a container sees its own limit there
    assert machine.available() == 8 * GIB
    machine.meminfo(5)
    assert machine.available() == 5 * GIB


def test_of_this_machine_and_of_one_that_says_nothing(tmp_path: Path) -> None:
    found = available_bytes()
    assert found is None or 2**20 < found < 2**50
    assert available_bytes(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("limit", "used", "more", "left"),
    [
        (64, 63, {"cache": 60 * GIB}, 61),  # records that were read stay until memory is needed
        (64, 4, {"high": 32 * GIB}, 28),  # above it, a job would crawl
        (2, 3, {}, 0),
    ],
)
def test_one_cgroup(
    machine: Machine, limit: int, used: int, more: dict[str, int], left: int
) -> None:
    assert machine.available() == 100 * GIB
    root = machine.mount("unified", "cgroup2")
    machine.own("0::/job")
    v2(root / "job", limit * GIB, used * GIB, **more)
    assert machine.available() == left * GIB


@pytest.mark.parametrize("own", ["/", "/elsewhere", "/../other"])
def test_a_cgroup_out_of_sight_leaves_that_of_the_mount(machine: Machine, own: str) -> None:
    root = machine.mount("a/b/unified", "cgroup2", root="/docker/abc")
    machine.own(f"0::{own}")
    v2(root, 16 * GIB, GIB)
    for name in ("other", "elsewhere"):  # not below the mount: nobody's
        v2(root / "../.." / name, 1, 0)
    assert machine.available() == 15 * GIB


def test_what_cannot_be_read_limits_nothing(machine: Machine) -> None:
    root = machine.mount("unified", "cgroup2")
    machine.own("0::/job", "nonsense")
    v2(root / "job", "many", 1)
    (root / "job/memory.high").unlink()
    assert machine.available() == 100 * GIB


@pytest.mark.parametrize(
    ("size", "taken"), [(1, 1), (192, 256), (4 * GIB, 4 * GIB), (3 * GIB, 4 * GIB)]
)
def test_a_page_locked_buffer_takes_a_power_of_two(size: int, taken: int) -> None:
    assert page_locked_bytes(size) == taken


@pytest.mark.cuda
def test_on_cuda_pages_are_locked() -> None:
    """Not run on a device yet. `is_pinned` asks the driver."""
    assert page_locked(1000, torch.uint8, torch.device("cuda")).is_pinned()
