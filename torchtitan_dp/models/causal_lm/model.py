"""A causal LM of transformers for private training: per-sample losses, adapters, and initial
weights that depend on no mesh.

Modules are transformers' own; ours are attention, masks, the loss, rotary embeddings that depend on
a length, which is that of training, and modules of the same formula that keep less (`formulas`).

Modules are in eval mode, always: dropout, and routers that draw, would add noise that no account
of privacy knows of. Auxiliary losses of routers are off: they multiply means over tokens, which do
not add up over the ranks of a sample.
"""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import ModelProtocol
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_dp.base.torch_private import NormOverSamples, with_parameters
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.models.causal_lm import attention
from torchtitan_dp.models.causal_lm.attention import (
    NAME,
    Sample,
    draw_weights_,
    kept_in_fp32,
    one_sequence,
)
from torchtitan_dp.models.causal_lm.formulas import gated_feed_forwards, use_our_norms
from torchtitan_dp.models.causal_lm.settings import LONGER, PREFIX, ModelArgs, in_one_line
from torchtitan_dp.models.feed_forward import Tiling, use_tiles
from torchtitan_dp.models.lora import add_adapters, draw_factor_, is_adapter, without_adapters
from torchtitan_dp.models.loss import LossHead, per_sample_loss, token_losses
from torchtitan_dp.models.parameters import canonical_name, copy_slice_
from torchtitan_dp.models.weight_files import reader_of


