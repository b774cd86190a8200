"""What `[lora]` says of a run, in words for `privacy.json`, cards and messages."""

from torchtitan_dp.config import JobConfig

ALL = "all weights"


def trained(config: JobConfig) -> str:
    """Say what is trained: all weights, or adapters beside frozen ones."""
    lora = config.lora
    if not lora.rank:
        return ALL
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(sorted(lora.targets))}"
