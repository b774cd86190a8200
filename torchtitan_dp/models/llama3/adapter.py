"""Weights between our Llama and Hugging Face's names and head layout."""

from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_dp.models.llama3.model import LlamaArgs
from torchtitan_dp.models.lora import without_adapters
from torchtitan_dp.models.parameters import TIED_OUTPUT


class HuggingFaceAdapter(Llama3StateDictAdapter):
    """TorchTitan's adapter for tied weights too, and any number of ranks; without LoRA's factors,
    which no file of a whole model has."""

    model_args: LlamaArgs

    def __init__(self, model_args: LlamaArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)  # an index only matters for saving
        self.hf_assets_path = hf_assets_path or None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's names and head layout, without a tied output layer and LoRA's
        factors.

        Collective over the FSDP mesh, if its ranks do not divide the heads.
        """
        tied = self.model_args.tie_embeddings
        return super().to_hf(
            {
                name: self._with_whole_heads(name, value)
                for name, value in without_adapters(state_dict).items()
                if not (tied and name == TIED_OUTPUT)
            }
        )

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's names and layout; a tied output layer is the same tensor as
        the embedding."""
        state_dict = super().from_hf(hf_state_dict)
        if self.model_args.tie_embeddings and "tok_embeddings.weight" in state_dict:
            state_dict[TIED_OUTPUT] = state_dict["tok_embeddings.weight"]
        return state_dict

    def _with_whole_heads(self, name: str, value: Any) -> Any:
        """Replicate wq or wk if one of its heads lies on two ranks: heads are permuted one by
        one."""
        if not isinstance(value, DTensor) or not name.endswith(("wq.weight", "wk.weight")):
            return value
        heads, mesh = self.model_args.n_heads, value.device_mesh
        if name.endswith("wk.weight"):
            heads = self.model_args.n_kv_heads or heads
        ranks = 1
        for dim, placement in enumerate(value.placements):
            ranks *= mesh.size(dim) if isinstance(placement, Shard) else 1
        return value if heads % ranks == 0 else value.redistribute(mesh, [Replicate()] * mesh.ndim)
