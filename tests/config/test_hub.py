"""Names on the Hugging Face hub, in a cache that the test makes: nothing asks a network."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from tests.build import config
from torchtitan_dp.config.hub import model_folder
from torchtitan_dp.config.load import RUN_CONFIG_FILE, read_config

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
MODEL = {"config.json": "{}", "tokenizer.json": "{}", "original/config.json": "{}"}
RECORDS = {"data/train.jsonl": "{}", "data/test.jsonl": "{}", "README.md": "of no use"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with a model and a data set in two revisions, of which NEW is `main`."""
    constants = "huggingface_hub.constants"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"{constants}.{name}", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", True)
    for kind, files in (("models", MODEL), ("datasets", RECORDS)):
        place = tmp_path / "hub" / f"{kind}--of--it"
        for revision in (OLD, NEW):
            for name, text in files.items():
                path = place / "snapshots" / revision / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(NEW)
    return tmp_path / "hub"


def test_names_become_folders_of_the_cache(cache: Path, tmp_path: Path) -> None:
    found = config(
        "--model.hf_assets_path=of/it", f"--training.dataset_path=hf://datasets/of/it@{OLD}/data"
    )
    assert found.model.hf_assets_path == str(cache / "models--of--it" / "snapshots" / NEW)
    snapshots = cache / "datasets--of--it" / "snapshots"
    assert found.training.dataset_path == str(snapshots / OLD / "data")
    several = config("--training.dataset_path=hf://datasets/of/it/data/*.jsonl,/other")
    assert several.training.dataset_path == [str(snapshots / NEW / "data" / "*.jsonl"), "/other"]


def test_a_run_stays_at_its_first_revision(cache: Path, tmp_path: Path) -> None:
    place = cache / "models--of--it" / "snapshots"
    kept = {"model": {"hf_assets_path": str(place / OLD)}}
    (tmp_path / RUN_CONFIG_FILE).write_text(json.dumps(kept))
    here = f"--job.dump_folder={tmp_path}"
    assert config("--model.hf_assets_path=of/it", here).model.hf_assets_path == str(place / OLD)
    newer = config(f"--model.hf_assets_path=of/it@{NEW}", here)
    assert newer.model.hf_assets_path == str(place / NEW)


def test_weights_come_with_their_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release on the hub: without its `privacy.json` it would count as public."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **how: asked.update(how))
    for loads in ("--checkpoint.initial_load_in_hf", "--checkpoint.no-initial_load_in_hf"):
        model_folder("key", "of/it", "", weights="no" not in loads)
        files = [
            "privacy.json",
            "model.safetensors",
            "original/model.safetensors",
            "pytorch_model.bin",
        ]
        patterns = {"allow_patterns": asked["allow_patterns"]}
        kept = filter_repo_objects(files, ignore_patterns=asked["ignore_patterns"], **patterns)
        assert list(kept) == ["privacy.json", "model.safetensors"][: 1 + ("no" not in loads)]


def test_a_runs_own_configuration_asks_nobody(tmp_path: Path) -> None:
    written = config("--model.hf_assets_path=of/it", f"--job.dump_folder={tmp_path}")
    written.model.hf_assets_path = "of/it"
    (tmp_path / RUN_CONFIG_FILE).write_text(json.dumps(dataclasses.asdict(written)))
    assert read_config(str(tmp_path)).model.hf_assets_path == "of/it"


def test_a_path_of_this_machine_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("of")  # perhaps it is misspelled, and its name nobody's business
    assert config("--model.hf_assets_path=of/it").model.hf_assets_path == "of/it"


@pytest.mark.parametrize(
    "key, value",
    [
        ("model.hf_assets_path", "of/another"),
        ("model.hf_assets_path", "of/it@gone"),
        ("training.dataset_path", "hf://datasets/of/another"),
        ("training.dataset_path", "hf://of/it"),
        ("training.dataset_path", "hf://datasets/of/it//etc/passwd"),
        ("training.dataset_path", "hf://datasets/of/it/../../.."),
    ],
)
def test_what_is_nowhere_is_one_line(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key} = '{value}': .*") as refused:
        config(f"--{key}={value}")
    assert "\n" not in str(refused.value)
