"""A mesh's clipped sum against a one-process loop of single samples."""

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.processes.ranks import on_ranks


def error_on_this_rank(
    degrees: tuple[int, int, int],
    overrides: list[str],
    changes: dict[str, object],
    C: float,
    samples: int,
    group_of: Callable[[str], str] | None = None,
    family: str = "llama3",
) -> tuple[float, float]:
    """(error of the clipped sum, error of the norms) against the loop."""
    from tests import build

    args = dataclasses.replace(build.QWEN if family == "qwen3" else build.ARGS, **changes)
    tokens_NT, labels_NT = build.data(samples=samples)
    built = build.build(degrees, *overrides, args=args, max_grad_norm=C)
    actual, norms = built.clipped_sum(tokens_NT, labels_NT)
    gradients = build.reference_gradients(build.reference_model(args), tokens_NT, labels_NT)
    true_norms = [build.norm(gradient) for gradient in gradients]
    expected = build.reference_sum(gradients, C, *([group_of] if group_of else []))
    error = build.relative_error(actual, expected)
    return error, norm_error(built, norms, true_norms)


def norm_error(built, norms: list[float], true_norms: list[float]) -> float:
    """The largest relative error of the norms of the samples this rank was dealt; 0 of none."""
    mine = built.slots(np.arange(len(true_norms)))
    errors = [abs(n / true_norms[i] - 1) for n, i in zip(norms, mine, strict=True) if i >= 0]
    return max(errors, default=0.0)


def check(
    degrees: tuple[int, int, int],
    *overrides: str,
    tolerance: float = 1e-5,
    C: float = 1.0,
    samples: int = 3,
    group_of: Callable[[str], str] | None = None,
    family: str = "llama3",
    **changes: object,
) -> None:
    """The sum and the norms are the loop's, on every rank; `changes` are to the model's shape."""
    world_size = degrees[0] * degrees[1] * degrees[2]
    arguments = (degrees, list(overrides), changes, C, samples, group_of, family)
    results = on_ranks(world_size, error_on_this_rank, *arguments)
    for error, norm_error in results:
        # clip() aims at C (1 - 1e-5)
        assert error < tolerance + 1e-5, (error, norm_error)
        assert norm_error < tolerance, (error, norm_error)
