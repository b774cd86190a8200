"""Selfcheck as a user starts it, on CUDA devices: what no CPU test can show.

Between them the configurations run FSDP2's reduction, ring attention, the loss head, clipping,
offloading, compiled blocks, the fused AdamW, noise and checkpoints on a device. Two ranks on gloo
can share one device, which NCCL refuses.
"""

import json
import subprocess
import sys

import pytest
import torch

from tests.processes.runs import CONFIG, ROOT

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
SHARED = ("--backend", "cpu:gloo,cuda:gloo")
BF16 = "--training.mixed_precision_param=bfloat16"
GRAD_SAMPLE = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=4")
OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
DP_SHARD = ("--parallelism.context_parallel_degree=1", "--parallelism.data_parallel_shard_degree=2")


def on_cuda(folder, processes, *arguments):
    """The names of checks in `--json`; a start that does not pass fails with what it printed."""
    said = folder / "said.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc_per_node", str(processes)]
    shared = SHARED[0] in arguments
    module = "tests.selfcheck.shared_device" if shared else "torchtitan_dp.selfcheck"
    program = ["-m", module, "--json", str(said), *arguments]
    command = [sys.executable, *(launcher if processes > 1 else []), *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads(said.read_text())
    assert not result["device"].startswith("CPU")
    return [check["name"] for check in result["checks"]]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_method(tmp_path, processes):
    names = on_cuda(tmp_path, processes, *(SHARED if processes > 1 else ()))
    rings = [name for name in names if name.startswith("ring attention")]
    assert len(rings) == (8 if processes == 2 else 0)


COMPILE = "--compile.enable"
CASES = {
    "debug": (1, ()),
    "grad_sample": (1, (BF16, *GRAD_SAMPLE)),
    "compile": (1, (COMPILE,)),
    "compile, offload": (1, (BF16, COMPILE, *OFFLOAD)),
    "offload": (1, (BF16, *OFFLOAD, *GRAD_SAMPLE)),
    "cp": (2, SHARED),
    "cp, grad_sample": (2, (BF16, *GRAD_SAMPLE, *SHARED)),
    "dp_shard": (2, (*DP_SHARD, *SHARED)),
    "dp_shard, grad_sample": (2, (BF16, *GRAD_SAMPLE, *DP_SHARD, *SHARED)),
    "cp, compile": (2, (BF16, COMPILE, *SHARED)),
}


@pytest.mark.parametrize("name", CASES)
def test_on_one_device(tmp_path, name):
    processes, overrides = CASES[name]
    on_cuda(tmp_path, processes, "--config", str(CONFIG), *overrides)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_all_devices(tmp_path):
    on_cuda(tmp_path, torch.cuda.device_count())


@pytest.mark.parametrize("name", ["llama3_1b_64k", "llama3_8b_256k_ac"])
def test_shipped_configurations(tmp_path, name):
    on_cuda(tmp_path, 1, "--config", str(ROOT / "train_configs" / f"{name}.toml"))
