"""Differentially private training of language models on long private documents, on TorchTitan.

The parts of a run, for programs of your own; `examples/parts.py` uses each of them:

    Mechanism, Segment          a step's numbers; so many steps of it
    epsilon, noise_for, meaning what steps spend; the noise for a target; what that means
    RootKey, poisson_draw       secret keys; who is drawn at a step
    squared_norm, clip, add_clipped_    gradients of samples -> a sum with sensitivity C
    add_gaussian_noise_         a step's noise on a shard of a parameter
    per_sample_loss, parallelize    losses of samples; a model laid over a mesh
    read_ledger, add_up         a run's verified ledger; the budget of several runs

A name is imported when it is first used: PyTorch takes seconds.
"""

import importlib
from typing import Any

from torchtitan_dp.base.process import require_environment

require_environment()  # before any command and any import of PyTorch

_PLACES = {
    "Mechanism": ("privacy.segments", "Mechanism"),
    "Segment": ("privacy.segments", "Segment"),
    "epsilon": ("privacy.accounting", "compose"),
    "noise_for": ("privacy.accounting", "noise_for"),
    "meaning": ("privacy.meaning", "meaning"),
    "RootKey": ("privacy.keys", "RootKey"),
    "poisson_draw": ("privacy.sampling", "poisson_draw"),
    "squared_norm": ("privacy.clipping", "squared_norm"),
    "clip": ("privacy.clipping", "clip"),
    "add_clipped_": ("privacy.clipping", "add_clipped_"),
    "add_gaussian_noise_": ("privacy.noise", "add_gaussian_noise_"),
    "per_sample_loss": ("models.loss", "per_sample_loss"),
    "parallelize": ("models.parallelize", "parallelize"),
    "read_ledger": ("checkpoint.folder", "verify"),
    "add_up": ("ledger.spending", "total"),
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"torchtitan_dp has no {name}; its public names: {', '.join(_PLACES)}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"torchtitan_dp.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
