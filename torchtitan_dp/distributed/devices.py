"""Whether the devices of this machine can be used: a run that finds none would train on the CPU."""

import re
import warnings
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def require_usable_devices() -> None:
    """Refuse a machine that has CUDA devices which PyTorch cannot use: its driver is too old, say.

    PyTorch counts devices by asking the driver's library (NVML), and TorchTitan asks whether CUDA
    is available: where the two disagree, N ranks would train on the CPU without a word. Opens no
    CUDA context.

    Raises:
        ValueError: one line that names the driver and what this PyTorch was built for.
    """
    with warnings.catch_warnings():  # what it warns of is said below
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count()
        if count == 0 or torch.cuda.is_available():
            return
    raise ValueError(
        f"NVIDIA driver {driver_version()}: this machine has {count} CUDA devices that torch "
        f"{torch.__version__}, built for CUDA {torch.version.cuda}, cannot use; update the driver, "
        "install a torch that was built for an older CUDA, or set CUDA_VISIBLE_DEVICES to nothing "
        "to train on the CPU"
    )


def driver_version(path: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, or a word for not knowing it."""
    try:
        found = re.search(r"\b\d{3}\.[\d.]+\b", path.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"
