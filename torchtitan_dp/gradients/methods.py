"""The gradient methods that `privacy.gradient_method` names: what each needs of a model and of a
configuration. `gradients.step` builds them.

Only `METHODS` and `step.BUILD` distinguish their names: other code asks for the fact behind the
difference. Nothing here imports PyTorch, so that a configuration is judged in a second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchtitan_dp.privacy.settings import Privacy


@dataclass(frozen=True)
class Method:
    """The needs of one method."""

    chosen_for: str
    """When to choose it; `docs/methods.md` has the figures."""

    per_sample_layers: bool
    """Whether the model's layers must first be converted by `layers.per_sample_layers`. They start
    collectives within backward, so they are not compiled."""

    backward_passes: Callable[[Privacy], int] = lambda _: 1
    """How often backward runs over a microbatch."""

    averages_windows: bool = False
    """Whether several backward passes can make up one sample's gradient (`GradientMethod.hold`)."""

    estimates_norms: bool = False
    """Whether norms are estimated from `projections`."""

    smallest_layer: Callable[[Privacy], tuple[int, int, int]] = lambda _: (1, 1, 1)
    """(T, P, D): the tokens, rows and columns of the smallest layer on which the method differs."""


def _ghost_passes(privacy: Privacy) -> int:
    return 2 if privacy.ghost_passes == "two" else 1


METHODS: dict[str, Method] = {
    "microbatch": Method(
        "one sample per microbatch; its reduced gradient is already per-sample",
        per_sample_layers=False,
        averages_windows=True,
    ),
    # Per-sample layers hand over what they have, or start collectives, within backward.
    "grad_sample": Method(
        "several samples per microbatch; for per-sample gradients that fit in memory",
        per_sample_layers=True,
    ),
    "ghost": Method(
        "norms without per-sample gradients; for short contexts and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
    ),
    "randomized": Method(
        "estimated norms; for long contexts, several samples and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
        estimates_norms=True,
        # Square, and large enough: 3 k n < min(2 n^2, n^2).
        smallest_layer=lambda privacy: (4 * privacy.projections,) * 3,
    ),
}


def automatic(samples: int) -> Literal["microbatch", "grad_sample"]:
    """Return the method of `auto`, which depends on the microbatch size alone."""
    return "microbatch" if samples == 1 else "grad_sample"
