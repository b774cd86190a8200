"""The folder of initial weights, and the trained weights in words."""

from torchtitan_dp.config import JobConfig

ALL = "all weights"


def weights_folder(config: JobConfig) -> tuple[str, str]:
    """Return the folder of initial weights, if any are loaded, and its key."""
    if config.checkpoint.initial_load_path:
        return config.checkpoint.initial_load_path, "checkpoint.initial_load_path"
    return config.model.hf_assets_path, "model.hf_assets_path"


def trained(config: JobConfig) -> str:
    """Describe the trained weights, for `privacy.json`, cards and messages."""
    lora = config.lora
    if not lora.rank:
        return ALL
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(sorted(lora.targets))}"
