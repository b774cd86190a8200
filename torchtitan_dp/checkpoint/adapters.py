"""Which of a model's parameters are LoRA's factors, by name, and which a start need not load.

A checkpoint of a run holds everything, the frozen weights too: whoever has it needs nothing else to
go on, to verify or to release, also where the folder that training started from is gone. It costs
2 bytes a frozen value (4 where compute is fp32), of 16 that full training saves for each.
"""

from collections.abc import Mapping
from typing import TypeVar

from torchtitan_dp.checkpoint import safe_load

FACTORS = ("lora_a", "lora_b")
"""The modules that hold the factors A and B, beside the weight of the layer that they adapt."""

_Value = TypeVar("_Value")


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is a factor of LoRA."""
    return name.split(".")[-2:-1] in ([factor] for factor in FACTORS)


def without_adapters(state_dict: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return what is not LoRA's: the model that adapters are beside."""
    return {name: value for name, value in state_dict.items() if not is_adapter(name)}


def has_adapters(step: str) -> bool:
    """Tell whether an initial checkpoint has adapters. If not, the rest is read, and adapters stay
    as they were drawn; a run's own checkpoint must have them all.

    Args:
        step: the checkpoint's own folder.

    Raises:
        ValueError: its metadata is damaged.
    """
    return any(map(is_adapter, safe_load.shapes(safe_load.read_metadata(step))))
