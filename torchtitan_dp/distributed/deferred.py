"""Imports TorchTitan without what no run here uses, which is half of the seconds a start takes.

While it is imported, TorchTitan 0.2.2 compiles attentions that are none of ours, which loads the
whole compiler, and it imports Hugging Face's `datasets` with pandas and pyarrow. Here both wait
until somebody calls them, so that what TorchTitan's functions do stays as it is.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def until_called() -> Iterator[None]:
    """Let TorchTitan be imported; `torch` and `sys.modules` are as before when the context ends."""
    stand_ins = {} if "datasets" in sys.modules else _datasets()
    sys.modules.update(stand_ins)
    try:
        with mock.patch.object(torch, "compile", _compile_later):
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _datasets() -> dict[str, types.ModuleType]:
    """Make the modules of `datasets` that TorchTitan imports, with the functions that it calls."""
    datasets = types.ModuleType("datasets")
    datasets.Dataset = object  # type: ignore[attr-defined]  # it stands in annotations only
    datasets.load_dataset = _later("datasets", "load_dataset")  # type: ignore[attr-defined]
    distributed = types.ModuleType("datasets.distributed")
    name = "split_dataset_by_node"
    setattr(distributed, name, _later(distributed.__name__, name))
    return {module.__name__: module for module in (datasets, distributed)}


def _later(module: str, name: str) -> Callable[..., Any]:
    """Make a function that imports `module` and calls its `name`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def _compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Stand in for `torch.compile`, which is asked at the function's first call."""
    compiled = functools.cache(lambda: torch.compile(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
