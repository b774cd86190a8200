"""transformers' module of a configuration, and what only its family's own code decides: buffers,
frequencies by length, logits, initial values."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.base.torch_private import NormOverSamples, with_parameters
from torchtitan_dp.models.causal_lm.attention import NAME, register
from torchtitan_dp.models.causal_lm.settings import LONGER, ModelArgs, in_one_line
from torchtitan_dp.models.causal_lm.transformers_private import draw_weights_


def build(args: ModelArgs, attention: str) -> Any:
    """Build a configuration's model with this attention, by its name, and without caches and losses
    of routers. ValueError, one line for the user: transformers builds none, or it mixes samples."""
    from transformers import AutoModelForCausalLM

    register()
    config = args.config()
    config.use_cache = config.output_router_logits = config.output_hidden_states = False
    config.return_dict = True
    how: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
    if attention != NAME:
        how["experts_implementation"] = attention
    try:
        with _buffers_computed():
            model = AutoModelForCausalLM.from_config(config, **how).eval()
    except Exception as error:  # of any type: a module's own check of a size
        reason = f"{type(error).__name__}: {in_one_line(error)}"
        raise ValueError(
            f"config.json: transformers builds no {config.model_type} of it ({reason}); "
            "correct it: a key that it leaves out has its family's own value"
        ) from error
    model.get_input_embeddings().padding_idx = None  # else that token would never be learned
    for path, module in model.named_modules():
        if isinstance(module, NormOverSamples | nn.Conv1d):
            raise ValueError(
                f"config.json: {path} is a {type(module).__name__}, which mixes samples or "
                "tokens; use a model of attention alone"
            )
    return model


def meeting(layers: nn.Module) -> str | None:
    """Return the name of a module of the blocks that takes the tokens of all samples at once:
    experts, one tensor of theirs all or a list of modules. None if each layer is per-sample."""
    for path, module in layers.named_modules():
        stacked = any(p.dim() > 2 for p in module.parameters(recurse=False))
        if stacked or (path and isinstance(module, nn.ModuleList)):
            return path
    return None


def draw_(model: Any, module: nn.Module, name: str, whole: Tensor, seed: int) -> None:
    """Draw a module's whole parameter of this name, in place, as its family does."""
    drawn = nn.Parameter(whole)

    def alone(attribute: str, value: nn.Parameter | None) -> Tensor | None:
        if attribute == name:
            return drawn
        return None if value is None else torch.empty(value.shape, device="meta")

    whole.fill_(torch.nan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draw_weights_(model, with_parameters(module, type(module), alone))
    if whole.isnan().any():  # its family has no rule for it
        whole.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def _buffers_computed() -> Iterator[None]:
    """On the meta device, build modules whose buffers have values, and parameters none."""
    if torch.get_default_device().type != "meta":
        yield
        return
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with torch.device("cpu"), mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


@torch.no_grad()
def set_length(model: nn.Module, tokens: int) -> None:
    """Have rotary embeddings that depend on a sample's length take this one, in place; transformers
    takes the largest position that this rank has, and one kind the longest sample so far."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for rotary in model.modules():
        types: Any = getattr(rotary, "rope_type", None)
        kinds = types if isinstance(types, dict) else {None: types}
        changing = {layer: kind for layer, kind in kinds.items() if kind in LONGER}
        if changing:
            forward = torch.no_grad()(inspect.unwrap(type(rotary).forward))
            rotary.forward = functools.partial(forward, rotary)
        for layer, kind in changing.items():
            buffer: Any = getattr(rotary, "inv_freq" if layer is None else f"{layer}_inv_freq")
            how = {"seq_len": tokens, "layer_type": layer}
            with torch.device("cpu"):
                found, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, buffer.device, **how)
            buffer.copy_(found)


class _Head:
    """A stand-in for `self` in a family's forward, whose output layer has raw logits already."""

    def __init__(self, model: Any, raw_NV: Tensor) -> None:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        output = model.get_output_embeddings()
        name = next(name for name, module in model.named_children() if module is output)
        made = MoeModelOutputWithPast(last_hidden_state=raw_NV[None])
        self.__dict__ |= {"_model": model, name: lambda raw: raw}
        self.__dict__[model.base_model_prefix] = lambda *_, **__: made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def own_logits(model: Any, raw_NV: Tensor) -> Tensor:
    """Return the logits that a family's own forward makes of the output layer's products."""
    forward = type(model).forward
    return forward(_Head(model, raw_NV), input_ids=None, use_cache=False).logits[0]
