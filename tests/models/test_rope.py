"""Scaled rotary embeddings: those of `transformers`, from `config.json`, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hugging_face import (
    edit_config,
    given,
    ours,
    sample_tokens,
    transformers_logits,
    write,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.hugging_face_weights import export

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.7},
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