class CausalLM(ModelProtocol):
    """A causal LM of transformers, `model`, and where it has what the package looks for."""

    attention = NAME
    model_args: ModelArgs

    def __init__(self, model_args: ModelArgs) -> None:
        """Build it. Raises ValueError, one line for the user, if its modules cannot be trained."""
        super().__init__(model_args)
        self.model_args, self.model = model_args, build(model_args, self.attention)
        self.gated: list[Any] = []
        if self.attention == NAME:
            use_our_norms(self.model)
            self.gated = gated_feed_forwards(self.model)
            set_length(self.model, model_args.seq_len)
        self.meeting = meeting(self.layers)
        self.buffers_at_start = {n: b.clone() for n, b in self.model.named_buffers()}
        self.full_attention = ScaledDotProductAttentionWrapper()
        self.shard = Shard()
        self.around_block: Any = None  # wraps the call of a block, by the block's input
        if model_args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if model_args.lora is not None:
            add_adapters(self, self.layers, model_args.lora)

    @property
    def tok_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def output(self) -> Any:
        """The output layer, an nn.Linear or `LossHead`."""
        return self.model.get_output_embeddings()

    @functools.cached_property
    def layers(self) -> Any:
        """The blocks, an nn.ModuleList."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.model_args.n_layers:
                return module
        raise ValueError("config.json: the model has no list of its layers")

    def outer(self) -> list[nn.Module]:
        """List what has parameters beside blocks, embedding and output layer: the last norm."""
        apart = {*self.layers.modules(), self.tok_embeddings, *self.output.modules()}
        return [
            module
            for module in self.model.modules()
            if module not in apart and any(True for _ in module.parameters(recurse=False))
        ]

    def train(self, mode: bool = True) -> "CausalLM":
        """Stay in eval mode."""
        return super().train(False)

    def kept_in_fp32(self) -> set[str]:
        """Return the names of parameters that are fp32 also in a model of bf16."""
        from transformers.core_model_loading import build_glob_alternation

        if not (patterns := kept_in_fp32(self.model)):
            return set()
        kept, *_ = build_glob_alternation(patterns)
        names = map(canonical_name, dict(self.named_parameters()))
        return {name for name in names if kept.search(name.removeprefix(PREFIX))}

    def use_per_sample_layers(self) -> None:
        """Have layers form per-sample gradients, in place. ValueError, one line: samples meet."""
        if self.meeting is not None:
            raise ValueError(
                f"privacy.gradient_method: layers.{self.meeting} of a {type(self.model).__name__} "
                "are experts, which take the tokens of all samples at once; set it to 'microbatch'"
            )
        per_sample_layers(self)

    def use_loss_head(self, chunk_tokens: int) -> None:
        """Compute losses by `LossHead`, in place."""
        head = LossHead.over(self.output, chunk_tokens)
        head.transform = self._own_transform()
        self.model.set_output_embeddings(head)

    def use_tiles(self, tiling: Tiling) -> None:
        """Compute gated feed-forwards in tiles of tokens, in place; before AC and FSDP2."""
        for module in self.gated:
            use_tiles(module, tiling)

    def offload(self, around: Callable[[Tensor], AbstractContextManager[None]]) -> None:
        """Call each block, checkpointed or not, within `around` of its input."""
        self.around_block = around

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
        """Return logits (B, T, V); with labels and targets, their `per_sample_loss`; with labels
        alone, and without gradients, their `token_losses`.

        Args:
            positions: int64 (1 or B, T), of this rank's tokens; the same for all samples.
            labels: of one sample where samples meet in a module, unless their loss is one.
            targets: each sample's number, (B,). A number without a dimension makes one sample of
                all, for a run without privacy: one loss (1,), whose gradient merges them.
        """
        apart = labels is not None and (targets is None or targets.dim() > 0)
        assert not apart or self.meeting is None or len(tokens) == 1, (
            f"samples would meet in layers.{self.meeting}"
        )
        sample = Sample(self.shard, self.full_attention)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        terms = {"input_ids": tokens, "position_ids": positions[:1], "use_cache": False}
        in_chunks = labels is not None and isinstance(self.output, LossHead)
        with one_sequence():
            model = self.model.base_model if in_chunks else self.model
            made = model(**terms, sample=sample)
        if sample.calls != self.model_args.n_layers:
            raise ValueError(
                f"config.json: {type(self.model).__name__} calls attention {sample.calls} times "
                f"in {self.model_args.n_layers} layers; use a model of attention alone"
            )
        found = made.last_hidden_state if in_chunks else made.logits
        if labels is None:
            return found
        if targets is not None and not apart:
            found, labels = found.flatten(0, 1)[None], labels.flatten()[None]
            targets = targets[None]
        if in_chunks:
            return self.output(found, labels, targets)
        if targets is None:
            return token_losses(found, labels)
        return per_sample_loss(found, labels, targets)

    @torch.no_grad()
    def compute_buffers(self) -> None:
        """Set all buffers as the constructor computed them, on their own device."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers_at_start[canonical_name(name)])

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Set each parameter to its slice of a whole drawn, on the CPU, from (`debug.seed`, its
        name) alone, as its family does, bit-identical on every mesh and rank; set buffers."""
        self.compute_buffers()
        args = self.model_args
        if args.tie_embeddings and not isinstance(self.output.weight, DTensor):
            # Without FSDP2, `to_empty` has made two of one: then an export would lack the second.
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            if args.draw_adapters if is_adapter(name) else args.draw_weights:
                copy_slice_(parameter, self._drawn(canonical_name(name), parameter.shape))
            else:
                parameter.fill_(torch.nan)

    def _drawn(self, name: str, shape: torch.Size) -> Tensor:
        """Draw a whole parameter as its family does, fp32 on the CPU, from its own generator."""
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        digest = hashlib.sha256(f"{self.model_args.init_seed}/{name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")  # 32 bits suffice: initial weights are public
        if is_adapter(name):
            draw_factor_(whole, name, torch.Generator().manual_seed(seed))
            return whole
        path, _, last = name.rpartition(".")
        module, drawn = self.get_submodule(path), nn.Parameter(whole)

        def alone(attribute: str, value: nn.Parameter | None) -> Tensor | None:
            if attribute == last:
                return drawn
            return None if value is None else torch.empty(value.shape, device="meta")

        whole.fill_(torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draw_weights_(self.model, with_parameters(module, type(module), alone))
        if whole.isnan().any():  # its family has no rule for it
            whole.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
        return whole

    def _own_transform(self) -> Callable[[Tensor], Tensor] | None:
        """Return what the family's own forward makes of the output layer's products, or None."""
        transform = functools.partial(own_logits, self.model)
        with torch.device("cpu"), torch.no_grad():
            raw_NV = torch.linspace(-90, 90, 33).view(3, 11)
            same = torch.equal(transform(raw_NV), raw_NV)
        return None if same else transform


class Eager(CausalLM):
    """The same model as transformers alone computes it, in one process, of samples that are padded
    to the length of training: what ours is held against."""

    attention = "eager"

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Any:
        """Return logits (B, T, V)."""
        padded = F.pad(tokens, (0, max(self.model_args.seq_len - tokens.shape[1], 0)))
        return self.model(input_ids=padded, use_cache=False).logits[:, : tokens.shape[1]]


class HuggingFaceAdapter(StateDictAdapter):
    """Converts to names of transformers, as in files of Hugging Face, and back; without LoRA's
    factors and tied parameters, which no file of a whole model has."""

    def __init__(self, model_args: ModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)  # TorchTitan reads an index there, for saving alone
        self.hf_assets_path = hf_assets_path or None
        self.tied = model_args.tied()

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        """Return what reads a folder's weights."""
        return reader_of(path)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to Hugging Face's names."""
        kept = without_adapters(state_dict, *self.tied)
        return {name.removeprefix(PREFIX): value for name, value in kept.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from Hugging Face's; a tied parameter is the other's tensor."""
        found = {PREFIX + name: value for name, value in hf_state_dict.items()}
        return found | {one: found[same] for one, same in self.tied.items() if same in found}


def build(args: ModelArgs, kind: str) -> Any:
    """Build a configuration's model with this kind of attention (`NAME`: ours), without caches and
    losses of routers. ValueError, one line: transformers builds none, or it mixes samples."""
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention.band)
    config = args.config()
    config.use_cache = config.output_router_logits = config.output_hidden_states = False
    config.return_dict = True
    how: dict[str, Any] = {"attn_implementation": kind, "dtype": torch.float32}
    if kind != NAME:
        how["experts_implementation"] = kind
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
                f"config.json: {path} ({type(module).__name__}) mixes samples or tokens; use "
                "another model"
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


@contextlib.contextmanager
def _buffers_computed() -> Iterator[None]:
    """On the meta device, build modules whose buffers have values, and parameters none."""
    if torch.get_default_device().type != "meta":
        yield
        return
    assign = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        assign(module, name, parameter)

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
    return type(model).forward(_Head(model, raw_NV), input_ids=None, use_cache=False).logits[0]
