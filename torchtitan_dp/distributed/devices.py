"""The devices of this machine: which there are, whether they are usable, and what they are; and how
much of the host's memory a process may take.

PyTorch's CUDA build also runs where no device is in sight: on a login node, in CI, with hidden
devices. There most questions about a device raise, so that each is asked here.

A process may take the least of the kernel's `MemAvailable` and of the rest that each cgroup around
it leaves, in version 2 of cgroups (Linux). Memory that only caches files counts as free.
"""

import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_dp.base import torch_private

_A_CORE = 8  # processes without a device: a test of meshes has several, a wrong NGPU more
_DRIVER = Path("/proc/driver/nvidia/version")


def cuda_devices() -> int:
    """Count the CUDA devices in sight. Opens no CUDA context."""
    return torch.cuda.device_count()


def default_processes() -> int:
    """Return the number of processes of a run where none is given: one for each CUDA device, or 2
    on a machine without. Opens no CUDA context."""
    return cuda_devices() or 2


def require_usable_devices() -> None:
    """Refuse, by a one-line ValueError, a machine with CUDA devices that PyTorch cannot use.

    PyTorch counts devices by the driver's library (NVML), TorchTitan checks whether CUDA is
    available; where the two disagree, N ranks would silently train on the CPU. Opens no CUDA
    context.
    """
    with warnings.catch_warnings():  # the errors below replace its warning
        warnings.simplefilter("ignore")
        count = cuda_devices()
        if torch.cuda.is_available():
            return
    if count == 0:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        is_cpu_build = torch.version.cuda is None and _DRIVER.exists()
        if named not in ("", "-1") and (named or is_cpu_build):
            raise ValueError(
                f"torch {torch.__version__} finds no CUDA device (it is built for CUDA "
                f"{torch.version.cuda}; CUDA_VISIBLE_DEVICES = {named}; NVIDIA's driver "
                f"{driver_version(_DRIVER)}): install a torch that is built for CUDA, or set "
                "CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        return
    raise ValueError(
        f"NVIDIA driver {driver_version()}: this machine has {count} CUDA devices that torch "
        f"{torch.__version__}, built for CUDA {torch.version.cuda}, cannot use; update the driver, "
        "install a torch for an older CUDA, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def require_so_many(processes: int) -> None:
    """Refuse, by a one-line ValueError, more processes than devices, or than a CPU can serve."""
    count, cores = cuda_devices(), len(os.sched_getaffinity(0))
    if processes > (most := count or _A_CORE * cores):
        there = f"{count} CUDA devices" if count else f"no CUDA device and {cores} cores"
        raise ValueError(f"NGPU = {processes}: this machine has {there}; use at most {most}")


def kind(device: torch.device) -> tuple[object, ...]:
    """Return type, name and compute capability, which must be equal on all ranks for equal bits."""
    if device.type != "cuda":
        return (device.type,)
    return (device.type, device_name(device), capability(device))


def device_name(device: torch.device) -> str:
    """Return the name that a device has from its maker."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()})"


def capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """Return the compute capability of a device, by default of the current one; None of a CPU."""
    is_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return torch.cuda.get_device_capability(device) if is_cuda else None


def cudnn_versions() -> list[tuple[int, int, int]]:
    """List the cuDNN versions of PyTorch's build and of this machine; none without a device."""
    if not (torch.backends.cudnn.is_available() and torch.cuda.is_available()):
        return []
    return torch_private.cudnn_versions()


def libraries(device: torch.device) -> dict[str, str]:
    """Return a CUDA device's capability, and the versions of its driver and of the libraries that
    use it; none of another."""
    if (compute := capability(device)) is None:
        return {}
    found = {"compute capability": ".".join(map(str, compute)), "driver": driver_version()}
    found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    if dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the whole memory of a CUDA device."""
    return torch.cuda.mem_get_info(device)


def driver_version(path: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, or "of unknown version"."""
    try:
        found = re.search(r"\b\d{3}\.[\d.]+\b", path.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"


def has_accelerator() -> bool:
    """Check for a device other than the CPU."""
    return torch.accelerator.is_available()


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return how many bytes this process may still take; None if it is unknown."""
    of_kernel = (kib * 1024 for kib in _numbers(proc / "meminfo", "MemAvailable:"))
    return min([*of_kernel, *_of_cgroups(proc)], default=None)


def _of_cgroups(proc: Path) -> Iterator[int]:
    """Yield what each limit of a cgroup around this process leaves, in bytes."""
    lines = _lines(proc / "self" / "cgroup")
    own = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields = before.split()
        if not own or not after.startswith("cgroup2 ") or len(fields) < 5:
            continue
        # mountinfo escapes blanks.
        root, mount = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
            for field in fields[3:5]
        )
        below = Path(os.path.relpath(own[0], root)).parts
        if ".." in below:  # the process's cgroup is out of sight
            below = ()
        for count in range(len(below) + 1):
            folder = Path(mount, *below[:count])
            cached = _numbers(folder / "memory.stat", "inactive_file", "active_file")
            held = sum(_numbers(folder / "memory.current")) - sum(cached)
            for name in ("memory.max", "memory.high"):  # may be "max"; above `high` processes crawl
                yield from (max(limit - held, 0) for limit in _numbers(folder / name))


def _numbers(path: Path, *names: str) -> list[int]:
    """Return the number that a file holds, or those of `names` in a file of names and numbers."""
    rows = [line.split() for line in _lines(path)]
    texts = [row[1] for row in rows if row[0] in names] if names else [row[0] for row in rows]
    return [int(text) for text in texts if text.isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()]
