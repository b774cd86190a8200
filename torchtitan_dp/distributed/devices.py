"""The devices of this machine: usable or not. A run that finds none would train on the CPU."""

import os
import re
import warnings
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def require_usable_devices() -> None:
    """Refuse a machine with CUDA devices that PyTorch cannot use.

    Its driver may be too old for this PyTorch, or this PyTorch may be built without CUDA. PyTorch
    counts devices by the driver's library (NVML), TorchTitan checks whether CUDA is available;
    where the two disagree, N ranks would silently train on the CPU. Opens no CUDA context.

    Raises:
        ValueError: one line that names the driver and what this PyTorch was built for.
    """
    with warnings.catch_warnings():  # the errors below replace its warning
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count()
        if torch.cuda.is_available():
            return
    if count == 0:
        if torch.version.cuda is None and _DRIVER.exists() and not _are_hidden():
            raise ValueError(
                f"torch {torch.__version__} is built without CUDA, but this machine has NVIDIA's "
                f"driver {driver_version(_DRIVER)}: install a torch that is built for CUDA, or set "
                "CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        return
    raise ValueError(
        f"NVIDIA driver {driver_version()}: this machine has {count} CUDA devices that torch "
        f"{torch.__version__}, built for CUDA {torch.version.cuda}, cannot use; update the driver, "
        "install a torch that was built for an older CUDA, or set CUDA_VISIBLE_DEVICES to nothing "
        "to train on the CPU"
    )


def kind(device: torch.device) -> tuple[object, ...]:
    """Return what must be equal on all ranks for equal bits: type, name, compute capability."""
    if device.type != "cuda":
        return (device.type,)
    name = torch.cuda.get_device_name(device)
    return (device.type, name, torch.cuda.get_device_capability(device))


def missing_devices() -> str | None:
    """Return a one-line warning if CUDA_VISIBLE_DEVICES names devices and none is found."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or _are_hidden() or torch.cuda.device_count() > 0:
        return None
    return (
        f"warning: CUDA_VISIBLE_DEVICES = {named}, but torch {torch.__version__} finds no CUDA "
        "device: this run would train on the CPU"
    )


def _are_hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def driver_version(path: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, or "of unknown version"."""
    try:
        found = re.search(r"\b\d{3}\.[\d.]+\b", path.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"
