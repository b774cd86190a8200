"""What this machine is, and whether its devices, memory, versions and keys are fit to train on."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence

import torch

from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.ledger import versions
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.result import Measured

_GIB = 2**30
_FREE_SHARE = 0.9  # of a device: what it needs itself is a few percent
_FREE_GIB = 1.0  # of the host, for each rank on it: what these checks take


def devices() -> Sequence[Measured]:
    """Count the CUDA devices that are there and cannot be used: the run would be on the CPU."""
    unusable = 0 if torch.cuda.is_available() else torch.cuda.device_count()
    return (Measured("there but not usable", unusable, 0),)


def memory(ranks: Ranks) -> Sequence[Measured]:
    """Measure how many GiB of the device's memory, or the host's, others hold of what is needed."""
    free, needed = free_memory_gib(ranks.device)
    return (Measured("GiB too few", max(needed - free, 0.0), 0.0),)


def same_versions(ranks: Ranks) -> Sequence[Measured]:
    """Count the ranks whose libraries are of other versions than rank 0's."""
    found = ranks.gather((versions(), torch.__version__, platform.python_version()))
    return (Measured("ranks with others", sum(one != found[0] for one in found), 0),)


def one_key(ranks: Ranks) -> Sequence[Measured]:
    """Count the ranks that hold another root key than rank 0, drawn and sent as for a run.

    The key serves nothing else, and what is compared is a hash of a key derived from it.
    """
    derived = shared_root_key(ranks.device, None).stream("coin").take(1)
    found = ranks.gather(hashlib.sha256(derived).hexdigest())
    return (Measured("ranks with another", sum(one != found[0] for one in found), 0),)


def free_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return how much memory is free to a rank, and how much should be."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free / _GIB, _FREE_SHARE * total / _GIB
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return free / _GIB / int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _FREE_GIB


def device_name(device: torch.device) -> str:
    """Name the device for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()})"


def facts(device: torch.device) -> dict[str, str]:
    """Collect what a report of a fault must say, in the order of the table."""
    found = {"free memory": f"{free_memory_gib(device)[0]:.1f} GiB a rank"}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["compute capability"] = f"{major}.{minor}"
        found["driver"] = _driver()
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {name: version for name, version in versions().items() if version != "unknown"}
    return found | {"python": platform.python_version(), "host": platform.platform()}


def _driver() -> str:
    """Ask for the driver's version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi does not answer)"
    return done.stdout.split("\n")[0].strip()
