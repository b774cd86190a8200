"""Weights between our Qwen3 and Hugging Face's names."""

from typing import Any

from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_dp.models.lora import without_adapters
from torchtitan_dp.models.qwen3.model import QwenArgs


class HuggingFaceAdapter(Qwen3StateDictAdapter):
    """TorchTitan's adapter without LoRA's factors, which no file of a whole model has."""

    def __init__(self, model_args: QwenArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)  # an index only matters for saving
        self.hf_assets_path = hf_assets_path or None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's names, without a tied output layer."""
        return super().to_hf(without_adapters(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's names; a tied output layer is the embedding's tensor."""
        return super().from_hf(dict(hf_state_dict))
