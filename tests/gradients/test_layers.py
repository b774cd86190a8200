"""`per_sample_layers` on small modules equals a loop of single samples; in one process, where a
sink lays gradients out as a mesh would, and reads them by FSDP2's definition of who owns a row."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients.fsdp import RowLayout
from torchtitan_dp.gradients.layers import connect, per_sample_layers

B = 4
MESHES = [(1, 1), (1, 2), (2, 2), (3, 2)]  # (dp_shard, cp)


class Collected:
    """A sink that keeps `(B, *shape)` by name, formed in slices of `at_once` samples."""

    def __init__(self, model, mesh=(1, 1), at_once=B):
        self.layouts = {n: RowLayout(p.shape, *mesh) for n, p in model.named_parameters()}
        self.at_once = at_once
        self.gradients = {}
        assert connect(model, self) >= {n for n, p in model.named_parameters() if p.requires_grad}

    def form_grad_samples(self, name, batch_size, write):
        layout = self.layouts[name]
        parts = []
        for start in range(0, batch_size, self.at_once):
            samples = slice(start, min(start + self.at_once, batch_size))
            whole = layout.allocate(samples.stop - start, torch.device("cpu"))
            write(layout, whole, samples)
            by_fsdp_rank = whole.permute(1, 2, 0, *range(3, whole.ndim))  # (b, dp_shard, cp, …)
            padded = by_fsdp_rank.flatten(1, 3)
            assert not padded[:, layout.shape[0] :].any(), "the padding is not zero"
            parts.append(padded[:, : layout.shape[0]])
        self.gradients[name] = self.gradients.get(name, 0) + torch.cat(parts)


class Scale(nn.Module):
    """A layer of the user's."""

    def __init__(self, size):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return x * self.factor.tanh()


class ScaledEmbedding(nn.Embedding):
    """As Gemma's, and with places that are not the tokens'."""

    def forward(self, tokens):
        return 3 * super().forward((tokens + 1) % 7)


class Mixing(nn.Linear):
    """A layer whose output would depend on all samples."""

    def forward(self, x):
        return super().forward(x) - x.mean()


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def frozen(layer, attribute):
    getattr(layer, attribute).requires_grad_(False)
    return layer


def tokens(*shape):
    drawn = torch.randint(0, 7, shape)
    drawn[1] = 3  # one token all over a sample
    return drawn


CASES = {
    "linear": lambda: (nn.Linear(4, 5), torch.randn(B, 6, 4)),
    "linear without bias": lambda: (nn.Linear(4, 5, bias=False), torch.randn(B, 6, 4)),
    "linear, rows that a mesh divides": lambda: (nn.Linear(4, 12), torch.randn(B, 6, 4)),
    "linear, 2-D": lambda: (nn.Linear(4, 5), torch.randn(B, 4)),
    "linear, 4-D": lambda: (nn.Linear(4, 5), torch.randn(B, 2, 3, 4)),
    "linear, strided": lambda: (nn.Linear(4, 5), torch.randn(6, B, 4).transpose(0, 1)),
    "frozen bias": lambda: (frozen(nn.Linear(4, 5), "bias"), torch.randn(B, 6, 4)),
    "frozen weight": lambda: (frozen(nn.Linear(4, 5), "weight"), torch.randn(B, 6, 4)),
    "embedding": lambda: (nn.Embedding(7, 4), tokens(B, 6)),
    "embedding, 2-D": lambda: (nn.Embedding(7, 4), tokens(B, 3, 2)),
    "RMSNorm": lambda: (nn.RMSNorm(4), torch.randn(B, 6, 4)),
    "LayerNorm": lambda: (nn.LayerNorm(4), torch.randn(B, 6, 4)),
    "embedding, one token": lambda: (nn.Embedding(7, 4), tokens(B)),
    "LayerNorm, frozen bias": lambda: (frozen(nn.LayerNorm(4), "bias"), torch.randn(B, 6, 4)),
    "Conv1d": lambda: (nn.Conv1d(4, 5, 2), torch.randn(B, 4, 6)),
    "any layer": lambda: (Scale(4), torch.randn(B, 6, 4)),
    "any layer that would mix samples": lambda: (Mixing(4, 5), torch.randn(B, 6, 4)),
    "embedding of its own kind": lambda: (ScaledEmbedding(7, 4), tokens(B, 6)),
    "embedding of its own kind, one token": lambda: (ScaledEmbedding(7, 4), tokens(B)),
    "used twice": lambda: (Twice(nn.Linear(4, 4)), torch.randn(B, 6, 4)),
    "norm used twice": lambda: (Twice(nn.RMSNorm(4)), torch.randn(B, 6, 4)),
    "tied": lambda: (Tied(), tokens(B, 6)),
    "deep": lambda: (
        nn.Sequential(nn.Embedding(7, 4), nn.RMSNorm(4), Scale(4), nn.GELU(), nn.Linear(4, 5)),
        tokens(B, 6),
    ),
}


def loss(model, x):
    return model(x).sin().sum()


