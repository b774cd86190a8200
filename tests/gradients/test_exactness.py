"""Every norm and the clipped sum equal a loop of single samples: one matrix of what is combined.

Hazard rows 1 to 7, 13, 22, 27, 28, 29, 56 and 67. A cell is one value of each axis, compared as the
selfcheck does, while asynchronous collectives are late on purpose (`processes.late`). Its
samples have weights and targets of all kinds: some are clipped, one is NaN, one has no target,
one an answer at its end, and the last microbatches are padded.

All cells would be millions. By default every allowed pair of values meets in some cell, and under
`thorough` every three: a fault mostly takes no more settings than that to show.
"""

import functools
import itertools
import math
from unittest import mock

import pytest
import torch

from tests import build
from tests.models.causal_lm.families import arguments
from tests.processes.ranks import on_ranks
from torchtitan_dp.config import ALL_LINEAR
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.selfcheck.small import VARIANTS, Terms
from torchtitan_dp.selfcheck.steps import Ranks, clipped_sum

Cell = dict[str, str]
FULL, SELECTIVE = (f"--activation_checkpoint.mode={mode}" for mode in ("full", "selective"))
TILES = "microbatch, feed-forward in tiles"
OF_SETTING = {
    ("in_tiles", True): "--training.feed_forward_chunk=7",
    ("shard_grad_samples", False): "--privacy.no-shard_grad_samples",
    ("ghost_passes", "two"): "--privacy.ghost_passes=two",
}


def methods() -> dict[str, list[str]]:
    """Each variant of a method with exact norms, the selfcheck's, -> its options."""
    found = {}
    for method, variants in VARIANTS.items():
        found[method] = own = [f"--privacy.gradient_method={method}"]
        for variant, settings in variants.items():
            found[f"{method}, {variant}"] = own + [OF_SETTING[one] for one in settings.items()]
    return found


# dp_replicate, dp_shard and cp
DEGREES = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
MESHES = {str(degrees): degrees for degrees in DEGREES}

# Of each axis the first value is the usual one, which every other value meets. At 32 tokens `ghost`
# forms all gradients of a width of 24 for their norms, none of the matrices' of 96, some of 40's.
OPTIONS: dict[str, dict[str, list[str]]] = {
    "way": methods(),
    "mesh": {mesh: [] for mesh in MESHES},
    "model": {
        **{name: [] for name in ("narrow", "tied", "wide", "medium", "adapters", "B alone")},
        "qwen3": ["--model.name=transformers"],
    },
    "checkpointing": {
        "none": [],
        "full": [FULL],
        "no early stop": [FULL, "--activation_checkpoint.no_early_stop"],
        "inputs on the host": [FULL, "--activation_checkpoint.offload_inputs"],
        "every block": [SELECTIVE, "--activation_checkpoint.selective_ac_option=1"],
        "operators": [SELECTIVE, "--activation_checkpoint.selective_ac_option=op"],
    },
    "clipping": {
        "flat": [],
        "automatic": ["--privacy.clip_function=automatic"],
        "by layer": ["--privacy.clipping=per_layer"],
        "by group": ["--privacy.clipping=per_block"],
    },
    "ring": {
        f"{balancer}, {rotate}": [
            *("--parallelism.context_parallel_load_balancer", balancer),
            f"--parallelism.context_parallel_rotate_method={rotate}",
        ]
        for balancer in ("headtail", "None")
        for rotate in ("allgather", "alltoall")
    },
    "samples": {str(n): [f"--training.local_batch_size={n}"] for n in (2, 1, 3, 4)},
    "head": {
        "chunks": ["--training.loss_chunk_tokens=5"],
        "whole": ["--training.loss_chunk_tokens=0"],
    },
    # At once: on one rank, where a small model is one FSDP2 group.
    "gathered": {
        "each time": [],
        "at once": [],
        "once a step": ["--parallelism.keep_weights_gathered"],
    },
    "compiled": {"no": [], "yes": ["--compile.enable", "--compile.backend=aot_eager"]},
}
MODELS: dict[str, dict[str, object]] = {
    "narrow": {},
    "tied": {"tie_word_embeddings": True},
    "wide": {"hidden_size": 96, "vocab_size": 101, "tie_word_embeddings": True},
    "medium": {"hidden_size": 40, "vocab_size": 101},
    "adapters": {"lora": LoRA(3, 5.0, (ALL_LINEAR,))},
    "B alone": {"lora": LoRA(2, 3.0, ("q_proj", "o_proj", "down_proj"), freeze_a=True)},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
}


