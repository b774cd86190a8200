"""The selfcheck's comparison of clipped sums and norms with the plain loop, on gloo ranks."""

import math

import torch

from tests import build
from tests.models.causal_lm.families import arguments
from tests.processes.ranks import on_ranks
from torchtitan_dp.selfcheck.small import Terms
from torchtitan_dp.selfcheck.steps import Ranks, clipped_sum

Degrees = tuple[int, int, int]


def excess_on_this_rank(
    degrees: Degrees,
    overrides: list[str],
    changes: dict[str, object],
    family: str = "llama",
    tolerance: float | None = None,
) -> dict[str, float]:
    """The errors of the sum and of the norms that are above their bounds.

    Args:
        changes: to the model's `config.json`; and `lora`.
        family: `llama`, of `build.ARGS`, or one of the tests' others.
        tolerance: of the norms; by default what the dtype allows.
    """
    if family == "llama":
        args = build.llama(**changes)
    else:
        args = arguments(family, build.T, **changes)
    terms = Terms(build.config(*overrides, degrees=degrees), args)
    room = tolerance or 0.0
    return {
        what: value
        for what, (value, bound) in clipped_sum(Ranks(torch.device("cpu")), terms).items()
        if not value <= max(bound, room + 1e-5)
    }


def check(
    degrees: Degrees,
    *overrides: str,
    tolerance: float | None = None,
    family: str = "llama",
    **changes: object,
) -> None:
    """The sum and the norms are the loop's, on every rank; `changes` are to the
    model's `config.json`, and `lora`."""
    arguments = (degrees, list(overrides), changes, family, tolerance)
    for excess in on_ranks(math.prod(degrees), excess_on_this_rank, *arguments):
        assert excess == {}
