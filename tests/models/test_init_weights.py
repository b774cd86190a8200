"""Initial weights are those of a parameter's name and seed alone, and a tied weight stays one."""

import torch

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from tests import build
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import flavor, on_meta


def test_weights_are_those_of_one_draw_after_the_other():
    model = CausalLM(flavor("debug"))
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, model._drawn(name, parameter.shape)), name
    assert model.layers[0].self_attn.q_proj.weight.requires_grad


def test_a_tied_weight_stays_one_when_memory_is_given_to_it():
    """As TorchTitan's trainer does without FSDP2: `to_empty` makes two of one."""
    model = on_meta(build.llama(tie_word_embeddings=True))
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.output.weight is model.tok_embeddings.weight
    names = [name for name, _ in model.named_parameters()]
    assert sum("embed" in name or "lm_head" in name for name in names) == 1
