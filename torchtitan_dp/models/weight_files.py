"""The files with the weights of a Hugging Face folder, chosen as transformers chooses them.

`model.safetensors` counts alone where it stands, else the files that the index names. All others,
such as shards of an earlier save, are of another model, and are never opened (hazard row 80).
"""

import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
REMEDY = "download all files of one model"


def weight_files(folder: str) -> list[str]:
    """List the paths; raise ValueError, one line without the key, for a folder that has none."""
    if os.path.isfile(whole := os.path.join(folder, WEIGHTS_FILE)):
        return [whole]
    paths = [os.path.join(folder, name) for name in sorted(set(_index(folder).values()))]
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{path} is missing, which {INDEX_FILE} names; {REMEDY}")
    return paths


def reader_of(folder: str) -> HuggingFaceStorageReader:
    """Return DCP's reader, which opens all safetensors of a folder, of these files alone."""
    reader = HuggingFaceStorageReader(folder)
    reader.fs = _Listed()
    return reader


class _Listed(FileSystem):
    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return weight_files(os.fspath(path))


def tensors(folder: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the dtype of each tensor; raise ValueError, one line without the key,
    for a file that is broken, and a tensor that two files have, or not the one that should."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    places: dict[str, str] = {}
    for path in (paths := weight_files(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    if name in found:
                        raise ValueError(f"{name} is in {places[name]} and in {path}; {REMEDY}")
                    entry = file.get_slice(name)
                    found[name], places[name] = (tuple(entry.get_shape()), entry.get_dtype()), path
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is broken ({error}); download it again") from error
    for name, file_name in {} if paths[0].endswith(WEIGHTS_FILE) else _index(folder).items():
        if places.get(name) != (path := os.path.join(folder, file_name)):
            raise ValueError(f"{path} lacks {name}, which {INDEX_FILE} says is there; {REMEDY}")
    return found


def _index(folder: str) -> dict[str, str]:
    path = os.path.join(folder, INDEX_FILE)
    if not os.path.isfile(path):
        if os.path.isfile(os.path.join(folder, ADAPTER_FILE)):
            remedy = "release its run with --merged and name that folder"
            raise ValueError(f"it is an adapter, not a whole model; {remedy}")
        lacks = f"it has neither {WEIGHTS_FILE} nor {INDEX_FILE}, which names the files of weights"
        raise ValueError(f"{lacks}; download all files of the model")
    try:
        with open(path, encoding="utf-8") as file:
            names: Any = json.load(file)["weight_map"]
        if names and all(name.endswith(".safetensors") for name in names.values()):
            return dict(names)
        raise ValueError("it names no *.safetensors")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is broken ({error}); download it again") from error
