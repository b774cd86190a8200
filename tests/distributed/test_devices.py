"""Devices that cannot be used end a start in one line, and the launcher opens none of them."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from tests.preflight.test_rehearsal import command, start
from tests.processes.ranks import on_ranks
from tests.processes.runs import ROOT, arguments, write_records
from torchtitan_dp import launch
from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint import bookkeeping
from torchtitan_dp.distributed import attention, devices
from torchtitan_dp.train import trainer as training

DEBUG = ROOT / "train_configs/llama3_debug.toml"

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021\n"


@pytest.fixture
def in_sight(monkeypatch):
    """Sets how many devices the driver's library counts, and whether CUDA can use them."""

    def see(count, available=False):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    return see


@pytest.fixture
def old_driver(monkeypatch, tmp_path, in_sight):
    """Two devices, as the driver's library counts them, that CUDA cannot use."""
    (tmp_path / "version").write_text(NVRM)
    version = devices.driver_version(tmp_path / "version")
    monkeypatch.setattr(devices, "driver_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    in_sight(2)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_devices_that_are_named_and_not_there_are_refused(monkeypatch, in_sight, cuda):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    in_sight(0)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES = 5; "):
        devices.require_usable_devices()


@pytest.mark.parametrize(("count", "available"), [(0, False), (2, True)])
def test_other_machines_are_let_be(in_sight, tmp_path, count, available):
    in_sight(count, available)
    devices.require_usable_devices()
    assert devices.driver_version(tmp_path / "none") == "of unknown version"


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("processes", ["auto", "2"])
def test_the_launcher_refuses_an_old_driver_in_one_line(monkeypatch, capsys, processes):
    monkeypatch.setattr(launch, "_run_plan", lambda argv: pytest.fail("it went on"))
    with pytest.raises(SystemExit) as stop:
        launch._checked(processes, ["-m", "torchtitan_dp.train", f"--job.config_file={DEBUG}"])
    line = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(line.splitlines()) == 1
    assert line.startswith("error: NVIDIA driver 470.82.01: this machine has 2 CUDA devices")
    assert "CUDA 13.0" in line


@pytest.mark.usefixtures("old_driver")
def test_a_worker_refuses_it_too(monkeypatch):
    monkeypatch.setattr(training, "protect", lambda: None)
    monkeypatch.setattr(training, "init_logger", lambda: None)
    with pytest.raises(Fault, match="NVIDIA driver 470"):
        training.main.__wrapped__([])


@pytest.fixture
def gpu_node(monkeypatch, tmp_path, in_sight):
    """A node with NVIDIA's driver, of which this PyTorch sees no device."""
    (tmp_path / "version").write_text(NVRM)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    in_sight(0)


@pytest.mark.usefixtures("gpu_node")
@pytest.mark.parametrize(
    ("visible", "refused"), [(None, True), ("0,1", True), ("", False), ("-1", False)]
)
def test_a_cpu_build_is_refused_on_a_gpu_node_unless_devices_are_hidden(
    monkeypatch, visible, refused
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not refused:
        devices.require_usable_devices()
        return
    with pytest.raises(ValueError, match=r"NVIDIA's driver 470\.82\.01") as refusal:
        devices.require_usable_devices()
    assert "finds no CUDA device (it is built for CUDA None; " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_more_processes_than_devices_or_than_a_cpu_serves_are_refused(monkeypatch, in_sight):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1})
    for count, most, there in ((0, 16, "no CUDA device and 2 cores"), (2, 2, "2 CUDA devices")):
        in_sight(count)
        devices.require_so_many(most)
        with pytest.raises(ValueError, match=rf"^NGPU = 17: .*{there}; use at most {most}$"):
            devices.require_so_many(17)


"""What acts on a device that the caller has, instead of asking about one."""


@pytest.fixture
def cuda_build(monkeypatch, in_sight):
    """Torch's CUDA build, with a new cuDNN, where no device is in sight."""

    def no_driver(*_):
        raise RuntimeError("Found no NVIDIA driver on your system.")

    newest = types.SimpleNamespace(
        getCompileVersion=lambda: (9, 20, 0), getRuntimeVersion=lambda: (9, 20, 0)
    )
    monkeypatch.setattr(torch._C, "_cudnn", newest, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", no_driver)  # what a question would need
    in_sight(0)


@pytest.mark.usefixtures("cuda_build")
def test_without_a_device_each_question_has_an_answer():
    """A prediction is that of the CPU build: of a device that has all kernels of a ring."""
    cpu = torch.device("cpu")
    devices.require_usable_devices()
    assert devices.cuda_devices() == 0
    assert (devices.capability(), devices.capability(cpu)) == (None, None)
    assert (devices.cudnn_versions(), devices.libraries(cpu)) == ([], {})
    assert devices.kind(cpu) == ("cpu",)
    assert devices.device_name(cpu).startswith("CPU (")
    assert attention._safe(attention._BACKENDS) == attention._BACKENDS


def test_the_launchers_process_opens_no_cuda_context(monkeypatch, own_cache, tmp_path, in_sight):
    """With devices in sight: what `torch.cuda` would initialize for is never asked for."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it would set for its workers
    monkeypatch.delitem(sys.modules, "torchtitan_dp.plan.__main__", raising=False)  # it runs it
    in_sight(2, available=True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a CUDA context"))
    run = arguments(tmp_path / "out", write_records(tmp_path / "data"))
    mesh = "--parallelism.context_parallel_degree=1"  # else another process asks for its memory
    argv = launch._checked("auto", ["-m", "torchtitan_dp.train", *run, mesh])
    assert argv[:2] == ["--nproc_per_node", "2"]
    assert not torch.cuda.is_initialized()


def refusal_on_unlike_devices(argv):
    """A trainer's refusal where each rank's device is another; "" if it was built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bookkeeping, "kind", lambda device: ("cuda", f"GPU {dist.get_rank()}"))
        try:
            start(argv).close()
        except Fault as refusal:
            return str(refusal)
    return ""


def test_ranks_on_unlike_devices_are_refused(tmp_path):
    first, second = on_ranks(2, refusal_on_unlike_devices, command(tmp_path))
    assert first == second
    assert "ranks disagree on the kind of device (rank 1 is the first" in first
    assert "the kind of device must be the same" in first
