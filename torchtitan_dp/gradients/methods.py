"""What `privacy` asks for, by name: the gradient method, and what its samples are added up in."""

from typing import Protocol

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_dp.config import Privacy
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.grad_sample import GradSampleGradients
from torchtitan_dp.gradients.microbatch import MicrobatchGradients
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.privacy.fixed_point import unit
from torchtitan_dp.privacy.summation import FixedPointSum, FloatSum, Summation


class GradientMethod(Protocol):
    """From per-sample losses to a `ClippedSum`."""

    @property
    def batch_size(self) -> int | None:
        """Samples that one call takes; None if any number."""

    def accumulate_clipped(self, loss_B: torch.Tensor, valid_B: torch.Tensor) -> Clip:
        """Backpropagate the losses, clip each sample's gradient, and add it.

        Args:
            loss_B: this rank's parts of the samples' losses; summed over cp they are the losses.
            valid_B: bool: False for a padding sample, which contributes exactly 0.
        """


def build_gradients(
    privacy: Privacy, model: nn.Module, fsdp_modules: list[FSDPModule], clipped_sum: ClippedSum
) -> GradientMethod:
    """The method that a checked configuration names.

    Args:
        model: parallelized for this configuration.
        fsdp_modules: one module of each FSDP2 group that holds a trainable parameter.
    """
    if privacy.gradient_method == "microbatch":
        return MicrobatchGradients(fsdp_modules, clipped_sum)
    assert privacy.gradient_method == "grad_sample", privacy.gradient_method
    return GradSampleGradients(model, clipped_sum, shard_grad_samples=privacy.shard_grad_samples)


def build_summation(
    privacy: Privacy, parameters: dict[str, nn.Parameter], max_grad_norm: float
) -> Summation:
    """What a checked configuration adds clipped gradients up in, and how it adds noise.

    Args:
        parameters: every trainable parameter, a DTensor: its shape is the whole's on every rank.
        max_grad_norm: C.
    """
    if not privacy.exact_sum:
        return FloatSum(privacy.secure_noise)
    assert privacy.secure_noise, "noise in fp32 would round what is summed exactly"
    values = sum(parameter.numel() for parameter in parameters.values())
    return FixedPointSum(unit(max_grad_norm, values))
