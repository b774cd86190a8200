"""The one builder of private steps, of each gradient method: training, the plan's fake step, the
audit's game and the tests build theirs by `build_step`, so that the step that is predicted,
attacked and tested is the step that trains.

Guarantee:
    The clipped sum and every optimizer of one `PrivateStep` have the same C, so that noise fits the
    sum's sensitivity. This rests on the guarantees of `clipped_sum` and `optimizer`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod
from torchtitan_dp.gradients.fsdp import ReductionGroups, free_gathered
from torchtitan_dp.gradients.ghost import GhostGradients
from torchtitan_dp.gradients.grad_sample import GradSampleGradients
from torchtitan_dp.gradients.microbatch import MicrobatchGradients
from torchtitan_dp.gradients.norms import RandomizedNorms
from torchtitan_dp.gradients.optimizer import DPOptimizer, MomentumSGD, inner_optimizers
from torchtitan_dp.privacy.clipping import clip_policy
from torchtitan_dp.privacy.settings import Privacy

# Builds a method on a model that is laid over the mesh already. The modules are one of each FSDP2
# group that holds a trainable parameter.
Build = Callable[[nn.Module, list[FSDPModule], ClippedSum, Privacy], GradientMethod]


def _estimates(clipped_sum: ClippedSum, privacy: Privacy) -> RandomizedNorms:
    terms = privacy.projections, privacy.norm_estimator, clipped_sum.groups.cp
    capped = privacy.underestimates == "capped"
    return RandomizedNorms(*terms, capped=capped, secure=privacy.secure_noise)


BUILD: dict[str, Build] = {
    "microbatch": lambda _, modules, total, __: MicrobatchGradients(modules, total),
    "grad_sample": lambda model, _, total, privacy: GradSampleGradients(
        model, total, shard_grad_samples=privacy.shard_grad_samples
    ),
    "ghost": lambda model, _, total, privacy: GhostGradients(
        model, total, passes=privacy.ghost_passes
    ),
    "randomized": lambda model, _, total, privacy: GhostGradients(
        model, total, passes=privacy.ghost_passes, norms=_estimates(total, privacy)
    ),
}
"""By the name of a method, as in `config.derived.METHODS`."""


@dataclass(frozen=True)
class PrivateStep:
    """The parts that turn per-sample losses into a noised update, on this rank."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]  # every trainable one, by canonical name
    clipped_sum: ClippedSum
    gradients: GradientMethod
    secure_noise: bool

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
            expected_batch_size: the divisor of the sum, fixed and public.
            noise_of_step: `Mechanism.noise_of_step`, for noise that is correlated over steps; by
                default sigma.
        """
        C = self.clipped_sum.policy.max_grad_norm
        noise_std = (noise_multiplier or 1.0) * C / expected_batch_size
        for optimizer in inner_optimizers(inner):
            if isinstance(optimizer, MomentumSGD):
                optimizer.noise_std = noise_std
        return DPOptimizer(
            inner,
            self.parameters,
            noise_multiplier=noise_multiplier if noise_of_step is None else noise_of_step,
            max_grad_norm=C,
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
        max_grad_norm: C; the ledger's, if there is one.
        clipped_sum_type: the plan passes one that allocates its memory up front.
    """
    policy = clip_policy(parameters, privacy, max_grad_norm=max_grad_norm)
    clipped_sum = clipped_sum_type(parameters, groups, policy)
    gradients = BUILD[privacy.gradient_method](model, fsdp_modules, clipped_sum, privacy)
    return PrivateStep(model, parameters, clipped_sum, gradients, privacy.secure_noise)
