"""A Hugging Face model in and out, in one process: as in `transformers`, or one line why not."""

import json
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.build import config
from tests.models.hugging_face import (
    PLAIN,
    SCALED,
    edit_config,
    given,
    ours,
    sample_tokens,
    transformers_logits,
    write,
    write_llama,
)
from torchtitan_dp.checkpoint.start import decide_start, decision
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.models import hugging_face_weights
from torchtitan_dp.models.causal_lm.model import HuggingFaceAdapter
from torchtitan_dp.models.hugging_face import (
    flavor,
    is_local_path,
    parameter_count,
    shape,
    without_local_paths,
)
from torchtitan_dp.models.hugging_face_weights import export
from torchtitan_dp.models.parameters import first_overflow
from torchtitan_dp.models.weight_files import INDEX_FILE
from torchtitan_dp.train.check import check_files, check_names
from torchtitan_dp.train.spec import build_model

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
# What decides the shape in the config.json of the released models, and their published sizes.
RELEASED = {
    "1B": (2048, 8192, 32, 16, 32.0, True, 1_235_814_400),
    "3B": (3072, 8192, 24, 28, 32.0, True, 3_212_749_824),
    "8B": (4096, 14336, 32, 32, 8.0, False, 8_030_261_248),
}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 3.7, "rope_theta": 1e4}
CASES = {  # the model, tied or not, and what else a `config.json` may have
    "tied, scaled": ("llama", True, SCALED, False),
    "yarn": ("llama", True, YARN, False),
    "yarn, mscale": ("qwen3", False, YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}, False),
    "linear, keys of transformers 4": ("llama", False, LINEAR, True),
    "untied": ("llama", False, PLAIN, False),
    "untied, bf16, keys of transformers 4": ("llama", False, SCALED, True),
    "qwen3, tied": ("qwen3", True, PLAIN, False),
    "qwen3, untied": ("qwen3", False, PLAIN, False),
}


@pytest.fixture(params=CASES)
def found(request, tmp_path):
    kind, tied, rope, old = CASES[request.param]
    folder, dtype = tmp_path / "given", torch.bfloat16 if old else torch.float32
    if kind == "qwen3":
        return edit_config(write(kind, folder, tied=tied), rope_parameters=rope)
    write_llama(folder, tied=tied, rope=rope, eps=1e-6 if tied else 1e-4, dtype=dtype)
    if old:
        edit_config(
            folder,
            rope_parameters=None,
            rope_theta=rope["rope_theta"],
            rope_scaling={k: v for k, v in rope.items() if k != "rope_theta"},
            dtype=None,
            torch_dtype="bfloat16",
            head_dim=None,
        )
    return folder


