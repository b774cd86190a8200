"""Real runs with adapters: from a Hugging Face folder, resumed, released; without privacy too."""

import json
import shutil

import pytest
import torch

from tests.models.hugging_face import PLAIN, checkpoint_logits, transformers_logits, write_llama
from tests.processes import forks
from tests.processes.runs import arguments, load, privacy, train, weights, with_sigma, write_records
from torchtitan_dp.config.load import load_config, read_config
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.lora import is_adapter
from torchtitan_dp.release.__main__ import main as release
from torchtitan_dp.train.check import check_run

TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,down_proj,up_proj"
LORA = ("--lora.rank=4", "--lora.alpha=8", f"--lora.targets={TARGETS}")
FROM_HF = ("--checkpoint.initial_load_in_hf", "--privacy.initial_weights_public")
BF16 = "--training.mixed_precision_param=bfloat16"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("lora_run")
    write_llama(place / "given", tied=True, rope=PLAIN, eps=1e-6)
    write_records(place / "data")
    return place


def command(place, out, *overrides):
    hf = f"--model.hf_assets_path={place / 'given'}"
    return arguments(out, place / "data", hf, *LORA, BF16, *with_sigma(1), *overrides)


def from_given(place, out, *overrides):
    """Four steps at cp 2, from bf16 of the given weights."""
    both = (*FROM_HF, "--checkpoint.last_save_in_hf", "--parallelism.context_parallel_degree=2")
    output = train(command(place, out, *both, *overrides), log=place / "log", world_size=2)
    assert f"what to ship is a release: {out / 'hf'}/" in output
    return out


@pytest.fixture(scope="module")
def finished(place):
    """A private run; not to be changed."""
    return from_given(place, place / "out")


def test_row56_the_base_keeps_its_bits_and_every_adapter_moves(finished):
    """And what is frozen has no optimizer state."""
    first, last = (weights(finished / "checkpoint" / step) for step in ("step-2", "step-4"))
    model = CausalLM(shape(read_config(str(finished))))
    model.init_weights()
    begun = dict(model.named_parameters())
    adapters = [name for name in last if is_adapter(name)]
    assert len(adapters) == 2 * 7 * 2
    for name, value in last.items():
        if is_adapter(name):
            assert value.dtype == torch.float32
            assert not torch.equal(value, first[name]), name
            assert not torch.equal(value, begun[name]), name
        else:
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, first[name]), name
    state = load(finished / "checkpoint" / "step-4")
    moments = [name for name in state if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert all(is_adapter(name.rpartition(".")[0]) for name in moments)
    assert len(moments) == 2 * len(adapters)


def resumed(run, place, out, *overrides):
    """A copy of a run that lost its last two steps, and took them again on one process."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoint" / "step-4")
    output = train(command(place, out, *FROM_HF, *overrides), log=out / "log", world_size=1)
    assert "Training starts at step 3" in output
    steps = ((out, "step-2"), (run, "step-4"), (out, "step-4"))
    return [load(folder / "checkpoint" / step) for folder, step in steps]


def test_it_goes_on_from_its_own_checkpoint(finished, place, tmp_path):
    before, _, found = resumed(finished, place, tmp_path / "out")
    assert before.keys() == found.keys()
    names = weights(finished / "checkpoint" / "step-4")
    for name, value in found.items():
        if name.startswith("optimizer.state.") and name.endswith(".step"):
            assert value == 4, name
        elif name in names:
            assert torch.equal(value, before[name]) != is_adapter(name), name


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lora.alpha=4", "lora = LoRA of rank 4, alpha 4, on"),
        ("--lora.freeze_a", "lora = LoRA of rank 4, alpha 8, B alone, on"),
        ("--lora.rank=2", "lora = LoRA of rank 2, alpha 8, on"),
        ("--lora.rank=0", "lora = all weights: this run was started with LoRA of rank 4"),
    ],
)
def test_another_adapter_cannot_go_on(finished, place, option, said):
    found = forks.call(refusal, command(place, finished, *FROM_HF, option))
    assert said in found
    assert "\n" not in found


def refusal(overrides):
    try:
        check_run(load_config(overrides, 1))
    except ValueError as error:
        return str(error)
    return ""


TRAINED = f"LoRA of rank 4, alpha 8, on {', '.join(sorted(TARGETS.split(',')))}"


def adapter_config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_the_run_leaves_peft_adapters_with_their_ledger(finished, place):
    exported = finished / "hf"
    settings = adapter_config(exported)
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    assert "base_model_name_or_path" not in settings  # it would be a place on this machine
    for path in exported.glob("*.json"):
        assert str(place) not in path.read_text(), path.name
    assert (exported / "adapter_model.safetensors").exists()
    assert not (exported / "model.safetensors").exists()
    for folder in (finished, exported):
        assert privacy(folder)["trained"] == TRAINED


def test_a_release_of_adapters_says_what_they_are(finished, tmp_path):
    release([str(finished), str(tmp_path / "model")])
    assert "base_model_name_or_path" not in adapter_config(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "# Adapters for a Llama of 0.1M parameters, trained with differential" in card
    assert f"| trained | {TRAINED} |" in card
    assert "PeftModel.from_pretrained" in card
    assert privacy(tmp_path / "model")["trained"] == TRAINED
    release([str(finished), str(tmp_path / "named"), "--base_model", "me/llama"])
    assert adapter_config(tmp_path / "named")["base_model_name_or_path"] == "me/llama"
    assert "\nbase_model: me/llama\n" in (tmp_path / "named" / "README.md").read_text()


def test_a_merged_release_is_a_whole_model(finished, tmp_path):
    release([str(finished), str(tmp_path / "model"), "--merged"])
    expected = checkpoint_logits(finished, weights(finished / "checkpoint" / "step-4"))
    assert (transformers_logits(tmp_path / "model") - expected).abs().max() < 1e-4
    card = (tmp_path / "model" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "| trained | LoRA of rank 4" in card
