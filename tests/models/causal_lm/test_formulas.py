"""Modules of transformers are taken for ours by what they compute, and by nothing else."""

import pytest
import torch
import torch.nn as nn

from tests.models.causal_lm.families import arguments
from torchtitan_dp.models.causal_lm.formulas import (
    apply_partial_rotary,
    apply_rotary,
    gated_feed_forwards,
    use_our_norms,
    use_our_rotation,
)
from torchtitan_dp.models.causal_lm.transformers_private import rotation_of
from torchtitan_dp.models.flavors import on_meta
from torchtitan_dp.models.rms_norm import OffsetRMSNorm


def kinds(model):
    return {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}


@pytest.mark.parametrize(
    "name, norms, gated, rotates",
    [
        ("mistral", {"RMSNorm"}, 2, apply_rotary),
        ("gemma3", {"OffsetRMSNorm"}, 3, apply_rotary),
        ("phi3", {"RMSNorm"}, 0, apply_partial_rotary),  # one layer for both gates
        ("cohere2", {"Cohere2LayerNorm"}, 2, None),  # it turns neighbours
        ("mixtral", {"RMSNorm"}, 0, apply_rotary),
        ("gpt_oss", {"RMSNorm"}, 0, None),  # its cosines are of half a head
    ],
)
def test_of_a_family(name, norms, gated, rotates):
    model = on_meta(arguments(name))
    assert kinds(model) == norms
    assert len(model.gated) == gated
    assert rotation_of(type(model.layers[0].self_attn)) is rotates or not rotates


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-3

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class OfTheRoot(Norm):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Squared(Norm):
    def forward(self, x):
        return self.weight * super().forward(x)


class WithMore(Norm):
    def forward(self, x, residual):
        return super().forward(x) + residual


class Gemmas(Norm):
    def forward(self, x):
        return super().forward(x) / self.weight * (1 + self.weight)


@pytest.mark.parametrize(
    "kind, ours",
    [(Norm, nn.RMSNorm), (Gemmas, OffsetRMSNorm)]
    + [(kind, kind) for kind in (OfTheRoot, Centred, Squared, WithMore)],
)
def test_norms(kind, ours):
    model = nn.Sequential(kind())
    weight, x = model[0].weight, torch.randn(3, 4)
    nn.init.normal_(weight)
    expected = None if kind is WithMore else model(x)
    use_our_norms(model)
    assert type(model[0]) is ours
    assert model[0].weight is weight
    if expected is not None:
        torch.testing.assert_close(model(x), expected)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.down_proj = nn.Linear(6, 4, bias=False)
        self.act_fn = nn.GELU("tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Biased(Gated):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Linear(6, 4)


class Scaled(Gated):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [Gated, Swapped, Biased, Scaled])
def test_feed_forwards(kind):
    model = nn.Sequential(kind())
    assert gated_feed_forwards(model) == [model[0]] * (kind is Gated)


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """As transformers' of Llama; of Phi-3, where cosines are shorter than a head."""
    size, done = cos.shape[-1], []
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    for x in (q, k):
        turned = (x[..., :size] * cos + halves(x[..., :size]) * sin).to(x.dtype)
        done.append(torch.cat([turned, x[..., size:]], -1))
    return tuple(done)


def of_neighbours(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(y.unflatten(-1, (2, -1)).mT.flatten(-2) for y in apply_rotary(q, k, cos, sin))


def scaled_first_half(q, k, cos, sin, unsqueeze_dim=1):
    """The same where whole heads are turned."""
    q, k = apply_rotary(q, k, cos, sin)
    return q * (q.shape[-1] / cos.shape[-1]), k


def of_whole_heads(q, k, cos, sin, unsqueeze_dim=1):
    """As transformers' of Llama, which fails where cosines are shorter than a head."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def of_heads_first(q, k, cos, sin, unsqueeze_dim=1):
    return of_whole_heads(q, k, cos, sin)


def positions_first(q, k, sin, cos, unsqueeze_dim=1):
    return apply_rotary(q, k, cos, sin)


class Attention(nn.Module):
    def forward(self, x, cos, sin, *, dim=1):
        return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=dim)[0]


class Derived(Attention):
    def forward(self, x, cos, sin, *, dim=1):
        super().__init__()  # a cell of the function
        return apply_rotary_pos_emb(x, x + x, cos, sin, dim)[1]


@pytest.mark.parametrize("kind", [Attention, Derived])
@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("dim, x", [(1, (2, 4, 3, 8)), (2, (2, 3, 4, 8))])
def test_rotation(kind, size, dim, x):
    """Results and gradients are those of the same formula; the class of other models stays."""
    model, of_them = nn.Sequential(kind()), kind()
    use_our_rotation(model)
    assert rotation_of(type(model[0])) is apply_partial_rotary
    assert isinstance(model[0], kind)
    assert rotation_of(kind) is apply_rotary_pos_emb
    x = torch.randn(x, dtype=torch.double, requires_grad=True)
    cos, sin = torch.randn(2, 2, 3, size).double()
    found, expected = (one(x, cos, sin, dim=dim) for one in (model[0], of_them))
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    gradients = (torch.autograd.grad(y, x, grad)[0] for y in (found, expected))
    torch.testing.assert_close(*gradients)


def test_rotation_by_wider_cosines():
    """Some families have cosines of fp32 in a model of bf16."""
    q, k = torch.randn(2, 2, 4, 3, 8, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 2, 3, 8)
    for found, expected in zip(
        apply_rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)


def test_a_rotation_that_fails_still_fails(monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", of_whole_heads)
    model = nn.Sequential(Attention())
    use_our_rotation(model)
    assert rotation_of(type(model[0])) is apply_rotary
    cos, sin = torch.randn(2, 1, 3, 6)
    with pytest.raises(RuntimeError):
        model[0](torch.randn(1, 4, 3, 8), cos, sin)


def test_compiled_it_is_the_formula():
    x, cos, sin = torch.randn(2, 4, 3, 8), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    compiled = torch.compile(apply_partial_rotary, backend="eager", fullgraph=True)
    for found, expected in zip(
        compiled(x, x, cos, sin), apply_partial_rotary(x, x, cos, sin), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "other", [of_neighbours, scaled_first_half, positions_first, of_heads_first]
)
def test_other_rotations(monkeypatch, other):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other)
    model = nn.Sequential(Attention())
    use_our_rotation(model)
    assert type(model[0]) is Attention
