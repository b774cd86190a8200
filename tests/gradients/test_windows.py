"""Several windows of a unit: their mean gradient is clipped once, on every mesh (row 57). What is
held against the loop is the trainer's own `accumulate`, fed by the loader."""

import dataclasses
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import build
from tests.data.drawn import dealt, sample, samples_of
from tests.processes.ranks import on_ranks
from torchtitan_dp.config.derived import ladder
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.data.dataset import IGNORE_INDEX, Samples
from torchtitan_dp.privacy.sampling import choices
from torchtitan_dp.train.processor import SampleStatistics
from torchtitan_dp.train.trainer import DPTrainer

K = 3
KEY = bytes(range(32))
# More records than windows, as many, fewer, some without text, and none that has any.
UNITS: dict[str, list[str | None]] = {
    "ann": ["a", "bb" * 4, "the third of five notes", "d" * 40, "e e e e"],
    "bob": ["x" * 9, "y" * 30, "z"],
    "cyd": ["one note alone"],
    "dan": ["p" * 20, None, "", "q"],
    "eve": [None, None],
}


def mean_gradients(samples: Samples, model: Any, units: np.ndarray) -> list[Any]:
    """Each unit's mean over its windows with a target, by a loop of single samples."""
    means = []
    for position, unit in enumerate(units):
        windows = [sample(samples, int(unit), None, choices(KEY, position), k, K) for k in range(K)]
        found = [
            build.reference_gradients(model, tokens_T[None], labels_T[None])[0]
            for tokens_T, labels_T in windows
        ]
        count = max(sum(bool((labels_T != IGNORE_INDEX).any()) for _, labels_T in windows), 1)
        means.append({name: sum(one[name] for one in found) / count for name in found[0]})
    return means


def accumulated(degrees, options, C, drawn) -> tuple[float, float, list[float]]:
    """(error of the clipped sum, its norm, the mean gradients' norms) on this rank."""
    args = dataclasses.replace(build.ARGS, vocab_size=258)
    built = build.build(degrees, *options, args=args, max_grad_norm=C)
    rank = torch.distributed.get_rank() // degrees[2]
    with tempfile.TemporaryDirectory() as place:
        samples, units = samples_of(Path(place), UNITS, build.T, one_record=True)
        loader = RecordLoader(
            samples,
            np.array(units),
            ranks=degrees[0] * degrees[1],
            rank=rank,
            batch_size=built.batch_size,
            windows=K,
        )
        positions = np.array([list(UNITS).index(name) for name in drawn], dtype=np.int64)
        draw = Draw(positions, KEY)
        rungs = ladder(build.config(*options, degrees=degrees))
        assert len(set(loader.lengths(draw, rungs).tolist())) > 1 or len(drawn) == 1
        trainer = SimpleNamespace(
            device=torch.device("cpu"), gradients=built.gradients, sample_losses=built.losses
        )
        for microbatch in dealt(loader, draw, rungs):
            DPTrainer.accumulate(trainer, microbatch, SampleStatistics())  # type: ignore[arg-type]
        means = mean_gradients(samples, build.reference_model(args), np.array(units))
    whole = built.total()
    wanted = [means[position] for position in positions]
    error = build.relative_error(whole, build.reference_sum(wanted, C))
    return error, build.norm(whole), [build.norm(one) for one in wanted]


@pytest.mark.parametrize(
    "degrees, options",
    [
        ((1, 1, 1), ("--training.local_batch_size=2", "--privacy.gradient_method=microbatch")),
        ((1, 2, 1), ()),  # five units on two ranks: one has an empty slot
        ((1, 1, 2), ("--activation_checkpoint.mode=full", "--parallelism.keep_weights_gathered")),
    ],
    ids=str,
)
def test_row57_the_mean_is_clipped_once(degrees, options):
    arguments = (degrees, options, 0.5, tuple(UNITS))
    for error, _, norms in on_ranks(math.prod(degrees), accumulated, *arguments):
        assert error < 2e-5
        assert norms[-1] == 0
        assert max(norms) > 0.5  # something is clipped


@pytest.mark.parametrize("name, C", [("ann", 0.5), ("bob", 0.5), ("ann", 1e6)])
def test_row57_a_unit_moves_the_sum_by_at_most_C(name: str, C: float) -> None:
    ((error, norm, (own,)),) = on_ranks(1, accumulated, (1, 1, 1), (), C, (name,))
    assert norm <= C
    assert norm == pytest.approx(min(own, C), rel=1e-4)  # a mean: K of them would be K times that
    assert error < 2e-5
