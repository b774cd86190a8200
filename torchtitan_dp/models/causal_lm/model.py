"""A causal LM of transformers with the interface of our own families.

At one sample a microbatch, the gradient that FSDP2 reduces over the ranks of a sample is that
sample's gradient, for modules of any kind. So they are transformers' own; ours are attention,
masks, the loss, and rotary embeddings that depend on a sample's length.

Modules are in eval mode, always: dropout, and routers that draw, would add noise that no account
of privacy knows of. Auxiliary losses of routers are off: they multiply means over tokens, which do
not add up over the ranks of a sample.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import Tensor
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import ModelProtocol
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.models.causal_lm.attention import NAME, Sample, register
from torchtitan_dp.models.causal_lm.formulas import (
    gated_feed_forwards,
    use_our_norms,
    use_our_rotation,
)
from torchtitan_dp.models.causal_lm.settings import LONGER, PREFIX, CausalLMArgs
from torchtitan_dp.models.causal_lm.transformers_private import (
    draw_weights_,
    kept_in_fp32,
    one_sequence,
)
from torchtitan_dp.models.config_json import in_one_line
from torchtitan_dp.models.feed_forward import TiledMLP, Tiling
from torchtitan_dp.models.loss_head import LossHead
from torchtitan_dp.models.parameters import canonical_name
from torchtitan_dp.models.private import PrivateAdapter, PrivateModel
from torchtitan_dp.models.tiles import add_class
from torchtitan_dp.torch_private import NormOverSamples, with_parameters


class _Theirs(ModelProtocol):
    """transformers' module, and where it has what the package looks for."""

    attention = NAME

    def __init__(self, args: CausalLMArgs) -> None:
        super().__init__(args)
        from transformers import AutoModelForCausalLM

        register()
        config = args.config()
        config.use_cache = config.output_router_logits = config.output_hidden_states = False
        config.return_dict = True
        how: dict[str, Any] = {"attn_implementation": self.attention, "dtype": torch.float32}
        if self.attention != NAME:
            how["experts_implementation"] = self.attention
        try:
            with _buffers_computed():
                self.model = AutoModelForCausalLM.from_config(config, **how).eval()
        except Exception as error:  # of any type: a module's own check of a size
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise ValueError(
                f"config.json: transformers builds no {config.model_type} of it ({reason}); "
                "correct it: a key that it leaves out has its family's own value"
            ) from error
        self.gated: list[Any] = []
        if self.attention == NAME:
            use_our_norms(self.model)
            use_our_rotation(self.model)
            self.gated = gated_feed_forwards(self.model)
        self.buffers_at_start = {n: b.clone() for n, b in self.model.named_buffers()}
        self.full_attention = ScaledDotProductAttentionWrapper()

    @property
    def tok_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def output(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @functools.cached_property
    def _path_of_layers(self) -> str:
        for path, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.model_args.n_layers:
                return path
        raise ValueError("config.json: the model has no list of its layers")

    @property
    def layers(self) -> Any:
        """The blocks, an nn.ModuleList."""
        return self.model.get_submodule(self._path_of_layers)


class CausalLM(PrivateModel, _Theirs):  # type: ignore[misc]
    """A causal LM of transformers, for private training."""

    model_args: CausalLMArgs

    def __init__(self, model_args: CausalLMArgs) -> None:
        super().__init__(model_args)
        self.shard = Shard()
        for path, module in self.named_modules():
            if isinstance(module, NormOverSamples | nn.Conv1d):
                raise ValueError(
                    f"config.json: {path} is a {type(module).__name__}, which mixes samples or "
                    "tokens; use a model of attention alone"
                )
        self._by_length = [] if self.attention != NAME else _freed_of_past_lengths(self.model)

    def train(self, mode: bool = True) -> "CausalLM":
        """Stay in eval mode."""
        return super().train(False)

    def outer(self) -> list[nn.Module]:
        """List what has parameters beside blocks, embedding and output layer: the last norm."""
        apart = {*self.layers.modules(), self.tok_embeddings, *self.output.modules()}
        return [
            module
            for module in self.model.modules()
            if module not in apart and any(True for _ in module.parameters(recurse=False))
        ]

    def kept_in_fp32(self) -> set[str]:
        from transformers.core_model_loading import build_glob_alternation

        if not (patterns := kept_in_fp32(self.model)):
            return set()
        kept, *_ = build_glob_alternation(patterns)
        names = map(canonical_name, dict(self.named_parameters()))
        return {name for name in names if kept.search(name.removeprefix(PREFIX))}

    def attention_modules(self) -> list[nn.Module]:
        return [self.full_attention]

    def share_samples(self, shard: Shard) -> None:
        self.shard = shard

    def use_per_sample_layers(self) -> None:
        if experts := self.model_args.experts_key:
            raise ValueError(
                f"privacy.gradient_method: config.json has {experts} = "
                f"{self.model_args.settings[experts]}, and experts take the tokens of all samples "
                "at once; set it to 'microbatch'"
            )
        super().use_per_sample_layers()

    def use_loss_head(self, chunk_tokens: int) -> None:
        head = LossHead.over(self.output, chunk_tokens)
        head.transform = self._own_transform()
        self.model.set_output_embeddings(head)

    @property
    def in_tiles(self) -> bool:
        return bool(self.gated)

    def use_tiles(self, tiling: Tiling) -> None:
        for module in self.gated:
            add_class(module, TiledMLP)
            module.tiling = tiling.of(module.act_fn)

    def offload(self, around: Callable[[Tensor], AbstractContextManager[None]]) -> None:
        super().offload(around)

        def within(forward: Callable[..., Any], h_BTD: Tensor, *args: Any, **terms: Any) -> Any:
            with around(h_BTD):
                return forward(h_BTD, *args, **terms)

        for block in self.layers:
            block.forward = functools.partial(within, block.forward)

    def forward(
        self,
        tokens: Tensor,
        attention_masks: None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Any:
        sample = Sample(tokens.shape[1] * self.shard.size, self.shard, self.full_attention)
        for set_frequencies in self._by_length:
            set_frequencies(sample.tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        terms = {"input_ids": tokens, "position_ids": positions[:1], "use_cache": False}
        in_chunks = labels is not None and isinstance(self.output, LossHead)
        with one_sequence():
            model = self.model.base_model if in_chunks else self.model
            made = model(**terms, sample=sample)
        if sample.calls != self.model_args.n_layers:
            raise ValueError(
                f"config.json: {type(self.model).__name__} calls the attention of transformers "
                f"{sample.calls} times in {self.model_args.n_layers} layers; use a model of "
                "attention alone"
            )
        if in_chunks:
            return self.output(made.last_hidden_state, labels, targets)
        return made.logits if labels is None else self.losses(made.logits, labels, targets)

    def compute_rotary(self, device: torch.device | None = None) -> None:
        """Set all buffers as the constructor computed them."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers_at_start[canonical_name(name)])

    def _initialize_(self, whole: Tensor, name: str, generator: torch.Generator) -> None:
        """Draw a whole parameter, in place, as its family does."""
        path, _, last = name.rpartition(".")
        module, drawn = self.get_submodule(path), nn.Parameter(whole)

        def alone(attribute: str, value: nn.Parameter | None) -> Tensor | None:
            if attribute == last:
                return drawn
            return None if value is None else torch.empty(value.shape, device="meta")

        whole.fill_(torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            draw_weights_(self.model, with_parameters(module, type(module), alone))
        if whole.isnan().any():  # its family has no rule for it
            whole.normal_(std=0.02, generator=generator)

    draws_at_once = 1  # a family draws from the process's own generator

    def _own_transform(self) -> Callable[[Tensor], Tensor] | None:
        """Return what the family's own forward makes of the output layer's products; None for
        nothing."""
        transform = functools.partial(_own_logits, self.model)
        with torch.device("cpu"), torch.no_grad():
            raw_NV = torch.linspace(-90, 90, 33).view(3, 11)
            same = torch.equal(transform(raw_NV), raw_NV)
        return None if same else transform


class Eager(CausalLM):
    """The same model as transformers alone computes it, in one process: what ours is held
    against."""

    attention = "eager"

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Any:
        """Return logits (B, T, V)."""
        return self.model(input_ids=tokens, use_cache=False).logits


@contextlib.contextmanager
def _buffers_computed() -> Iterator[None]:
    """On the meta device, build modules whose buffers (rotary frequencies, scales) have values, and
    parameters none."""
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


def _freed_of_past_lengths(model: nn.Module) -> list[Callable[[int], None]]:
    """Have rotary embeddings that depend on a sample's length take it as it is set, in place.

    transformers takes the largest position that this rank has, and one kind keeps frequencies of
    the longest sample so far. Returns what sets the length for each kind of layer.
    """
    found: list[Callable[[int], None]] = []
    for rotary in model.modules():
        types: Any = getattr(rotary, "rope_type", None)
        kinds = types if isinstance(types, dict) else {None: types}
        changing = {layer: kind for layer, kind in kinds.items() if kind in LONGER}
        if changing:
            forward = torch.no_grad()(inspect.unwrap(type(rotary).forward))
            rotary.forward = functools.partial(forward, rotary)
            found.append(functools.partial(_set_frequencies, rotary, changing))
    return found


@torch.no_grad()
def _set_frequencies(rotary: Any, kinds: dict[str | None, str], tokens: int) -> None:
    """Set the frequencies of samples of so many tokens, for each kind of layer."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for layer, kind in kinds.items():
        buffer = getattr(rotary, "inv_freq" if layer is None else f"{layer}_inv_freq")
        how = {"seq_len": tokens, "layer_type": layer}
        buffer.copy_(ROPE_INIT_FUNCTIONS[kind](rotary.config, buffer.device, **how)[0])


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


def _own_logits(model: Any, raw_NV: Tensor) -> Tensor:
    """Return the logits that a family's own forward makes of the output layer's products."""
    forward = type(model).forward
    logits: Tensor = forward(_Head(model, raw_NV), input_ids=None, use_cache=False).logits[0]
    return logits


class _Names(StateDictAdapter):
    """Names of transformers, as in files of Hugging Face, and ours."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(PREFIX): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {PREFIX + name: value for name, value in hf_state_dict.items()}


class HuggingFaceAdapter(PrivateAdapter, _Names):
    """Converts to the names in files and back."""
