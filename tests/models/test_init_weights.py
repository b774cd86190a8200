"""Initial weights are drawn in threads: the same values, and few of them in memory at once."""

import dataclasses
import functools
import threading

import pytest
import torch

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torchtitan_dp.models.families import family_of, on_meta
from torchtitan_dp.models.llama3.model import FLAVORS
from torchtitan_dp.models.parameters import in_threads


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_yield_in_order_and_hold_few(threads):
    lock, alive, most = threading.Lock(), 0, 0

    def draw(number):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return torch.tensor(number)

    found = []
    for value in in_threads([functools.partial(draw, n) for n in range(20)], threads):
        found.append(int(value))
        with lock:
            alive -= 1
    assert found == list(range(20))
    assert most <= threads + 1


def test_weights_are_those_of_one_draw_after_the_other(monkeypatch):
    args = FLAVORS["debug"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    model = family_of(args).model(args)
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, model._drawn(name, parameter.shape)), name
    assert model.layers["0"].attention.wq.weight.requires_grad


def test_a_tied_weight_stays_one_when_memory_is_given_to_it():
    """As TorchTitan's trainer does without FSDP2: `to_empty` makes two of one."""
    model = on_meta(dataclasses.replace(FLAVORS["debug"], tie_embeddings=True))
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(name.startswith(("tok_", "output")) for name, _ in model.named_parameters()) == 1
