"""The gradient methods that `privacy.gradient_method` names, and the one builder of private steps.

Only `METHODS` distinguishes their names: code that treats one method differently asks for the fact
behind the difference, which a new method states here, once. Training, the plan's fake step, the
audit's game and the tests build their steps by `build_step`, so that the step that is predicted,
attacked and tested is the step that trains.

Guarantee:
    The clipped sum and every optimizer of one `PrivateStep` have the same C, so that noise fits the
    sum's sensitivity. This rests on the guarantees of `clipped_sum` and `optimizer`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod
from torchtitan_dp.gradients.fsdp import ReductionGroups, free_gathered
from torchtitan_dp.gradients.ghost import GhostGradients
from torchtitan_dp.gradients.grad_sample import GradSampleGradients
from torchtitan_dp.gradients.microbatch import MicrobatchGradients
from torchtitan_dp.gradients.randomized_norm import RandomizedNorms
from torchtitan_dp.optimizer import DPOptimizer, MomentumSGD, inner_optimizers
from torchtitan_dp.privacy.clipping import clip_policy
from torchtitan_dp.privacy.settings import Privacy

# Builds a method on a model that is laid over the mesh already. The modules are one of each FSDP2
# group that holds a trainable parameter.
Build = Callable[[nn.Module, list[FSDPModule], ClippedSum, Privacy], GradientMethod]


@dataclass(frozen=True)
class Method:
    """One method: its builder, and its needs of a model and of a configuration."""

    kind: type[GradientMethod]

    build: Build

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

    own_settings: tuple[str, ...] = ()
    """The keys of `[privacy]` that this method reads and not all others do."""

    smallest_layer: Callable[[Privacy], tuple[int, int, int]] = lambda _: (1, 1, 1)
    """(T, P, D): the tokens, rows and columns of the smallest layer on which the method differs."""


def _estimates(clipped_sum: ClippedSum, privacy: Privacy) -> RandomizedNorms:
    terms = privacy.projections, privacy.norm_estimator, clipped_sum.groups.cp
    capped = privacy.underestimates == "capped"
    return RandomizedNorms(*terms, capped=capped, secure=privacy.secure_noise)


def _smallest_estimated(privacy: Privacy) -> tuple[int, int, int]:
    """Return a square layer that is large enough: 3 k n < min(2 n^2, n^2)."""
    size = 4 * privacy.projections
    return size, size, size


def _ghost_passes(privacy: Privacy) -> int:
    return 2 if privacy.ghost_passes == "two" else 1


METHODS: dict[str, Method] = {
    "microbatch": Method(
        MicrobatchGradients,
        lambda _, modules, total, __: MicrobatchGradients(modules, total),
        "one sample per microbatch; its reduced gradient is already per-sample",
        per_sample_layers=False,
        averages_windows=True,
    ),
    # Per-sample layers hand over what they have, or start collectives, within backward.
    "grad_sample": Method(
        GradSampleGradients,
        lambda model, _, total, privacy: GradSampleGradients(
            model, total, shard_grad_samples=privacy.shard_grad_samples
        ),
        "several samples per microbatch; for per-sample gradients that fit in memory",
        per_sample_layers=True,
        own_settings=("shard_grad_samples",),
    ),
    "ghost": Method(
        GhostGradients,
        lambda model, _, total, privacy: GhostGradients(model, total, passes=privacy.ghost_passes),
        "norms without per-sample gradients; for short contexts and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
        own_settings=("ghost_passes",),
    ),
    "randomized": Method(
        GhostGradients,
        lambda model, _, total, privacy: GhostGradients(
            model, total, passes=privacy.ghost_passes, norms=_estimates(total, privacy)
        ),
        "estimated norms; for long contexts, several samples and little memory",
        per_sample_layers=True,
        backward_passes=_ghost_passes,
        estimates_norms=True,
        own_settings=("ghost_passes", "projections", "norm_estimator", "underestimates"),
        smallest_layer=_smallest_estimated,
    ),
}


def automatic(samples: int) -> Literal["microbatch", "grad_sample"]:
    """Return the method of `auto`, which depends on the microbatch size alone."""
    return "microbatch" if samples == 1 else "grad_sample"


@dataclass(frozen=True)
class PrivateStep:
    """The parts that turn per-sample losses into a noised update, on this rank."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]  # every trainable one, by canonical name
    clipped_sum: ClippedSum
    gradients: GradientMethod
    secure_noise: bool

    @property
    def max_grad_norm(self) -> float:
        """C, of the clip policy."""
        return self.clipped_sum.policy.max_grad_norm

    def optimizer(
        self,
        inner: Optimizer,
        *,
        noise_multiplier: float,
        expected_batch_size: float,
        noise_of_step: float | None = None,
    ) -> DPOptimizer:
        """Make the optimizer that adds noise to the clipped sum and steps `inner` on the result.

        Args:
            inner: the optimizer that `DPOptimizer` wraps, over exactly `parameters`.
            noise_multiplier: sigma; `MomentumSGD` steps in multiples of its noise.
            expected_batch_size: the divisor of the sum, fixed and public.
            noise_of_step: `Mechanism.noise_of_step`, for noise that is correlated over steps; by
                default sigma.
        """
        noise_std = (noise_multiplier or 1.0) * self.max_grad_norm / expected_batch_size
        for optimizer in inner_optimizers(inner):
            if isinstance(optimizer, MomentumSGD):
                optimizer.noise_std = noise_std
        return DPOptimizer(
            inner,
            self.parameters,
            noise_multiplier=noise_multiplier if noise_of_step is None else noise_of_step,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=expected_batch_size,
            secure_noise=self.secure_noise,
            free_gathered=functools.partial(free_gathered, self.model),
        )


def build_step(
    privacy: Privacy,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    fsdp_modules: list[FSDPModule],
    groups: ReductionGroups,
    *,
    max_grad_norm: float,
    clipped_sum_type: type[ClippedSum] = ClippedSum,
) -> PrivateStep:
    """Build the step that a checked configuration asks for.

    Args:
        model: parallelized for this configuration, with per-sample layers if its method needs them.
        parameters: every trainable parameter, a DTensor sharded on dim 0, by canonical name.
        fsdp_modules: one module of each FSDP2 group that holds a trainable parameter.
        groups: the mesh's process groups.
        max_grad_norm: C; the ledger's, if there is one.
        clipped_sum_type: the plan passes one that allocates its memory up front.
    """
    policy = clip_policy(parameters, privacy, max_grad_norm=max_grad_norm)
    clipped_sum = clipped_sum_type(parameters, groups, policy)
    method = METHODS[privacy.gradient_method]
    gradients = method.build(model, fsdp_modules, clipped_sum, privacy)
    return PrivateStep(model, parameters, clipped_sum, gradients, privacy.secure_noise)
