"""A login node: PyTorch's CUDA build and no device, imitated in a process of another build.

python -m tests.login_node -m MODULE
"""

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch


def imitate(set_attribute: Callable[[Any, str, Any], None] = setattr, devices: int = 0) -> None:
    """Answer as the CUDA build does without a usable device; of an old driver, with some."""

    def initialize(*_: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    set_attribute(torch.version, "cuda", torch.version.cuda or "13.0")
    set_attribute(torch.backends.cudnn, "is_available", lambda: True)
    set_attribute(torch.cuda, "_lazy_init", initialize)
    set_attribute(torch.cuda, "is_available", lambda: False)
    set_attribute(torch.cuda, "device_count", lambda: devices)


if __name__ == "__main__":
    imitate()
    runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
