"""Export of LoRA's factors: in PEFT's format, or merged into the adapted weights.

PEFT (Hugging Face's library of adapters) keeps A and B apart from the model, under the model's
names in `transformers`, beside an `adapter_config.json` with r, alpha and targets.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_dp.models.families import ModelArgs, family_of
from torchtitan_dp.models.lora import LoRA, is_adapter, merged

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_NAMES = {"lora_a": "lora_A", "lora_b": "lora_B"}


def adapter_settings(names: Mapping[str, Any], lora: LoRA, base: str | None) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        names: the names of `peft_tensors`.
        base: the public name of the model that adapters are for; None leaves the key out.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **({} if base is None else {"base_model_name_or_path": base}),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,  # alpha / r, not alpha / sqrt(r)
        "modules_to_save": None,
        "inference_mode": True,
    }


def peft_tensors(state_dict: Mapping[str, Any], args: ModelArgs) -> dict[str, torch.Tensor]:
    """Return all factors as whole fp32 tensors on the CPU, under PEFT's names.

    B's rows are those of its layer's output, in the order of `transformers`.
    Collective over the FSDP mesh: each factor is gathered.
    """
    found = {}
    for name in filter(is_adapter, state_dict):
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        whole = _whole(state_dict[name]).to("cpu", torch.float32)
        theirs, order = _rows_for_transformers(layer, state_dict[f"{layer}.weight"].shape, args)
        if factor == "lora_b":
            whole = whole[order]
        found[f"base_model.model.{theirs}.{_PEFT_NAMES[factor]}.weight"] = whole.contiguous()
    return found


def _rows_for_transformers(
    layer: str, shape: torch.Size, args: ModelArgs
) -> tuple[str, torch.Tensor]:
    """Return a layer's name in `transformers`, and the index of our row for each row of its weight
    there. The family's adapter is applied to a weight whose values are the row numbers."""
    rows = torch.arange(shape[0], dtype=torch.int32)[:, None].expand(shape)
    ((name, moved),) = family_of(args).adapter(args, None).to_hf({f"{layer}.weight": rows}).items()
    return name.removesuffix(".weight"), moved[:, 0].long()


def merged_whole(
    name: str, whole: torch.Tensor, state_dict: Mapping[str, Any], lora: LoRA | None
) -> torch.Tensor:
    """Return a whole weight with its layer's factors merged into it, in fp32; any other as it is.

    Collective over the FSDP mesh, for a layer with factors: both are gathered.
    """
    layer = name.removesuffix(".weight")
    factors = [state_dict.get(f"{layer}.{factor}.weight") for factor in _PEFT_NAMES]
    a, b = (None if factor is None else _whole(factor) for factor in factors)
    if a is None or b is None:
        return whole
    assert lora is not None
    return merged(whole, a, b, lora.scaling)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
