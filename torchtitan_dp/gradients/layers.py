"""Layers whose backward forms per-sample gradients only.

`per_sample_layers` replaces every trainable layer's forward by an `autograd.Function`. Its tensors
for backward are in `save_for_backward`, so that activation checkpointing frees and recomputes them
(LongShield, section 3.3). The weight's ordinary gradient, a sum over samples, is never computed.

Guarantee:
    Row b of a gradient that a layer passes to its sink depends only on row b of its input and of
    its output's gradient. A layer without a rule of its own sees one sample at a time.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_dp.base.collectives import Pending
from torchtitan_dp.base.torch_private import NormOverSamples, sparse_rows, with_parameters
from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod
from torchtitan_dp.gradients.operands import TRANSIENT_BYTES, Existing, Products, Rows, Write


class Formed(NamedTuple):
    """One layer's per-sample gradients of a parameter, whose sum over cp may be running."""

    batch_size: int
    shard: Pending | None  # (B, dp_shard, rows, …), summed over cp
    whole: Tensor | None = None  # (cp, B, dp_shard, rows, …), not yet summed


class LayerGradients(GradientMethod):
    """The receiver of all layers' per-sample gradients, from within backward, in a bundle for each
    parameter: what the methods of several samples share."""

    def __init__(self, model: nn.Module, clipped_sum: ClippedSum) -> None:
        """Take a model that `per_sample_layers` has converted and FSDP2 has sharded since."""
        self.clipped_sum = clipped_sum
        self._cp = clipped_sum.groups.cp
        self._transient_bytes = TRANSIENT_BYTES
        missing = set(clipped_sum.parameters) - connect(model, self)
        assert not missing, f"trainable, but in no per-sample layer: {sorted(missing)}"
        self._device = next(iter(clipped_sum.parameters.values())).device
        self._layouts = clipped_sum.lay_out_parameters()

    def form_grad_samples(self, name: str, batch_size: int, write: Write) -> None:
        """Add what `write` will write to the gradients of the parameter `name`."""
        raise NotImplementedError

    def keeps_outputs(self, name: str, tokens: int) -> bool:
        """Return whether the loss head should pass its logits' gradients, of `tokens` tokens a
        sample, to `form_grad_samples`; otherwise it forms its weight's gradients in chunks."""
        return False

    def form(self, name: str, batch_size: int, write: Write) -> Formed:
        """Write gradients of the parameter `name`, before or within backward."""
        raise NotImplementedError

    def add(self, name: str, formed: Formed, factor_B: Tensor | None = None) -> None:
        """Add formed gradients, within backward, each sample multiplied by its factor."""
        raise NotImplementedError

    def _slices_of(self, name: str, samples: int) -> list[slice]:
        """Cut a microbatch into slices of samples whose gradients are formed at once."""
        fits = 4 * self._layouts[name].shape.numel() * samples <= self._transient_bytes
        at_once = max(samples, 1) if fits else 1
        return [slice(start, start + at_once) for start in range(0, samples, at_once)]

    def _require_no_sum(self) -> None:
        """Assert that no ordinary gradient, a sum over samples, was formed."""
        for name, parameter in self.clipped_sum.parameters.items():
            assert parameter.grad is None, f"{name} had a gradient that mixes samples"