@torch.no_grad()
def test_in_and_out_the_logits_are_those_of_transformers(found, monkeypatch):
    folder = found
    monkeypatch.setattr(hugging_face_weights, "SHARD_BYTES", 60_000)
    expected = transformers_logits(folder)
    assert expected.std() > 0.5
    config = given(folder)
    model = ours(config, folder)
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    assert (model(sample_tokens()) - expected).abs().max() < 1e-4
    exported = folder.parent / "out" / "hf"
    assert export(model, config, {"ledger": b"spent"}) == str(exported)
    assert (exported / "ledger").read_text() == "spent"
    (exported / "ledger").unlink()
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert torch.equal(transformers_logits(exported), expected)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, exported))
    assert before == after
    dtypes = {t.dtype for f in exported.glob("*.safetensors") for t in load_file(f).values()}
    assert dtypes == {torch.bfloat16 if "torch_dtype" in before else torch.float32}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_the_flavors(tmp_path, name):
    dim, hidden, heads, layers, factor, tied, size = RELEASED[name]
    original = {"original_max_position_embeddings": 8192, "factor": factor}
    settings = {
        **COMMON,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "head_dim": dim // heads,
        "tie_word_embeddings": tied,
        "rope_scaling": {k: v for k, v in SCALED.items() if k != "rope_theta"} | original,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read, ours = shape(given(tmp_path)), flavor(name)
    assert parameter_count(read) == parameter_count(ours) == size
    ours.seq_len = read.seq_len  # a run's own
    assert read == ours


def test_what_the_folder_holds(tmp_path):
    """Weights, config and tokenizer; for its owner only; an older one is replaced."""
    folder = write_llama(tmp_path / "given", tied=True, rope=SCALED, eps=1e-6)
    (folder / "private.txt").write_text("not to be copied")
    out = tmp_path / "out"
    (out / "hf").mkdir(parents=True)
    (out / "hf" / "older").touch()
    (out / ".hf.partial").mkdir()  # of an export that was killed
    export(ours(given(folder), folder), given(folder))
    assert [p.name for p in out.iterdir()] == ["hf"]
    assert {p.name for p in (out / "hf").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in (out / "hf", *(out / "hf").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    ids = AutoTokenizer.from_pretrained(out / "hf")("abc", add_special_tokens=False).input_ids
    assert ids == load_tokenizer(str(folder)).encode("abc").tolist() == [97, 98, 99]


@pytest.fixture(scope="module")
def given_llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("hf") / "given", tied=False, rope=SCALED, eps=1e-6)


@pytest.fixture
def editable(given_llama, tmp_path):
    """A copy of a folder, to spoil."""
    folder = tmp_path / "given"
    folder.mkdir()
    for path in given_llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def spoil(folder, change):
    for path in folder.glob("*.safetensors"):
        change(path)


def remove_weights(folder):
    spoil(folder, lambda path: path.unlink())
    (folder / INDEX_FILE).unlink()


def repeat_a_tensor(folder):
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file(load_file(second) | dict([*load_file(first).items()][:1]), second)


def edit_index(folder, name):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][name] = min(index["weight_map"].values())
    (folder / INDEX_FILE).write_text(json.dumps(index))


def replace_by_an_adapter(folder):
    remove_weights(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"PEFT's")


def quantize(path):
    save_file({k: v.to(torch.int8) for k, v in load_file(path).items()}, path)


BROKEN = {
    "is missing, which model.safetensors.index.json names; download all": lambda folder: min(
        folder.glob("model-*.safetensors")
    ).unlink(),
    "model-00002-of": repeat_a_tensor,
    "lacks model.norm.weight, which model.safetensors.index": lambda folder: edit_index(
        folder, "model.norm.weight"
    ),
    "index.json is broken": lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {}}'),
    "model.layers.2.": lambda folder: edit_config(folder, num_hidden_layers=3),
    "has shape [100, 48], but the model's is [96, 48]": lambda folder: edit_config(
        folder, intermediate_size=96
    ),
    "quantized": lambda folder: spoil(folder, quantize),
    "broken": lambda folder: spoil(folder, lambda path: path.write_bytes(path.read_bytes()[:100])),
    "it has neither model.safetensors nor": remove_weights,
    "it is an adapter, not a whole model; release its run with --merged": replace_by_an_adapter,
    "config.json cannot be read": lambda folder: (folder / "config.json").write_text("{"),
    "config.json has num_key_value_heads = 3: must divide": lambda folder: edit_config(
        folder, num_key_value_heads=3
    ),
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_folders_are_refused(editable, words):
    BROKEN[words](editable)
    settings = given(editable)
    with pytest.raises(ValueError, match="hf_assets_path") as refusal:
        check_files(settings, shape(settings), decide_start(settings))
    assert words in str(refusal.value)


@pytest.mark.parametrize("is_whole", [True, False], ids=["model.safetensors", "index"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_row80_weights_that_the_folder_does_not_name_are_not_read(editable, is_whole):
    """Shards of an earlier save, and another copy: each tensor of them is one too large."""
    expected = AutoModelForCausalLM.from_pretrained(editable).state_dict()
    older = {name: tensor + 1 for name, tensor in expected.items()}
    if is_whole:  # the older shards stay, without and with their index
        spoil(editable, lambda p: save_file({k: older[k] for k in load_file(p)}, p))
        save_file(expected, editable / "model.safetensors")
    save_file(older, editable / "model.old.safetensors")
    save_file(older, editable / "z.safetensors")
    settings = given(editable)
    check_files(settings, args := shape(settings), decide_start(settings))
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    reader = HuggingFaceAdapter(args, str(editable)).get_hf_storage_reader(str(editable))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("key", ["model.hf_assets_path", "checkpoint.initial_load_path"])
def test_a_name_of_the_hub_is_answered_with_its_download(given_llama, key):
    with pytest.raises(ValueError, match=rf"^{key} = .* run hf download meta-llama/Llama-3.2-1B"):
        given(given_llama, f"--{key}=meta-llama/Llama-3.2-1B")


def test_weights_of_another_model_are_refused(given_llama, editable):
    """The same shapes everywhere, but the output layer was never tied."""
    edit_config(editable, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"checkpoint\.initial_load_path = .* another model"):
        shape(given(editable, f"--checkpoint.initial_load_path={given_llama}"))
    edit_config(editable, tie_word_embeddings=False, max_position_embeddings=4096)
    shape(given(editable, f"--checkpoint.initial_load_path={given_llama}"))


def check_names_and_files(settings):
    check_names(settings, start := decide_start(settings))
    check_files(settings, shape(settings), start)


def test_files_that_would_not_load_are_refused(given_llama, tmp_path):
    (tmp_path / "empty").mkdir()
    overwritten = (f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={tmp_path / 'hf'}")
    for more, words in (
        (("--checkpoint.initial_load_path=/nowhere",), "initial_load_path = '/nowhere': no such"),
        ((f"--checkpoint.initial_load_path={tmp_path / 'empty'}",), "has neither"),
        (("--checkpoint.folder=hf",), "checkpoint.folder"),
        (overwritten, "replace"),
    ):
        with pytest.raises(ValueError, match=words):
            check_names_and_files(given(given_llama, *more))


def test_weights_without_their_tokenizer_are_refused(given_llama, editable):
    """Text would be read as bytes, which they were not trained on."""
    elsewhere = f"--checkpoint.initial_load_path={given_llama}"
    settings = given(editable, elsewhere, "--model.hf_assets_path=")
    with pytest.raises(ValueError, match=r"hf_assets_path = '': text would be read as bytes"):
        check_files(settings, shape(settings), decide_start(settings))
    (editable / "tokenizer.json").unlink()
    settings = given(editable, elsewhere)
    with pytest.raises(ValueError, match=r"hf_assets_path = .* and no tokenizer\.json, so "):
        check_files(settings, shape(settings), decide_start(settings))


def test_weights_are_drawn_unless_they_are_loaded(given_llama, tmp_path):
    initialized = []
    for settings in (config(f"--job.dump_folder={tmp_path}"), given(given_llama)):
        args = shape(settings)
        args.update_from_config(settings)
        initialized.append(build_model(decision(settings), args))
        initialized[-1].init_weights()
    drawn, to_be_loaded = initialized
    assert first_overflow(drawn.named_parameters()) == ""
    assert all(parameter.isnan().all() for parameter in to_be_loaded.parameters())
    assert first_overflow(to_be_loaded.named_parameters()) == "model.model.embed_tokens.weight"


# What is published names no place on this machine, wherever a file notes it.


def test_a_folder_that_is_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_local_path("models/llama")
    assert not is_local_path("models/another")
    assert not is_local_path("models")  # a word


def test_paths_are_dropped_at_any_depth() -> None:
    given = {
        "model_type": "llama",
        "tokenizer_file": "models/tokenizer.json",  # of another working directory
        "auto_map": {"AutoModel": "modeling_x.X"},  # code, which is not exported
        "custom_pipelines": {"y": {"impl": "pipeline_y.Y"}},
        "vocab_size": 7,
        "chat_template": "{% for m in messages %}/home{% endfor %}",
        "nested": {"cache": "/home/alice/oncology", "kept": ["</s>", "~/llama", ["D:\\records"]]},
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
    }
    assert without_local_paths(given) == {
        "model_type": "llama",
        "vocab_size": 7,
        "chat_template": "{% for m in messages %}/home{% endfor %}",
        "nested": {"kept": ["</s>", []]},
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
    }
    assert json.dumps(given).count("oncology") == 1  # a copy