def allowed(cell: Cell) -> bool:
    """Whether a configuration may have these values together; axes may be missing."""
    way, checkpointing = cell.get("way", ""), cell.get("checkpointing")
    ring, compiled = cell.get("ring", "headtail, allgather"), cell.get("compiled") == "yes"
    refused = [
        ring != "headtail, allgather" and cell.get("mesh", "")[-2:] == "1)",  # there is no ring
        way == "ghost, two passes" and checkpointing == "operators",
        compiled and (checkpointing == "operators" or way.startswith(("grad_sample", "ghost"))),
        checkpointing in ("operators", "every block") and way == TILES,
    ]
    return not any(refused)


def covering(together: int) -> list[Cell]:
    """Cells in which any so many values that may meet do: at first, each way on each mesh."""
    wanted = (
        frozenset(zip(axes, values, strict=True))
        for axes in itertools.combinations(OPTIONS, together)
        for values in itertools.product(*(OPTIONS[axis] for axis in axes))
    )
    left = dict.fromkeys(values for values in wanted if allowed(dict(values)))

    def met(cell: Cell) -> int:
        groups = itertools.combinations(cell.items(), together)
        return sum(frozenset(group) in left for group in groups)

    found = []
    while left:
        cell = dict(next(iter(left)))
        for axis in OPTIONS:
            values = [cell[axis]] if axis in cell else OPTIONS[axis]
            choices = [cell | {axis: value} for value in values]
            cell = max(filter(allowed, choices), key=met)
        for group in itertools.combinations(cell.items(), together):
            left.pop(frozenset(group), None)
        found.append({axis: cell[axis] for axis in OPTIONS})
    return found


@functools.cache
def cells_of(together: int) -> dict[tuple[str, str], list[Cell]]:
    """The cells of `covering`, by way and mesh."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in covering(together):
        found.setdefault((cell["way"], cell["mesh"]), []).append(cell)
    return found


def excess_on_this_rank(
    degrees: tuple[int, int, int],
    overrides: list[str],
    changes: dict[str, object],
    family: str = "llama",  # of `build.ARGS`, or one of the tests' others
) -> dict[str, float]:
    """The errors of the sum and of the norms, by the selfcheck, that are above their bounds."""
    args = build.llama(**changes) if family == "llama" else arguments(family, build.T, **changes)
    terms = Terms(build.config(*overrides, degrees=degrees), args)
    return {
        what: value
        for what, (value, bound) in clipped_sum(Ranks(torch.device("cpu")), terms).items()
        if not value <= max(bound, 1e-5)
    }


def excess_of(cell: Cell) -> dict[str, float]:
    """What is not exact on this rank, and by how much."""
    torch.compiler.reset()  # beside another model's graphs the next takes 5 times as long
    overrides = [option for axis, value in cell.items() for option in OPTIONS[axis][value]]
    changes = dict(MODELS[cell["model"]])
    family = changes.pop("family", "llama")
    at_most = 2**24 if cell["gathered"] == "at once" else 0
    with mock.patch("torchtitan_dp.models.parallelize.IN_ONE_GROUP", at_most):
        return excess_on_this_rank(MESHES[cell["mesh"]], overrides, changes, family)


def check(cells: list[Cell]) -> None:
    ranks = math.prod(MESHES[cells[0]["mesh"]])
    for cell in cells:  # a call each: `on_ranks` waits minutes at most
        for found in on_ranks(ranks, excess_of, cell):
            assert found == {}, cell


by_way_and_mesh = pytest.mark.parametrize(
    ("way", "mesh"), list(itertools.product(OPTIONS["way"], OPTIONS["mesh"])), ids=str
)


@pytest.mark.thorough_cases("microbatch, feed-forward in tiles-(1, 1, 4)")  # (1, 1, 2) stays
@by_way_and_mesh
def test_every_pair_of_values(way, mesh):
    check(cells_of(2)[way, mesh])


@pytest.mark.thorough
@by_way_and_mesh
def test_every_three_values(way, mesh):
    check(cells_of(3)[way, mesh])


@pytest.mark.parametrize("way", OPTIONS["way"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_within_their_rounding(dtype, way):
    """Reduced in fp32; fp16 without loss scaling (DP-ZeRO, section 3.4)."""
    changes = {"tie_word_embeddings": True}
    options = [*OPTIONS["way"][way], "--training.local_batch_size=2"]
    options.append(f"--training.mixed_precision_param={dtype}")
    for excess in on_ranks(2, excess_on_this_rank, (1, 1, 2), options, changes):
        assert excess == {}
