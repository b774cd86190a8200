"""Momentum SGD whose learning rate is in AdamW's units: `optimizer.name = "MomentumSGD"`.

AdamW divides each coordinate's mean gradient by the root of its second moment, which with DP is
next to nothing but the noise's variance, estimated from few steps. Here the divisor is that
standard deviation itself, sigma C / B, which is known, public and constant:

    m <- beta1 m + (1 - beta1) g
    w <- (1 - lr weight_decay) w - lr (m / (1 - beta1^t)) / (sigma C / B)

So a learning rate for AdamW serves here, too; the state is one fp32 value a parameter instead of
two. Compared with AdamW in docs/results.md.

Guarantee:
    Post-processing of the noised gradients that `DPOptimizer` hands over: it reads nothing else.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config.job_config import Optimizer as OptimizerConfig

NAME = "MomentumSGD"


class MomentumSGD(Optimizer):
    """Bias-corrected momentum, in multiples of `noise_std`, with decoupled weight decay.

    Args:
        lr: of AdamW's scale.
        betas: the first is the momentum; the second is unused, as AdamW's would be here.
        noise_std: the noise's standard deviation in a coordinate of the mean gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        noise_std: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.noise_std = noise_std  # no state of a checkpoint: it follows from the run's terms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step from the parameters' gradients."""
        assert closure is None
        for group in self.param_groups:
            lr, beta, decay = group["lr"], group["betas"][0], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - beta)
                rate = lr / (1 - beta ** state["step"].item()) / self.noise_std
                parameter.mul_(1 - lr * decay).sub_(state["exp_avg"], alpha=rate)


def build(
    model_parts: list[nn.Module], config: OptimizerConfig, *others: Any
) -> OptimizersContainer:
    """Build TorchTitan's container of the optimizer that `config` names."""
    if config.name != NAME:
        return build_optimizers(model_parts, config, *others)
    settings = {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
    return OptimizersContainer(model_parts, MomentumSGD, {"lr": config.lr, **settings})


def set_noise_std(
    optimizers: Iterable[Optimizer],
    *,
    noise_multiplier: float,
    max_grad_norm: float,
    expected_batch_size: float,
) -> None:
    """Set the divisor of each `MomentumSGD`, sigma C / B; leave others alone."""
    for optimizer in optimizers:
        if isinstance(optimizer, MomentumSGD):
            optimizer.noise_std = noise_multiplier * max_grad_norm / expected_batch_size
