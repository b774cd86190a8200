"""The one builder of private steps.

Training, the plan's fake step, the audit's game and the tests build their steps here, so that the
step that is predicted, attacked and tested is the step that trains.

Guarantee:
    The clipped sum and every optimizer of one `PrivateStep` have the same C, so that noise fits the
    sum's sensitivity. This rests on the guarantees of `clipped_sum` and `optimizer`.
"""

import functools
from dataclasses import dataclass

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod
from torchtitan_dp.gradients.fsdp import ReductionGroups, free_gathered
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.optimizer import DPOptimizer, MomentumSGD, inner_optimizers
from torchtitan_dp.privacy.clipping import clip_policy
from torchtitan_dp.privacy.settings import Privacy


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
            noise_of_step: the noise of a key of weight 1 over C, if not sigma, as
                `Mechanism.noise_of_step` has it.
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
        clipped_sum_type: the plan passes one that takes its memory at once.
    """
    policy = clip_policy(parameters, privacy, max_grad_norm=max_grad_norm)
    clipped_sum = clipped_sum_type(parameters, groups, policy)
    method = METHODS[privacy.gradient_method]
    gradients = method.build(model, fsdp_modules, clipped_sum, privacy)
    return PrivateStep(model, parameters, clipped_sum, gradients, privacy.secure_noise)
