"""Attention of transformers' modules to samples whose tokens lie on several ranks.

transformers hands attention and masks out by name. Ours is `NAME` (`model.build`): full attention
is TorchTitan's module, on which the ring acts; windows, soft caps and sinks are those of
`distributed.windows`. What a family asks for beside these is refused. Every private name of
transformers that the package uses is here too, each behind one function.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.distributed.windows import attend

NAME = "torchtitan_dp"
_OF_THE_CALL = {"position_ids", "use_cache"} | {
    f"output_{what}" for what in ("attentions", "hidden_states", "router_logits")
}
"""Keyword arguments that reach attention and mean nothing to it."""


class Sample:
    """The samples of one call of the model, on this rank, and how often attention was called.

    It reaches attention as a keyword argument of every module between. FSDP2 makes new ones of
    dataclasses, dicts and tuples there, so it is none of these.
    """

    def __init__(self, shard: Shard, full: nn.Module) -> None:
        """Take this rank's part of each sample, and the module of full attention."""
        self.shard, self.full = shard, full
        self.calls = 0


class Band:
    """What a family asks of a mask: causal, and within so many tokens (None: all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window


def band(*_: Any, local_size: int | None = None, use_vmap: bool = False, **terms: Any) -> Band:
    """Return the mask that a model makes for some layers, in the place of transformers' tensor.
    ValueError: it has more than a window, or is not causal."""
    plain = terms.get("allow_is_causal_skip", True)  # no blocks of tokens that see each other
    if use_vmap or not plain or "allow_is_bidirectional_skip" in terms:
        raise ValueError("config.json: the model's attention is masked by more than a window")
    return Band(local_size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # rings start collectives
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    sample: Sample | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do; query (B, H, T, F), result (B, T, H, F).

    The mask decides on the window, as it does where transformers has no kernel: some families give
    it to the mask alone. ValueError: the family asks for something else.
    """
    kind = type(module).__name__
    unknown = [name for name, value in others.items() if value is not None]
    if unknown := sorted(set(unknown) - _OF_THE_CALL):
        raise ValueError(f"config.json: {kind} gives attention {', '.join(unknown)}, unknown here")
    if sample is None:
        raise ValueError(f"config.json: {kind} is not given its model's keyword arguments")
    if not isinstance(attention_mask, Band):
        raise ValueError(f"config.json: {kind} makes a mask of its own, unknown here")
    window = attention_mask.window
    if sliding_window is not None and window is not None and sliding_window != window:
        raise ValueError(f"config.json: {kind} has windows of {sliding_window} and {window}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or not causal:
        raise ValueError(f"config.json: {kind} has dropout, or is not causal")
    sample.calls += 1
    if window is not None and window >= query.shape[2] * sample.shard.size:
        window = None
    size = value.shape[-1]
    if size < key.shape[-1]:  # latent attention's; kernels of the ring take one size
        value = F.pad(value, (0, key.shape[-1] - size))
    if window is None and softcap is None and s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        out = sample.full(query, key, value, scale=scaling, enable_gqa=grouped)
    else:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        more: dict[str, Any] = {"window": window, "softcap": softcap, "sinks_H": s_aux}
        out = attend(query, key, value, shard=sample.shard, scale=scale, **more)
    return out[..., :size].transpose(1, 2), None


def one_sequence() -> AbstractContextManager[Any]:
    """Spare masks a search for several sequences in one, which waits for the device: a rank's
    positions jump between the two parts of its sequence. No argument of a model does so."""
    from transformers import masking_utils

    return mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)


def draw_weights_(model: nn.Module, module: nn.Module) -> None:
    """Draw a module's parameters as its family does; `init_weights` draws those of all modules."""
    model._init_weights(module)  # type: ignore[operator]


def tied_names(config: Any) -> dict[str, str]:
    """Return the names of tied parameters of a configuration's model, with those of whose tensors
    they are. `all_tied_weights_keys` is public, of a whole model."""
    return _model_class(config)._tied_weights_keys


def attends_by_name(config: Any) -> bool:
    """Return whether a configuration's model takes attention by its name. Others ignore it."""
    return bool(_model_class(config)._supports_attention_backend)


def kept_in_fp32(model: Any) -> list[Any]:
    """Return patterns of the parameters that a family keeps in fp32 where others are bf16.
    `from_pretrained` applies them, to weights that it loads itself."""
    return list(model._get_dtype_plan(torch.bfloat16))


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
