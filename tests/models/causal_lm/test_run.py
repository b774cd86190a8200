"""Real runs of models of transformers: from their folder to one that transformers and PEFT read."""

import importlib.util
import json

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import torchtitan_dp.plan.__main__ as plan
from tests.models.causal_lm.families import FAMILIES, configuration
from tests.models.hugging_face import edit_config, given, ours, sample_tokens, transformers_logits
from tests.models.test_hugging_face_run import command, mesh
from tests.processes.runs import Run, privacy, train, weights
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.config.load import load_config, read_config
from torchtitan_dp.ledger import RunLog
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.hugging_face_weights import write_folder
from torchtitan_dp.release.__main__ import empty_model, load_weights, release
from torchtitan_dp.report.__main__ import report
from torchtitan_dp.train.check import check_model

pytestmark = pytest.mark.slow

VOCABULARY = 320
CHAT = (
    "{{ bos_token }}{% for turn in messages %}<turn>{{ turn.role }}: {{ turn.content }}{% endfor %}"
)


def write(folder, name, **changes):
    """A random model of a family, with a tokenizer."""
    kind, own = FAMILIES[name]
    torch.manual_seed(7)
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    config = configuration(kind, **{**own, **sizes, "initializer_range": 0.3, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name or name.endswith("bias"):
                value.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(folder, save_original_format=False)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder):
    """Bytes and what often stands together, learned from a text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<turn>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([json.__file__], trainer)
    marks = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<turn>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **marks)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


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
        assert (
            "checked: per-sample gradients of a tiny gemma3_text on this mesh are transformers'"
            in output
        )
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
    assert "tied embeddings, without dropout" in capsys.readouterr().out


def released_model(base, folder):
    """A released model, or the base with released adapters: by PEFT where it is installed, else as
    it does, which adds scaling B A to the weight of the module of that name."""
    adapted = (folder / "adapter_config.json").exists()
    start = base if adapted else folder
    model = AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager").eval()
    if not adapted:
        return model
    if importlib.util.find_spec("peft"):
        from peft import PeftModel

        return PeftModel.from_pretrained(model, folder).eval()
    settings = json.loads((folder / "adapter_config.json").read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    names = {name.rsplit(".", 2)[0] for name in factors}
    assert {name.rpartition(".")[2] for name in names} == {*settings["target_modules"]}
    for name in names:
        a, b = (factors[f"{name}.lora_{factor}.weight"] for factor in "AB")
        weight = model.get_submodule(name.removeprefix("base_model.model.")).weight
        weight.data += settings["lora_alpha"] / settings["r"] * b @ a
    return model


def our_model(run, step):
    """Our model, on one process, with the weights of a run's checkpoint."""
    model = CausalLM(shape(read_config(str(run))))
    model.init_weights()
    model.load_state_dict(weights(run / "checkpoint" / f"step-{step}"))
    return model.eval()


def greedy(model, tokens_T, count):
    """The most probable next tokens, one after the other, without a cache."""
    for _ in range(count):
        tokens_T = torch.cat([tokens_T, model(tokens_T[None])[0, -1].argmax()[None]])
    return tokens_T[-count:].tolist()


ADAPTERS = ("--lora.rank=4", "--lora.alpha=8")


@pytest.mark.thorough_cases("gemma3*", "phi3*", "gpt_oss*")
@pytest.mark.parametrize(
    "name, how",
    [
        pytest.param("qwen2, biases, tied", ADAPTERS, id="qwen2-adapters"),
        pytest.param("phi3", ADAPTERS, id="phi3-adapters"),
        pytest.param("gemma3", (), id="gemma3-all"),
        pytest.param("gpt_oss", (), id="gpt_oss-all"),
    ],
)
def test_from_a_folder_to_a_release(name, how, tmp_path):
    """Killed within a step, resumed, and released: transformers computes what was trained."""
    base, out = write(tmp_path / "given", name), tmp_path / "out"
    steps = ("--training.steps=6", "--checkpoint.interval=3")
    overrides = command(tmp_path, base, *steps, *how, *mesh(1, 2))
    with Run(overrides, log=tmp_path / "log") as run:
        run.wait_for(lambda: RunLog(str(out)).count > 3, "a step after the checkpoint")
        run.kill(run.processes())
    assert "Training starts at step 4" in train(overrides, log=tmp_path / "log")
    spent = privacy(out)
    assert (spent["private"], spent["steps"]) == (True, 6)
    assert spent["steps_executed"] > 6
    assert spent["epsilon_executed"] > spent["epsilon"]

    released = [tmp_path / "released", *([tmp_path / "merged"] if how else [])]
    for place in released:
        release(str(out), str(place), base_model="acme/small", merge=place.name == "merged")
        card = (place / "README.md").read_text()
        assert "\nbase_model: acme/small\n" in card
        assert f" {FAMILIES[name][0]} of 0." in card  # its title: so many parameters
    places = [*released, out / "hf"]
    assert "What ε means" in report(str(out))

    question = [{"role": "user", "content": "import json"}]
    tokenizers_ = [AutoTokenizer.from_pretrained(place) for place in (base, *places)]
    (asked,) = {tuple(t.apply_chat_template(question).input_ids) for t in tokenizers_}
    with torch.no_grad():
        own = our_model(out, 6)
        expected, asked_T = own(sample_tokens()), torch.tensor(asked)
        written = greedy(own, asked_T, 8)
        for place in places:
            model = released_model(base, place)
            assert (model(sample_tokens()).logits - expected).norm() < 1e-5 * expected.norm()
            said = model.generate(input_ids=asked_T[None], do_sample=False, max_new_tokens=8)[0]
            assert said[len(asked) :].tolist() == written[: len(said) - len(asked)]
    assert (transformers_logits(base) - expected).norm() > 1e-3 * expected.norm()

    edit_config(base, rms_norm_eps=0.1)
    again = load_config([*overrides, "--training.steps=8"], 2)
    with pytest.raises(ValueError, match=r"its rms_norm_eps is 0\.1, that of the .*step-6 is 1e-0"):
        check_model(again, decide_start(again))


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_a_release_has_the_dtypes_of_transformers(name, tmp_path):
    """Of buffers that are no weights, and of routers that stay fp32 beside weights in bf16."""
    write(tmp_path / "fp32", name)
    folder, out = tmp_path / "given", tmp_path / "released"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    model.save_pretrained(folder, save_original_format=False)
    config = given(folder)
    dcp.save(ours(config, folder).state_dict(), checkpoint_id=tmp_path / "step-1", no_dist=True)
    read = empty_model(shape(config))
    load_weights(str(tmp_path / "step-1"), read)
    out.mkdir()
    write_folder(read, config, str(out))
    expected, found = (load_file(place / "model.safetensors") for place in (folder, out))
    assert {value.dtype for value in expected.values()} == {torch.float32, torch.bfloat16}
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
