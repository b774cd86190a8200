"""Adapters: how they begin, what is frozen, what of a mesh or a mistake; hazard row 56."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests import build
from tests.models.hugging_face import PLAIN, ours, sample_tokens, transformers_logits, write_llama
from tests.processes import forks
from tests.processes.ranks import on_ranks
from tests.processes.runs import CONFIG
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.hugging_face_weights import write_folder
from torchtitan_dp.models.lora import fill_adapters, is_adapter
from torchtitan_dp.models.parallelize import parallelize
from torchtitan_dp.models.parameters import canonical_name, trainable_parameters
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.train.check import check_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
LORA = LoRA(rank=3, alpha=5.0, targets=ALL)
ARGS = dataclasses.replace(build.ARGS, lora=LORA)


def test_it_begins_as_the_model_without():
    plain, adapted = CausalLM(copy.deepcopy(build.ARGS)), CausalLM(copy.deepcopy(ARGS))
    plain.init_weights()
    adapted.init_weights()
    tokens_NT, _ = build.data()
    assert torch.equal(plain(tokens_NT), adapted(tokens_NT))
    for name, factor in trainable_parameters(adapted).items():
        a = ".lora_a." in name
        bound = factor.shape[1] ** -0.5
        assert (0.7 * bound < factor.abs().max() <= bound) if a else not factor.any(), name
    assert set(plain.state_dict()) == set(adapted.state_dict()) - set(trainable_parameters(adapted))


def drawn_on_this_rank(degrees):
    """Whether the whole adapters, each gathered, are those of a model without a mesh."""
    args = dataclasses.replace(ARGS, lora=LoRA(3, 5.0, ("q_proj", "down_proj")))
    with torch.device("meta"):
        model = CausalLM(copy.deepcopy(args))
    dims, _ = build.mesh("cpu", degrees)
    parallelize(model, dims, build.config(degrees=degrees))
    model.to_empty(device="cpu")
    model.init_weights()
    found = {name: p.full_tensor() for name, p in trainable_parameters(model).items()}
    alone = CausalLM(copy.deepcopy(args))
    alone.init_weights()
    expected = trainable_parameters(alone)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("degrees", [(1, 1, 2), (2, 1, 1)], ids=str)
def test_row56_adapters_are_drawn_alike_on_every_mesh(degrees):
    assert on_ranks(2, drawn_on_this_rank, degrees) == [True, True]


def held(degrees, dtype, method, freeze_a):
    """What a step keeps of an adapted model on this rank: (dtypes of frozen and trained, optimizer
    states, values of the accumulator, gradients of frozen weights, whether frozen ones moved)."""
    both = (f"--training.mixed_precision_param={dtype}", f"--privacy.gradient_method={method}")
    args = dataclasses.replace(ARGS, lora=dataclasses.replace(LORA, freeze_a=freeze_a))
    built = build.build(degrees, *both, args=args)
    trained = trainable_parameters(built.model)
    frozen = {n: p for n, p in built.model.named_parameters() if not p.requires_grad}
    assert trained.keys() == {
        canonical_name(name)
        for name, _ in built.model.named_parameters()
        if is_adapter(name) and not (freeze_a and ".lora_a." in name)
    }
    before = {name: p.to_local().clone() for name, p in frozen.items()}
    adamw = torch.optim.AdamW([p for p in built.model.parameters() if p.requires_grad], lr=0.1)
    optimizer = built.step.optimizer(adamw, noise_multiplier=1.0, expected_batch_size=3.0)
    built.accumulate(*build.data())
    accumulated = sum(flat.numel() for flat in built.step.clipped_sum.take().values())
    optimizer.step(built.step.clipped_sum.take(), StepNoise(bytes(32)))
    built.step.clipped_sum.reset()
    return (
        {p.dtype for p in frozen.values()},
        {p.dtype for p in trained.values()},
        len(adamw.state) == len(trained),
        accumulated == sum(p.to_local().numel() for p in trained.values()),
        all(p.grad is None for p in frozen.values()),
        all(torch.equal(before[name], p.to_local()) for name, p in frozen.items()),
    )


@pytest.mark.parametrize("freeze_a", [False, True], ids=["A, B", "B"])
@pytest.mark.parametrize("method", ["microbatch", "grad_sample", "ghost"])
def test_row56_what_is_frozen_is_not_paid_for_and_does_not_move(method, freeze_a):
    dtype = "float32" if method == "ghost" else "bfloat16"
    for stored, trained, *true in on_ranks(2, held, (1, 1, 2), dtype, method, freeze_a):
        assert stored == {getattr(torch, dtype)}
        assert trained == {torch.float32}
        assert all(true), true


def mistake(*options):
    """What `check_model` says of a start with these options; "" if nothing."""
    try:
        config = load_config(["--job.config_file", str(CONFIG), *options], 1)
        check_model(config, decide_start(config))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--lora.rank=4", "--lora.targets=q_proj,output"), "no linear layer 'output'; use some"),
        (("--lora.rank=4", "--lora.targets=q_proj,all-linear"), "layer 'all-linear'; use some"),
        (("--lora.rank=4",), ""),  # all linear layers
        (
            ("--lora.rank=4", "--lora.targets=q_proj,wq"),
            "no linear layer 'wq'; use some of down_proj, gate_proj, k_proj, o_proj, q_proj, "
            "up_proj, v_proj, or all-linear",
        ),
        (("--lora.targets=wx",), ""),  # off
    ],
)
def test_mistakes_are_one_line(tmp_path, given, said):
    found = forks.call(mistake, *given, f"--job.dump_folder={tmp_path}")
    assert said in found
    assert bool(said) == bool(found)
    assert "\n" not in found


# What is exported.


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Both exports of adapters beside a Hugging Face Llama, and our logits of it."""
    place = tmp_path_factory.mktemp("lora")
    folder = write_llama(place / "given", tied=False, rope=PLAIN, eps=1e-6)
    config = build.config(f"--model.hf_assets_path={folder}", "--lora.rank=3", "--lora.alpha=5")
    model = ours(config, folder)
    fill_adapters(model, std=0.5)
    for kind in ("adapter", "merged"):
        (place / kind).mkdir()
        write_folder(model, config, str(place / kind), merge=kind == "merged")
    with torch.no_grad():
        return place, model(sample_tokens())


