"""The CPU shim does what it says, and tells when TorchTitan no longer needs it."""

import importlib.metadata
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

import torchtitan_dp.distributed.cpu as cpu
from tests.processes import forks
from tests.processes.ranks import on_ranks
from torchtitan_dp.distributed.devices import has_accelerator

without_accelerator = pytest.mark.skipif(has_accelerator(), reason="the shim is for CPU")


def test_torchtitan_is_the_release_the_shim_was_written_for():
    assert importlib.metadata.version("torchtitan") == "0.2.2"


@pytest.mark.thorough
@without_accelerator
def test_torchtitan_still_needs_it():
    """Without the shim the import fails where there is no triton, as with torch's CPU build; when
    it no longer does, the stand-ins can go."""
    forks.need()
    program = "import sys; sys.modules['triton'] = None; import torchtitan"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert b"import of triton halted" in done.stderr


@without_accelerator
def test_torchtitan_sees_a_cpu_with_either_build_of_torch():
    """Its kernels are the stand-in's also where torch's CUDA build has brought triton along;
    PyTorch, which asks for triton to compile, finds it where it is installed and there alone."""
    from torch.utils._triton import has_triton_package
    from torchtitan.components import metrics
    from torchtitan.models.moe.utils import generate_permute_indices
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"
    assert utils.device_module is torch.cpu
    assert generate_permute_indices is None
    assert has_triton_package() == (PathFinder.find_spec("triton") is not None)
    assert metrics.build_device_memory_monitor().get_peak_stats().max_reserved_gib > 0.05


@without_accelerator
def test_profiler_runs_without_a_device():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, None]) as profile:
        torch.ones(3).sum()
    assert profile.key_averages()


def gloo_threads(interfaces):
    """The threads that do collectives, those that a new group adds, and the ranks' sum in it."""
    import torch.distributed as dist

    def count():
        names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo_runloop" in name for name in names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", interfaces)
        dist.all_reduce(torch.ones(1))  # a thread names itself, some time after its start
        before = count()
        group = dist.new_group(list(range(dist.get_world_size())))
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    added = count() - before
    dist.destroy_process_group(group)
    return before, added, x.tolist()


@without_accelerator
@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
def test_a_gloo_group_has_one_thread(interfaces):
    """With PyTorch's two, torch 2.13 corrupts the heap after some thousand microbatches."""
    for before, added, summed in on_ranks(2, gloo_threads, interfaces):
        assert before >= 1  # the name of such threads is still the one counted
        assert (added, summed) == (1, [2, 2, 2])


@pytest.mark.slow
def test_gpu_hosts_give_gloo_one_thread_and_nothing_else():
    """Checkpoints and the ranks that share a GPU use gloo there too."""
    program = (  # the file alone: beside it, TorchTitan would want a GPU's packages
        "import sys, importlib.util as util, torch, torch.distributed as dist\n"
        "spec = util.spec_from_file_location('alone', sys.argv[1])\n"
        "spec.loader.exec_module(cpu := util.module_from_spec(spec))\n"
        "torch.accelerator.is_available = lambda: True\n"
        "before, barrier = dist.ProcessGroupGloo.__init__, dist.barrier\n"
        "cpu.install()\n"
        "after = dist.ProcessGroupGloo.__init__\n"
        "assert after is not before and dist.barrier is barrier\n"
        "assert 'torchtitan' not in sys.modules\n"
        "cpu.install()\n"
        "assert dist.ProcessGroupGloo.__init__ is after\n"
    )
    subprocess.run([sys.executable, "-c", program, cpu.__file__], check=True)
