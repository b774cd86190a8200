"""What is published names no place on this machine, wherever a file notes it."""

import json
from pathlib import Path

import pytest

from torchtitan_dp.models.hugging_face import is_local_path, without_local_paths


def test_a_folder_that_exists_here_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
