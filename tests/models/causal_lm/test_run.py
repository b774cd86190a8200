"""Real runs of models of transformers: from their folder to one that transformers and PEFT read."""

import json

import pytest
import torch
from safetensors.torch import load_file

import torchtitan_dp.plan.__main__ as plan
from tests.models.causal_lm.families import FAMILIES, configuration
from tests.models.hugging_face import sample_tokens, transformers_logits, write_tokenizer
from tests.models.test_hugging_face_run import command, mesh
from tests.processes.runs import train

pytestmark = pytest.mark.slow


def write(folder, name, **changes):
    """A random model of a family, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    kind, own = FAMILIES[name]
    torch.manual_seed(7)
    sizes = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 257}
    config = configuration(kind, **{**own, **sizes, "initializer_range": 0.3, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    soft_cap = {"final_logit_softcapping": 5.0}
    return write(tmp_path_factory.mktemp("gemma") / "given", "gemma3", **soft_cap)


def test_one_and_two_processes_train_resume_and_export_the_same_model(gemma, tmp_path, capsys):
    settled = ("--privacy.debug_seed=1", "--training.seq_len=64")
    logits = {}
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        overrides = command(place, gemma, *settled, *mesh(1, ranks))
        if ranks == 2:  # half of it on one process
            start = command(place, gemma, *settled, *mesh(1, 1), "--training.steps=2")
            train(start, log=place / "log", world_size=1)
        output = train(overrides, log=place / "log", world_size=ranks)
        assert ("Training starts at step 3" in output) == (ranks == 2)
        assert "model proof: a tiny gemma3_text on this mesh: per-sample gradients" in output
        logits[ranks] = transformers_logits(place / "out" / "hf")
    moved = (transformers_logits(gemma) - logits[1]).abs().max()
    assert moved > 0.1
    assert (logits[1] - logits[2]).abs().max() < 1e-3 * moved
    exported = tmp_path / "2" / "out" / "hf"
    assert json.loads((exported / "config.json").read_text()) == json.loads(
        (gemma / "config.json").read_text()
    )
    assert (exported / "generation_config.json").exists()
    plan.main([*overrides, "--world_size=2"])
    said = capsys.readouterr().err
    assert "tied embeddings, a gemma3_text of transformers without dropout" in said


def test_adapters_for_peft(tmp_path):
    """Of a layer with a bias. PEFT adds scaling B A to the weight of the module of that name."""
    from transformers import AutoModelForCausalLM

    given = write(tmp_path / "given", "qwen2, biases, tied")
    lora = ("--lora.rank=4", "--lora.alpha=8", "--lora.targets=q_proj,down_proj")
    end = ("--privacy.debug_seed=1", *mesh(1, 2))
    logits = []
    for export in ("adapter", "merged"):
        place = tmp_path / export
        place.mkdir()
        overrides = command(place, given, *lora, *end, f"--lora.export={export}")
        train(overrides, log=place / "log", world_size=2)
        logits.append(place / "out" / "hf")
    adapter, merged = logits
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "q_proj"]
    base = AutoModelForCausalLM.from_pretrained(given, attn_implementation="eager").eval()
    factors = load_file(adapter / "adapter_model.safetensors")
    names = {name.rsplit(".", 2)[0] for name in factors}
    assert len(names) == 4
    with torch.no_grad():
        for name in names:
            a, b = (factors[f"{name}.lora_{factor}.weight"] for factor in "AB")
            layer = base.get_submodule(name.removeprefix("base_model.model."))
            layer.weight += settings["lora_alpha"] / settings["r"] * b @ a
        found = base(sample_tokens()).logits
    assert (found - transformers_logits(merged)).abs().max() < 1e-3
    assert (found - transformers_logits(given)).abs().max() > 0.01
