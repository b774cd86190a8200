"""Qwen3: the logits of `transformers`, and every method's sum is the loop's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import build
from tests.gradients.loop import check
from tests.models.hugging_face import edit_config, sample_tokens, write_qwen
from torchtitan_dp.models.families import FAMILIES, on_meta, parameter_count
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.hugging_face_weights import export
from torchtitan_dp.models.lora import LoRA
from torchtitan_dp.models.qwen3 import FLAVORS, HuggingFaceAdapter


def given(folder: Path, *overrides: str) -> Any:
    return build.config(
        "--model.name=qwen3",
        f"--model.hf_assets_path={folder}",
        f"--job.dump_folder={folder.parent / 'out'}",
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.last_save_in_hf",
        *overrides,
    )


def ours(folder: Path) -> Any:
    args = shape(given(folder))
    model = FAMILIES["qwen3"].model(args)
    model.init_weights()
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    model.load_state_dict(HuggingFaceAdapter(args, None).from_hf(weights), strict=True)
    return model.eval()


def theirs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(sample_tokens()).logits


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_in_and_out_the_logits_are_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "given", tied=tied)
    expected = theirs(folder)
    assert expected.std() > 0.5
    model = ours(folder)
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    assert (model(sample_tokens()) - expected).abs().max() < 1e-4
    exported = Path(export(model, given(folder)))
    assert torch.equal(theirs(exported), expected)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, exported))
    assert before == after


@torch.no_grad()
def test_a_flavor_comes_out_too(tmp_path: Path) -> None:
    settings = build.config(
        "--model.name=qwen3", f"--job.dump_folder={tmp_path}", "--checkpoint.export_dtype=float32"
    )
    model = FAMILIES["qwen3"].model(shape(settings))
    model.init_weights()
    export(model, settings)
    assert (theirs(tmp_path / "hf") - model(sample_tokens())).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"use_sliding_window": True}, "use_sliding_window = true: attention is always over"),
        ({"sliding_window": 4096}, "sliding_window = 4096: attention is always over"),
        ({"layer_types": ["sliding_attention"]}, 'layer_types = "sliding_attention"'),
        ({"attention_bias": True}, "attention_bias = true: biases are not built"),
        ({"head_dim": 15}, "head_dim = 15: must be even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide the 4 heads"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}},
            "rope_type = \"dynamic\": only 'default' and 'linear' and 'yarn' are built",
        ),
        ({"model_type": "qwen3_moe"}, "only dense Qwen3s have model.name = 'qwen3'"),
        ({"model_type": "llama"}, "only dense Qwen3s have model.name = 'qwen3'"),
    ],
)
def test_models_that_ours_cannot_compute_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_qwen(tmp_path / "given", tied=False)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=r"config\.json has ") as refusal:
        shape(given(folder))
    assert words in str(refusal.value)


def test_another_familys_name_is_refused_with_the_right_one(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "given", tied=False)
    with pytest.raises(ValueError, match=r"^model\.name = 'llama3': .*; set model\.name = 'qwen3'"):
        shape(given(folder, "--model.name=llama3"))


@pytest.mark.parametrize(
    "name, size",
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
    ],
)
def test_flavors_have_the_released_sizes(name: str, size: int) -> None:
    assert parameter_count(FLAVORS[name]) == size


METHODS = [("microbatch", 1), ("grad_sample", 2), ("ghost", 2)]
MESHES = [(1, 1, 1), (1, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("method, samples", METHODS)
def test_every_method_and_mesh(
    method: str, samples: int, degrees: tuple[int, int, int], tied: bool
) -> None:
    options = f"--privacy.gradient_method={method}", f"--training.local_batch_size={samples}"
    check(degrees, *options, family="qwen3", tie_embeddings=tied)


@pytest.mark.parametrize("method, samples", METHODS)
def test_adapters(method: str, samples: int) -> None:
    options = f"--privacy.gradient_method={method}", f"--training.local_batch_size={samples}"
    lora = LoRA(2, 4.0, ("wq", "wv", "w2"))
    check((1, 1, 2), *options, family="qwen3", lora=lora, tolerance=2e-5)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing(mode: str) -> None:
    options = (
        f"--activation_checkpoint.mode={mode}",
        "--activation_checkpoint.selective_ac_option=1",
    )
    check((1, 1, 2), *options, family="qwen3")


def test_initial_weights_are_equal_on_every_start() -> None:
    first, second = (build.reference_model(build.QWEN) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert sum(p.numel() for p in on_meta(build.QWEN).parameters()) > 0


def test_selfcheck_keeps_the_size_of_heads(tmp_path: Path) -> None:
    """0.6B has 16 heads of 128 in a model of 1,024."""
    small = FLAVORS["0.6B"].with_heads(4, 2, n_layers=2)
    assert (small.dim, small.head_dim, small.head_size, small.hidden_dim) == (512, 128, 128, 768)
    assert on_meta(small).layers["0"].attention.wq.weight.shape == (512, 512)
