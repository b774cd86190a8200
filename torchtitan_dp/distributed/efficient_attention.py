"""Attention in fp32 on an accelerator, where no ring shares it out: by the memory-efficient kernel.

Flash and cuDNN take 16 bits only, so TorchTitan's list leaves fp32 to the math kernel, which keeps
T x T scores a head: 34 GB for 32 heads at T = 16,384. The memory-efficient one knows no grouped
queries, so keys and values are repeated for it; that costs as much as having a head of each query.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

# Math is left for head sizes that the kernel does not take.
_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def use_efficient_attention(model: nn.Module) -> None:
    """Replace each attention of TorchTitan's in `model`, in place; 16 bits stay as they are."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is ScaledDotProductAttentionWrapper:
                setattr(module, name, _EfficientAttention())


class _EfficientAttention(ScaledDotProductAttentionWrapper):
    """Attends as TorchTitan's wrapper does, to q, k, v of shape (B, heads, T, head_dim)."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> torch.Tensor:
        if q.dtype != torch.float32:
            return super().forward(q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(_BACKENDS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal)