def merged_by_hand(place):
    """The logits with W += alpha / r B A, on the layers that PEFT's names mean."""
    settings = json.loads((place / "adapter" / "adapter_config.json").read_text())
    model = LlamaForCausalLM.from_pretrained(place / "given")
    tensors = load_file(place / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                assert layer.rpartition(".")[2] in settings["target_modules"]
                b = tensors[name.replace("lora_A", "lora_B")]
                assert a.shape[0] == b.shape[1] == settings["r"]
                delta = settings["lora_alpha"] / settings["r"] * b @ a
                model.get_submodule(layer).weight.add_(delta)
        assert len(tensors) == 2 * 7 * len(model.model.layers)
        return model(sample_tokens()).logits


def test_exported_adapters_give_the_same_logits(given):
    """Merged by us, and by hand as PEFT does."""
    place, expected = given
    assert (transformers_logits(place / "merged") - expected).abs().max() < 1e-4
    assert (merged_by_hand(place) - expected).abs().max() < 1e-4
    assert (transformers_logits(place / "given") - expected).abs().max() > 0.1
    assert not (place / "merged" / "adapter_config.json").exists()


def test_peft_loads_the_folder(given):
    """Where it is installed: CONTRIBUTING.md says why it is no dependency."""
    peft = pytest.importorskip("peft")
    place, expected = given
    base = LlamaForCausalLM.from_pretrained(place / "given")
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(base, str(place / "adapter"))(sample_tokens()).logits
    assert (found - expected).abs().max() < 1e-4
