"""How many random changes of a checkpoint's bytes are told before it is loaded."""

import os
import random
import shutil
from pathlib import Path

from torchtitan_dp.checkpoint import damaged_entry

TRIES = 50


def share_of_flips_told(checkpoint: Path, rng: random.Random) -> str:
    """Change one random byte of a copy, look, and change it back; again and again."""
    told: dict[str, list[bool]] = {"data": [], ".metadata": []}
    copy = checkpoint.with_name("flipped")
    shutil.copytree(checkpoint, copy)
    files = sorted(path for path in copy.iterdir() if path.suffix == ".distcp")
    for number in range(TRIES):
        path = rng.choice(files) if number % 2 else copy / ".metadata"
        place, change = rng.randrange(path.stat().st_size), rng.randrange(1, 256)
        _change(path, place, change)
        kind = ".metadata" if path.name == ".metadata" else "data"
        told[kind].append(damaged_entry(str(copy), 0, 1) != "")
        _change(path, place, change)
    assert damaged_entry(str(copy), 0, 1) == ""
    shutil.rmtree(copy)
    return "; ".join(
        f"{sum(found)} of {len(found)} changed bytes of {kind} told" for kind, found in told.items()
    )


def _change(path: Path, place: int, change: int) -> None:
    with path.open("rb+") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ change]))
