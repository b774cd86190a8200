"""Row 79: a loss or gradient of one unit that depends on the units beside it in a call."""

import pytest
import torch
import torch.nn as nn

from tests import build
from tests.models.causal_lm.families import EXPERTS, FAMILIES, TRANSFORMERS, arguments
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import on_meta
from torchtitan_dp.train.check import check_forward, is_moved_by_others

# isort: split
from types import SimpleNamespace

import numpy as np

from torchtitan_dp.data.batching import Microbatch
from torchtitan_dp.train import validate

EXPERT = "qwen3_moe"
UNITS = 6


def published(name: str, seed: int) -> tuple[list[float], set[int]]:
    """Each unit's loss, all but the first of another content, and how many samples calls had."""
    args = arguments(name)
    terms = (*TRANSFORMERS, "--training.local_batch_size=3", "--training.seq_len=64")
    model, config = on_meta(args), build.config(*terms)
    model.to_empty(device="cpu")
    model.init_weights()
    sizes, losses = set(), []
    forward = model.forward
    model.forward = lambda tokens, **rest: sizes.add(len(tokens)) or forward(tokens, **rest)
    generator = torch.Generator().manual_seed(seed)
    ids_NT = torch.randint(0, args.vocab_size, (UNITS, 65), generator=generator)
    ids_NT[0] = torch.arange(65)

    class Feed:
        def __init__(self, *_):
            pass

        def microbatches(self, _):
            for at in torch.arange(UNITS).split(3):
                both = ids_NT[at, :-1], ids_NT[at, 1:]
                yield Microbatch(*both, torch.ones(3, dtype=torch.bool), at)

    loader = SimpleNamespace(ranks=1, batch_size=3, units=np.arange(UNITS))
    config.validation.steps = -1
    dims = build.mesh("cpu", (1, 1, 1))[0]
    sink = SimpleNamespace(logger=SimpleNamespace(log=lambda *_: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "Feed", Feed)
        losses.extend(validate.HeldOutValidator(loader, config, dims, sink).losses([model]))
    return losses, sizes


@pytest.mark.parametrize("name", ["llama", EXPERT])
def test_row79_a_published_loss_comes_from_a_call_with_its_unit_alone(name):
    (one, sizes), (other, _) = (on_ranks(1, published, name, seed)[0] for seed in (1, 2))
    assert sizes == {1}
    assert one[0] == other[0]  # bit by bit
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.parametrize("targets", [None, torch.ones(2, dtype=torch.int64)])
def test_row79_experts_refuse_losses_of_several_samples(targets):
    with torch.device("cpu"), torch.no_grad():
        model = CausalLM(arguments(EXPERT))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        with pytest.raises(AssertionError, match=r"samples would meet in layers\.0\.mlp\.experts"):
            model(tokens, labels=tokens, targets=targets)
        model(tokens, labels=tokens, targets=torch.tensor(1))  # one loss, without privacy


def test_row79_what_a_small_model_shows_is_what_modules_say():
    """Of each family; the names of keys in config.json are not asked."""
    for name in FAMILIES:
        args = arguments(name)
        small = args.with_heads(4, 2, n_layers=2, vocab_size=64, max_seq_len=16)
        with torch.device("cpu"):
            moved = is_moved_by_others(CausalLM(small))
        meeting = on_meta(args).meeting
        assert moved == (meeting is not None) == (name in EXPERTS or "moe" in name), name


class Sorting(nn.Module):
    """Takes the tokens of all samples, in an order that they decide together."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x_BTD):
        x_ND = x_BTD.flatten(0, 1)
        order = x_ND.sum(1).argsort()
        return self.own(x_ND[order])[order.argsort()].view_as(x_BTD)


def test_row79_a_module_that_no_rule_knows_is_found_by_a_small_model(monkeypatch):
    own = CausalLM.__init__

    def sorting(model, args):
        own(model, args)
        model.layers[0].mlp = Sorting(model.layers[0].mlp)

    check_forward(build.llama(), samples=2)
    monkeypatch.setattr(CausalLM, "__init__", sorting)
    check_forward(build.llama(), samples=1)
    with pytest.raises(ValueError, match=r"^training.local_batch_size = 2: .*beside it; set it"):
        check_forward(build.llama(), samples=2)