class PerSampleLayer(nn.Module):
    """The class that `per_sample_layers` mixes into a layer's own."""

    sink: LayerGradients
    rule_type: type[nn.Module]  # the layer's own class, by which its per-sample rule is found
    parameter_names: dict[str, str]  # attribute -> canonical name; a tied weight has one

    def forward(self, *inputs: Tensor, **terms: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.plain_forward(*inputs, **terms)
        rule = _RULES.get(self.rule_type)
        if terms or (rule is None and len(inputs) != 1):
            raise ValueError(
                f"{type(self).__name__} takes more than one tensor, so that it has no per-sample "
                "gradients; set privacy.gradient_method = 'microbatch'"
            )
        parameters = [getattr(self, attribute) for attribute in self.parameter_names]
        return cast(Tensor, (rule or _OneAtATime.apply)(self, *inputs, *parameters))

    def form(self, attribute: str, batch_size: int, write: Write) -> None:
        """Hand the gradients of a parameter to the sink."""
        self.sink.form_grad_samples(self.parameter_names[attribute], batch_size, write)

    def plain_forward(self, *inputs: Tensor, **terms: Any) -> Tensor:
        return cast(Tensor, self.rule_type.forward(self, *inputs, **terms))


def per_sample_layers(model: nn.Module) -> None:
    """Convert every layer of `model` that has trainable parameters of its own, in place, before
    activation checkpointing and FSDP2. As by `fully_shard`, names, parameters and `isinstance`
    stay.

    Raises:
        ValueError: parameters are beside layers, in a module that has others: who uses them is not
            known.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, layer in list(model.named_modules()):
        own = dict(layer.named_parameters(recurse=False))
        if not any(parameter.requires_grad for parameter in own.values()):
            continue
        kind = type(layer)
        assert not isinstance(layer, NormOverSamples), f"{path} mixes samples"  # refused before
        if kind not in _RULES and any(True for _ in layer.children()):
            raise ValueError(
                f"{path} ({kind.__name__}): no per-sample gradients of {', '.join(own)}, of no "
                "layer; freeze them, or set privacy.gradient_method = 'microbatch'"
            )
        if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm):
            raise ValueError(f"{path}: scale_grad_by_freq and max_norm mix samples; unset them")
        converted: Any = layer
        converted.__class__ = type(f"PerSample{kind.__name__}", (PerSampleLayer, kind), {})
        converted.rule_type = kind
        converted.parameter_names = {attribute: names[id(p)] for attribute, p in own.items()}


def register_per_sample(kind: type[nn.Module], function: Callable[..., Any]) -> None:
    """Register a function for a layer type: it takes (layer, *inputs of forward, *the layer's own
    parameters), and its backward hands each trainable parameter's gradients to `layer.sink`."""
    _RULES[kind] = function


def connect(model: nn.Module, sink: LayerGradients) -> set[str]:
    """Send the layers' gradients to `sink`, and return the names of their parameters."""
    for layer in model.modules():
        if isinstance(layer, PerSampleLayer):
            layer.sink = sink
    return set(layers_of_each_parameter(model))


def layers_of_each_parameter(model: nn.Module) -> Counter[str]:
    """Count the layers of each parameter, by canonical name: a tied weight has several."""
    layers = [layer for layer in model.modules() if isinstance(layer, PerSampleLayer)]
    return Counter(name for layer in layers for name in layer.parameter_names.values())


class _Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: PerSampleLayer, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _, x_needed, weight_needed, *bias_needed = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        # First, since it may run beside the reduce-scatter that the layer above has started.
        grad_x = grad_y @ weight if x_needed else None
        x_BTD, grad_y_BTP = _with_one_token_dim(x), _with_one_token_dim(grad_y)
        if weight_needed:
            ctx.layer.form("weight", len(x), Products(grad_y_BTP, x_BTD))
        if bias_needed and bias_needed[0]:
            ctx.layer.form("bias", len(x), Existing(grad_y_BTP.sum(1)))
        return None, grad_x, None, *(None for _ in bias_needed)


class _OwnForward(torch.autograd.Function):
    """The layer's own forward; its input is saved. For backward FSDP2 gathers parameters again."""

    @staticmethod
    def forward(ctx: Any, layer: PerSampleLayer, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.plain_forward(x)


class _Embedding(_OwnForward):
    """y = W[tokens]."""

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        tokens_BT = tokens.reshape(len(tokens), -1)
        grad_y_BTD = grad_y.reshape(*tokens_BT.shape, grad_y.shape[-1])
        ctx.layer.form("weight", len(tokens), _rows(ctx.layer, tokens_BT, grad_y_BTD))
        return None, None, None


def _rows(layer: Any, tokens_BT: Tensor, grad_BTD: Tensor) -> Rows:
    """Return an embedding's gradients, of which its padding has none."""
    if layer.padding_idx is not None:
        grad_BTD = grad_BTD.masked_fill((tokens_BT == layer.padding_idx)[..., None], 0)
    return Rows(tokens_BT, grad_BTD)


class _OneAtATime(torch.autograd.Function):
    """Any other layer of one tensor in, one out: its own forward on each sample apart."""

    @staticmethod
    def forward(ctx: Any, layer: PerSampleLayer, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x)
        return torch.cat([layer.plain_forward(one) for one in x.split(1)])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        layer: PerSampleLayer = ctx.layer
        (x,) = ctx.saved_tensors
        _, x_needed, *parameters_needed = ctx.needs_input_grad
        plain = with_parameters(  # which are leaves of another graph
            layer,
            layer.rule_type,
            lambda _, p: None if p is None else nn.Parameter(p.detach(), p.requires_grad),
        )
        if isinstance(plain, nn.Embedding):  # its gradient is rows, in the order of the tokens
            plain.sparse, plain.padding_idx = True, None
        own = plain.named_parameters(recurse=False, remove_duplicate=False)
        trained = {name: p for name, p in own if p.requires_grad}
        of_samples = []
        for x_1, grad_1 in zip(x.split(1), grad_y.split(1), strict=True):
            with torch.enable_grad():
                again = x_1.detach().requires_grad_(x_needed)
                y = layer.rule_type.forward(plain, again)
            inputs = ([again] if x_needed else []) + list(trained.values())
            of_samples.append(torch.autograd.grad(y, inputs, grad_1))
        by_input = list(zip(*of_samples, strict=True))
        grad_x = torch.cat(by_input.pop(0)) if x_needed else None
        for attribute, found in zip(trained, by_input, strict=True):
            if found[0].is_sparse:
                tokens, rows = zip(*map(sparse_rows, found), strict=True)
                write: Write = _rows(layer, torch.stack(tokens), torch.stack(rows))
            else:
                write = Existing(torch.stack([one.float() for one in found]))
            layer.form(attribute, len(x), write)
        return None, grad_x, *(None for _ in parameters_needed)


class _RMSNorm(_OwnForward, _OneAtATime):
    """y = x / rms(x) * w, whose fused kernel would sum the weight's gradient over all samples."""


_RULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _Linear.apply,
    nn.Embedding: _Embedding.apply,
    nn.RMSNorm: _RMSNorm.apply,
}


def _with_one_token_dim(x: Tensor) -> Tensor:
    """Reshape (B, …, D) to (B, T, D), where T is 1 if there is no dimension between."""
    return x.reshape(len(x), -1, x.shape[-1])
