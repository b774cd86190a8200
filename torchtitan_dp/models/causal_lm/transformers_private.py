"""Every private name of transformers that the package uses, each behind one function."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn


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
