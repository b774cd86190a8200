"""Scaled rotary embeddings: those of `transformers`, from `config.json` or `[rope]`, and back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests import build
from tests.models.causal_lm.families import arguments
from tests.models.hugging_face import (
    edit_config,
    given,
    ours,
    sample_tokens,
    transformers_logits,
    write,
)
from torchtitan_dp.checkpoint.terms import settings_of
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import Settings
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.hugging_face_weights import export

LINEAR = {"rope_type": "linear", "factor": 3.7}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "linear": LINEAR,
    "yarn": YARN,
    "mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
}


def scale(folder: Path, rope: dict[str, Any], *, theta: float, old: bool) -> None:
    """Edit `config.json`, in the keys of transformers 5 or those before."""
    edit_config(folder, rope_parameters=None, rope_scaling=None, rope_theta=None)
    keys: dict[str, Any] = {"rope_parameters": {**rope, "rope_theta": theta}}
    if old:
        type_of = {**rope, "type": rope["rope_type"]}
        del type_of["rope_type"]
        keys = {"rope_scaling": type_of, "rope_theta": theta}
    edit_config(folder, **keys)


def assert_logits(folder: Path, config: JobConfig, expected: torch.Tensor) -> Path:
    """Ours of the folder, and those of its export, are the expected ones; the export."""
    model = ours(config, folder)
    assert (model(sample_tokens()) - expected).abs().max() < 1e-4
    exported = Path(export(model, config))
    assert torch.equal(transformers_logits(exported), expected)
    return exported


@torch.no_grad()
@pytest.mark.parametrize(
    "tied, old", [(True, False), (False, True)], ids=["tied", "untied, keys of transformers 4"]
)
@pytest.mark.parametrize("name", ["linear", "yarn", "mscale"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_and_out_the_logits_are_those_of_transformers(
    kind: str, name: str, old: bool, tied: bool, tmp_path: Path
) -> None:
    """Of 96 tokens: beyond the 32 of the original window."""
    folder = write(kind, tmp_path / "given", tied=tied)
    plain = transformers_logits(folder)
    scale(folder, SCALINGS[name], theta=1e4, old=old)
    expected = transformers_logits(folder)
    assert (plain - expected).abs().max() > 0.1
    exported = assert_logits(folder, given(folder), expected)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, exported))
    assert before == after


EXTENDED = (
    "--rope.type=yarn",
    "--rope.factor=8",
    "--rope.original_max_position_embeddings=32",
    "--rope.beta_fast=4",
    "--rope.theta=20000",
)
CHOICES = {
    "yarn": (EXTENDED, {**YARN, "beta_fast": 4.0}, 20000.0, 256),
    "linear": (("--rope.type=linear", "--rope.factor=2"), {**LINEAR, "factor": 2.0}, None, 1024),
    "theta": (("--rope.theta=20000", "--training.seq_len=600"), None, 20000.0, 600),
    "default": (("--rope.type=default",), None, None, 512),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_model_is_extended_by_keys(choice: str, kind: str, tmp_path: Path) -> None:
    """As by an edited `config.json`, or plain in place of its scaling; an export has the edit."""
    folder = write(kind, tmp_path / "given")
    overrides, rope, theta, window = CHOICES[choice]
    own_theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edited = shutil.copytree(folder, tmp_path / "edited")
    scale(edited, rope or {"rope_type": "default"}, theta=theta or own_theta, old=False)
    if choice == "default":
        scale(folder, YARN, theta=own_theta, old=False)
    config = given(folder, *overrides)
    exported = assert_logits(folder, config, transformers_logits(edited))
    written = json.loads((exported / "config.json").read_text())
    assert written["max_position_embeddings"] == window
    again, asked = shape(given(exported)), shape(config)
    assert again.rope_parameters() == asked.rope_parameters()


@pytest.mark.parametrize(
    "kind, options",
    [
        ("gemma3", ("--rope.theta=2e4",)),  # one for each kind of layer
        ("gemma3", EXTENDED),
        ("phi3", EXTENDED),  # its only scaling is longrope
        ("gpt_oss, original", EXTENDED),
    ],
)
def test_terms_that_the_family_would_replace_are_refused(
    kind: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    kind, _, original = kind.partition(", ")
    arguments(kind).config().save_pretrained(tmp_path)
    if original:  # beside the terms: transformers takes it first
        edit_config(tmp_path, original_max_position_embeddings=64)
    with pytest.raises(ValueError, match=f"rope: transformers' {kind}.* has other terms of rotary"):
        shape(build.config(f"--model.hf_assets_path={tmp_path}", *options))


@torch.no_grad()
def test_adapters_come_with_the_positions_that_they_were_trained_at(tmp_path: Path) -> None:
    folder = write("llama", tmp_path / "given")
    options = "--lora.rank=2", "--lora.targets=q_proj"
    plain = given(folder, *options)
    exported = Path(export(ours(plain, folder), plain))
    assert not (exported / "config.json").exists()
    config = given(folder, *options, *EXTENDED)
    model = ours(config, folder)  # B is 0
    exported = Path(export(model, config))
    assert (exported / "adapter_config.json").exists()
    base = transformers_logits(folder, config=AutoConfig.from_pretrained(exported))
    assert (model(sample_tokens()) - base).abs().max() < 1e-4


def test_a_resume_with_other_positions_is_refused() -> None:
    def terms(*overrides: str) -> Settings:
        return settings_of(build.config(*overrides), 100, 1.0)

    extended = terms(*EXTENDED)
    assert terms(*EXTENDED).changed(since=extended) == ""
    for other in ((), EXTENDED[:-1], (*EXTENDED, "--rope.factor=16")):
        said = terms(*other).changed(since=extended)
        assert re.match(r"rope = .*: this run was started with .*factor 8", said)
    assert Settings.from_fields(extended.fields()) == extended
