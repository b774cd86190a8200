"""The DP optimizer: clipped sum, plus noise, over the expected batch size, into an inner optimizer,
TorchTitan's AdamW or Adam, or the momentum SGD below.

Guarantee:
    - The gradient handed to the inner optimizer is (S + N(0, (sigma C)^2 I)) / b: S the clipped
      sum, of sensitivity C (or, with estimated norms, that of `privacy.losses`), and b the expected
      batch size, fixed and public. So each step is a Gaussian mechanism of noise multiplier sigma,
      with any inner optimizer. Noise that is correlated over steps is that of `privacy.banded`.
      This holds for real numbers; `privacy.clipping` has fp32.
    - Each position of each parameter has one noise value, from (key, name, position) alone: shards
      do not share it, replicas do, and it is the same on every mesh. Assumes that noise comes from
      one `NoiseChain`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from torchtitan_dp.base.torch_private import local_slices
from torchtitan_dp.privacy.banded import NoiseChain, StepNoise
from torchtitan_dp.privacy.noise import add_gaussian_noise_, add_secure_gaussian_noise_


class DPOptimizer:
    """Steps `optimizer` on the noised mean. It has no state of its own."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: dict[str, nn.Parameter],
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        secure_noise: bool = False,
        free_gathered: Callable[[], None] | None = None,
    ) -> None:
        """Args:
        optimizer: over exactly `parameters`, DTensors sharded on dim 0, by canonical name.
        noise_multiplier: the standard deviation over C of the noise that a step draws: sigma
            or, with correlated noise, `Mechanism.noise_of_step`.
        free_gathered: frees gathered parameters, which the update would leave stale.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._noise_std = noise_multiplier * max_grad_norm
        self._expected_batch_size = expected_batch_size
        self._secure_noise = secure_noise
        self._free_gathered = free_gathered
        self._starts = {name: _flat_start(parameter) for name, parameter in parameters.items()}

    def step(self, clipped_sum: dict[str, Tensor], noise: StepNoise) -> None:
        """Take one step on this rank's flat shards, from `ClippedSum.take`, which are overwritten,
        and the step's noise, of one key on all ranks, from `NoiseChain.take`."""
        self._prepare(clipped_sum, noise)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def rehearse(self, clipped_sum: dict[str, Tensor], column: Sequence[float]) -> None:
        """Do what a step does, on noise of a public key that is thrown away, and change nothing; an
        inner optimizer without state gets the first step's, all zeros."""
        self._prepare(clipped_sum, NoiseChain.rehearsal(column).take(0))
        for optimizer in inner_optimizers(self._optimizer):
            if not any(optimizer.state.values()):
                _make_state(optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    def require_steps(self, steps: int) -> None:
        """Refuse, by RuntimeError, an inner optimizer whose state has counted another number. A
        state that did not arrive with its weights changes no epsilon and stops no run: it would
        train on, worse."""
        counted = {
            int(optimizer.state[parameter]["step"]) if parameter in optimizer.state else 0
            for optimizer in inner_optimizers(self._optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if counted - {steps}:
            raise RuntimeError(f"weights are of step {steps}, the optimizer of {sorted(counted)}")

    def _prepare(self, clipped_sum: dict[str, Tensor], noise: StepNoise) -> None:
        """Free gathered weights, which an update makes stale, and set the noised gradients."""
        assert not (noise.is_correlated and self._secure_noise), "not proven on a grid"
        if self._free_gathered is not None:
            self._free_gathered()
        add = add_secure_gaussian_noise_ if self._secure_noise else add_gaussian_noise_
        for name, parameter in self._parameters.items():
            gradient = clipped_sum[name]
            std, start = self._noise_std, self._starts[name]
            draw = functools.partial(add, std=std, key=noise.key, name=name, start=start)
            noise.add_to(gradient, name, draw)
            gradient.div_(self._expected_batch_size)
            parameter.grad = as_gradient_of(parameter, gradient)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in TorchTitan's container, or the optimizer itself if it is none."""
    return getattr(optimizer, "optimizers", [optimizer])


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Take a step with gradients and a learning rate of 0, and set the state back to zeros."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad.zero_()
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def _flat_start(parameter: nn.Parameter) -> int:
    """Find where, in the flattened whole parameter, this rank's shard begins."""
    assert isinstance(parameter, DTensor)
    assert parameter.placements == (Shard(0),)
    return local_slices(parameter)[0].start * math.prod(parameter.shape[1:])


def as_gradient_of(parameter: nn.Parameter, flat: Tensor) -> DTensor:
    """Return a flat local shard as a gradient of its parameter's shape and placement."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        flat.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class MomentumSGD(Optimizer):
    """Momentum SGD whose learning rate is in AdamW's units: `optimizer.name = "MomentumSGD"`.

    AdamW divides each coordinate's mean gradient by the root of its second moment, which with DP is
    next to nothing but the noise's variance, estimated from few steps. Here the divisor is that
    standard deviation itself, `noise_std` = sigma C / B, which is known, public and constant:

        m <- beta1 m + (1 - beta1) g
        w <- (1 - lr weight_decay) w - lr (m / (1 - beta1^t)) / (sigma C / B)

    The state is one fp32 value a parameter instead of two; the second of `betas` is unused.
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
