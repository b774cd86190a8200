"""Hazard 47: whether, and when, a run ends must not tell what its records hold.

Two neighbours of 20 text files: the last one is empty, or long. Without the rehearsal the one run
ends well under a memory limit at which the other dies when it draws the long record.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import neighbours
from tests.processes import forks
from tests.processes.runs import arguments, with_sigma

LONG = "long " * 2000  # more than seq_len tokens
SEED = 3  # draws the last file within the three steps, but not in the first
LOW, HIGH = 64 * 2**20, 1024 * 2**20  # a sample of 256 tokens fits; one of 2,048 does
STEPS = 3
TOO_LARGE = "<|surplus|>"  # the token that the model's vocabulary lacks


def records(folder: Path, last: str) -> Path:
    folder.mkdir()
    for i in range(19):
        (folder / f"{i:02}.txt").write_text(f"record {i} says {i}")
    (folder / "19.txt").write_text(last)
    return folder


def tokenizer(folder: Path) -> Path:
    """Bytes, and one token more than the debug model's vocabulary has."""
    import tokenizers

    from torchtitan_dp.models.hugging_face import FLAVORS
    from torchtitan_dp.release.__main__ import BYTE_TOKENIZER

    shutil.copytree(BYTE_TOKENIZER, folder)
    path = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    missing = FLAVORS["debug"]["vocab_size"] - backend.get_vocab_size()
    backend.add_tokens([f"<|unused {i}|>" for i in range(missing)])
    backend.add_tokens([TOO_LARGE])
    backend.save(path)
    return folder


def task(
    out: Path,
    data: Path,
    *overrides: str,
    headroom: int | None,
    rehearsed: bool = True,
    threads: bool = True,
) -> dict[str, Any]:
    argv = arguments(
        *(out, data, "--training.seq_len=2048", "--training.global_batch_size=6"),
        *(f"--training.steps={STEPS}", "--checkpoint.no-enable", "--metrics.no-enable_tensorboard"),
        "--parallelism.context_parallel_degree=1",
        *with_sigma(1),
        *overrides,
    )
    return {"argv": argv, "headroom": headroom, "rehearsed": rehearsed, "threads": threads}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str, Path]]:
    """Exit code, output and folder of each run."""
    root = tmp_path_factory.mktemp("neighbours")
    data = {"A": records(root / "A", ""), "B": records(root / "B", LONG)}
    surplus = {"A": root / "A", "B": records(root / "C", f"one {TOO_LARGE} is enough")}
    assets = f"--model.hf_assets_path={tokenizer(root / 'assets')}"
    seed = f"--privacy.debug_seed={SEED}"
    tasks: dict[str, Any] = {}
    for name in ("A", "B"):
        for how, options, overrides in (
            ("unrehearsed", {"headroom": LOW, "rehearsed": False}, (seed,)),
            ("low", {"headroom": LOW}, ()),
            ("threadless", {"headroom": LOW, "threads": False}, ()),
            ("high", {"headroom": HIGH}, ()),
        ):
            out = root / f"{how}_{name}"
            tasks[out.name] = task(out, data[name], *overrides, **options)
        out = root / f"surplus_{name}"
        tasks[out.name] = task(out, surplus[name], assets, "--training.seq_len=64", headroom=None)
    codes = {
        name: forks.call(neighbours.ended, *task.values(), root / f"{name}.log")
        for name, task in tasks.items()
    }
    return {
        name: (code, (root / f"{name}.log").read_text(errors="replace"), root / name)
        for name, code in codes.items()
    }


def published(folder: Path) -> dict[str, Any]:
    """`privacy.json`, without the name that is drawn at random."""
    content = json.loads((folder / "privacy.json").read_text())
    content.pop("run")
    return content


@pytest.mark.thorough
@pytest.mark.slow
def test_row47_without_a_rehearsal_neighbours_end_differently(ended):
    """What the other tests would not see if the limit did not separate the two."""
    code, said, folder = ended["unrehearsed_A"]
    assert code == 0, said
    assert published(folder)["steps"] == STEPS
    code, said, folder = ended["unrehearsed_B"]
    assert code == 1
    assert "can't allocate memory" in said
    assert 0 < published(folder)["steps"] < STEPS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["low", "threadless"])
def test_row47_neighbours_end_alike_in_the_rehearsal(ended, how):
    """Without memory for threads too: with torch's CUDA build in the first backward, which starts
    more of them than there is room for; its CPU build, which starts none, gets to longer lengths.
    """
    for name in (f"{how}_A", f"{how}_B"):
        code, said, folder = ended[name]
        assert code == 1, said
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        begun = "error: rehearsal before the first step: a microbatch of 1 sample of"
        assert line.startswith(begun)
        assert "out of memory" in line
        assert how == "threadless" or "what would fit: training.seq_len = " in line
        assert "Traceback" not in said
        assert not {"privacy.json", "steps_executed.log"} & {*os.listdir(folder)}
    assert os.listdir(ended[f"{how}_A"][2]) == os.listdir(ended[f"{how}_B"][2])