def loop(model, x):
    """`(B, *shape)` by name, of the trained parameters; each sample has its own backward."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    samples = [
        torch.autograd.grad(loss(model, x[i : i + 1]), list(trained.values()))
        for i in range(len(x))
    ]
    return {n: torch.stack(g) for n, g in zip(trained, zip(*samples, strict=True), strict=True)}


def assert_equals_the_loop(model, x, *layout):
    expected = loop(model, x)
    per_sample_layers(model)
    sink = Collected(model, *layout)
    loss(model, x).backward()
    assert sink.gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(sink.gradients[name], expected[name], rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("at_once", [1, 2, B])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_of_single_samples(name, mesh, at_once):
    torch.manual_seed(0)
    layer, x = CASES[name]()
    model = nn.Sequential(layer)
    for parameter in model.parameters():  # RMSNorm's ones would hide a missing weight
        nn.init.normal_(parameter)
    assert_equals_the_loop(model, x, mesh, at_once)


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
def test_padding_idx_has_no_gradient(kind):
    assert_equals_the_loop(nn.Sequential(kind(7, 4, padding_idx=3)), tokens(B, 6))


class Beside(nn.Module):
    """A parameter beside layers, which some code elsewhere may use."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "layer, said",
    [
        (Beside(), r"strange \(Beside\): no per-sample gradients of factor"),
        (nn.BatchNorm1d(3), "strange mixes samples"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "strange: .* max_norm mix samples"),
        (nn.Embedding(7, 4, max_norm=1.0), "strange: .* max_norm mix samples"),
    ],
)
def test_layers_without_per_sample_gradients_are_refused_by_name(layer, said):
    model = nn.ModuleDict({"strange": layer})
    with pytest.raises((ValueError, AssertionError), match=said):
        per_sample_layers(model)
    per_sample_layers(model.requires_grad_(False))


def test_a_layer_that_is_called_otherwise_is_refused():
    model = nn.Sequential(nn.Bilinear(2, 2, 2), nn.Linear(2, 2))
    per_sample_layers(model)
    x = torch.ones(B, 2)
    for call in (lambda: model[0](x, x), lambda: model[1](input=x)):
        with pytest.raises(ValueError, match=r"takes more than one tensor.*'microbatch'"):
            call()


def parameter_used_outside_its_layer(degrees):
    args = copy.deepcopy(build.ARGS)
    args.tie_embeddings = True
    method = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
    built = build.build(degrees, *method, "--training.loss_chunk_tokens=0", args=args)
    output = built.model.output
    output.forward = lambda x: F.linear(x, output.weight)  # the tied weight, past its layer
    loss_B = built.losses(*build.data(samples=2))
    with pytest.raises(AssertionError, match=r"embed_tokens\.weight had a gradient that mixes"):
        built.gradients.accumulate_clipped(loss_B, torch.tensor([True, True]))


def samples_merged_with_tokens(degrees):
    method = ("--privacy.gradient_method=grad_sample", "--training.local_batch_size=2")
    built = build.build(degrees, *method)
    layer = built.model.layers[0].mlp.down_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x.flatten(0, 1)).view(*x.shape[:2], -1)
    loss_B = built.losses(*build.data(samples=2))
    with pytest.raises(AssertionError, match=r"down_proj\.weight: dim 0 of its layer's inp"):
        built.gradients.accumulate_clipped(loss_B, torch.tensor([True, True]))


def test_a_layer_that_does_not_see_samples_in_dim_0_is_caught():
    on_ranks(1, samples_merged_with_tokens, (1, 1, 1))


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_a_parameter_used_outside_its_layer_is_caught(degrees):
    on_ranks(degrees[2], parameter_used_outside_its_layer, degrees)


# RowLayout.


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4)], ids=str)
def test_chunks_and_positions_agree_with_fsdp(rows, mesh):
    """Rows that the mesh does not divide, and fewer rows than ranks."""
    layout = RowLayout(torch.Size((rows, 2)), *mesh)
    whole = layout.allocate(B, torch.device("cpu"))
    numbered = torch.arange(1.0, B * rows * 2 + 1).view(B, rows, 2)
    for range_, place in layout.chunks(whole):
        place.copy_(numbered[:, range_])
    # FSDP2 cuts as torch.chunk does.
    for fsdp_rank, mine in enumerate(numbered.split(layout.rows, dim=1)):
        dp_shard_rank, cp_rank = divmod(fsdp_rank, mesh[1])
        assert torch.equal(whole[cp_rank, :, dp_shard_rank, : mine.shape[1]], mine)
        assert torch.equal(mine, numbered.chunk(mesh[0] * mesh[1], dim=1)[fsdp_rank])
    assert whole.count_nonzero() == numbered.numel()  # padding is zero, no row is twice
    position_BT = layout.positions(torch.arange(rows).expand(B, rows))
    assert torch.equal(whole.view(-1, 2)[position_BT], numbered)
    assert whole[0, 0].numel() == layout.chunk_numel * mesh[0]
