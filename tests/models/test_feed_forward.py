"""Blocks with a feed-forward in tiles equal plain ones, and never hold its hidden activations."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from scripts.benchmarking.counting import Counts
from tests import build
from tests.build import ARGS
from torchtitan_dp.config.derived import FEED_FORWARD_CHUNK, feed_forward_chunk
from torchtitan_dp.models.causal_lm.formulas import use_lean_norms
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.feed_forward import Tiling
from torchtitan_dp.models.lora import fill_adapters

FULL, LONG = "--activation_checkpoint.mode=full", "--training.seq_len=65536"
PLAIN, TWO = "--privacy.no-enable", "--training.local_batch_size=2"
TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj", "up_proj")


def two_models(args, chunk):
    """A model and its copy with tiles."""
    torch.manual_seed(0)
    plain = CausalLM(copy.deepcopy(args))
    plain.init_weights()
    fill_adapters(plain, std=0.5)
    use_lean_norms(plain)
    tiled = copy.deepcopy(plain)
    tiled.use_tiles(Tiling(chunk))
    return plain, tiled


def run(model, tokens, labels, recompute=False):
    """The loss, and gradients by name."""
    if recompute:
        for block in model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    loss = model(tokens, labels=labels, targets=(labels >= 0).sum(1)).sum()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def data(args, tokens=32):
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, args.vocab_size, (1, tokens), generator=generator) for _ in range(2))


def with_lora(args, targets=TARGETS):
    args = copy.deepcopy(args)
    args.lora = LoRA(rank=3, alpha=6.0, targets=targets)
    return args


MODELS = {
    "all weights": ARGS,
    "LoRA everywhere": with_lora(ARGS),
    "LoRA on attention": with_lora(ARGS, ("q_proj", "v_proj")),
    "LoRA on down_proj": with_lora(ARGS, ("down_proj",)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 32, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_plain_ones(name, chunk, recompute):
    args = MODELS[name]
    plain, tiled = two_models(args, chunk)
    tokens, labels = data(args)
    expected_loss, expected = run(plain, tokens, labels)
    loss, actual = run(tiled, tokens, labels, recompute)
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for parameter, gradient in expected.items():
        assert (actual[parameter] - gradient).norm() <= 2e-6 * gradient.norm(), parameter


def test_samples_are_never_merged():
    _, tiled = two_models(ARGS, 5)
    tokens, labels = (x.expand(2, -1) for x in data(ARGS))
    with pytest.raises(AssertionError, match="merged"):
        run(tiled, tokens, labels)
    with torch.no_grad():  # held-out losses of several
        tiled(tokens, labels=labels)


@pytest.mark.parametrize("name", ["all weights", "LoRA everywhere"])
def test_no_product_is_computed_more_often_than_with_full_recomputation(name):
    """Early stop spares the second computation of the output, and of down_proj's product in it."""
    args = dataclasses.replace(MODELS[name], n_kv_heads=4)  # torch 2.11 counts no shared keys
    flops = []
    for model in two_models(args, 5):
        with Counts() as counts:
            run(model, *data(args), recompute=True)
        flops.append(sum(counts.flops.values()))
    plain, tiled = flops
    assert tiled <= 1.001 * plain


def test_the_hidden_activations_are_never_all_there():
    """No tensor of hidden width has more tokens than a tile."""
    _, tiled = two_models(ARGS, 5)
    hidden = tiled.layers[0].mlp.gate_proj.weight.shape[0]
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] == hidden:
                    seen.add(value.numel() // hidden)
            return result

    with Watch():
        run(tiled, *data(ARGS))
    assert 5 in seen
    assert {rows for rows in seen if rows > 5} <= {ARGS.dim}  # the gradient of down_proj


@pytest.mark.parametrize(
    ("overrides", "chunk"),
    [
        ([FULL, LONG], FEED_FORWARD_CHUNK),
        ([FULL, f"--training.seq_len={FEED_FORWARD_CHUNK}"], 0),
        ([LONG], 0),
        ([FULL, LONG, "--training.feed_forward_chunk=0"], 0),
        ([FULL, LONG, TWO], 0),
        ([FULL, LONG, PLAIN], FEED_FORWARD_CHUNK),
        ([FULL, LONG, PLAIN, TWO], 0),
        (["--training.feed_forward_chunk=7"], 7),
    ],
)
def test_where_tiles_are_used(overrides, chunk):
    assert feed_forward_chunk(build.config(*overrides)) == chunk
