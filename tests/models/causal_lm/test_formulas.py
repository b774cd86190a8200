"""Modules of transformers are taken for ours by what they compute, and by nothing else."""

import pytest
import torch
import torch.nn as nn

from tests.models.causal_lm.families import arguments
from torchtitan_dp.models.causal_lm.formulas import (
    OffsetRMSNorm,
    gated_feed_forwards,
    use_our_norms,
)
from torchtitan_dp.models.hugging_face import on_meta


def kinds(model):
    return {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}


@pytest.mark.parametrize(
    "name, norms, gated",
    [
        ("mistral", {"RMSNorm"}, 2),
        ("gemma3", {"OffsetRMSNorm"}, 3),
        ("phi3", {"RMSNorm"}, 0),  # one layer for both gates
        ("cohere2", {"Cohere2LayerNorm"}, 2),
        ("mixtral", {"RMSNorm"}, 0),
        ("gpt_oss", {"RMSNorm"}, 0),
    ],
)
def test_of_a_family(name, norms, gated):
    model = on_meta(arguments(name))
    assert kinds(model) == norms
    assert len(model.gated) == gated


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
