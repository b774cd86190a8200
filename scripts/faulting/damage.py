"""How many random changes of a checkpoint's bytes are told, and what the others do."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.faulting.run import require
from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.checkpoint.folder import damaged_entry

TRIES = 200


def share_of_flips_told(checkpoint: Path, rng: random.Random) -> str:
    """Change one random byte of a copy, look, load it, and change it back; again and again."""
    copy = checkpoint.with_name("flipped")
    shutil.copytree(checkpoint, copy)
    saved = _load(checkpoint, checkpoint)
    files = sorted(path for path in copy.iterdir() if path.suffix == ".distcp")
    found: Counter[tuple[str, str]] = Counter()
    for number in range(TRIES):
        path = rng.choice(files) if number % 2 else copy / safe_load.METADATA_FILE
        place, change = rng.randrange(path.stat().st_size), rng.randrange(1, 256)
        _change(path, place, change)
        outcome = _outcome(copy, checkpoint, saved)
        _change(path, place, change)
        require(outcome != "loaded as something else", f"{path.name}: byte {place} ^ {change}")
        found[path.name if path.suffix != ".distcp" else "data", outcome] += 1
    require(damaged_entry(str(copy), 0, 1) == "", "the copy is whole again")
    shutil.rmtree(copy)
    told = (f"{count} in {kind} {outcome}" for (kind, outcome), count in sorted(found.items()))
    return f"of {TRIES} changed bytes " + ", ".join(told)


def _outcome(copy: Path, checkpoint: Path, saved: dict[str, Any]) -> str:
    if damaged_entry(str(copy), 0, 1):
        return "told before loading"
    try:
        loaded = _load(copy, checkpoint)
    except CheckpointException:
        return "refused in loading"
    same = all(_bits(loaded[name]) == _bits(saved[name]) for name in saved)
    return "without effect" if same else "loaded as something else"


def _load(folder: Path, template: Path) -> dict[str, Any]:
    """All that `template` holds, from `folder`."""
    held = safe_load.read_metadata(template).state_dict_metadata
    state: dict[str, Any] = {
        name: torch.full(kind.size, torch.nan, dtype=kind.properties.dtype)
        if isinstance(kind, TensorStorageMetadata)
        else None
        for name, kind in held.items()
    }
    safe_load.load(state, str(folder), no_dist=True)
    return state


def _bits(value: Any) -> object:
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _change(path: Path, place: int, change: int) -> None:
    with path.open("rb+") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ change]))
