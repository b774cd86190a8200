"""The DP optimizer: clipped sum, plus noise, over the expected batch size, into TorchTitan's AdamW.

Guarantee:
    The gradient handed to the inner optimizer is (S + N(0, (sigma C)^2 I)) / b: S the clipped sum,
    of sensitivity C, and b the expected batch size, fixed and public. So each step is a Gaussian
    mechanism of noise multiplier sigma, whatever the inner optimizer makes of it. This holds for
    real numbers; `privacy.summation` says what becomes of it in fp32 and in fixed point. Each
    position of each parameter has one noise value, from (key, name, position) alone: shards do not
    share it, replicas do, and it is the same on every mesh. Assumes that a key is used for one step
    only.
"""

import math

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from torchtitan_dp.privacy.summation import FP32_SUM, Summation


class DPOptimizer:
    """Steps `optimizer` on the noised mean. Holds no state of its own: nothing to checkpoint."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: dict[str, nn.Parameter],
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        summation: Summation = FP32_SUM,
    ) -> None:
        """
        Args:
            optimizer: any `torch.optim.Optimizer` over exactly `parameters`.
            parameters: DTensors sharded on dim 0, by canonical name.
            summation: how noise is added, and to what; the `ClippedSum` must have the same.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._noise_std = noise_multiplier * max_grad_norm
        self._expected_batch_size = expected_batch_size
        self._summation = summation
        self._starts = {name: _flat_start(parameter) for name, parameter in parameters.items()}

    def step(self, clipped_sum: dict[str, Tensor], key: bytes) -> None:
        """Take one step.

        Args:
            clipped_sum: by name, this rank's flat shard of the sum, as `ClippedSum.take` has it;
                overwritten.
            key: this step's noise key, the same on all ranks, used once.
        """
        for name, parameter in self._parameters.items():
            gradient = clipped_sum[name]
            gradient = self._summation.add_noise_(
                gradient, std=self._noise_std, key=key, name=name, start=self._starts[name]
            )
            gradient.div_(self._expected_batch_size)
            parameter.grad = _as_gradient_of(parameter, gradient)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _flat_start(parameter: nn.Parameter) -> int:
    """The position, in the flattened whole parameter, of the first value of this rank's shard."""
    assert isinstance(parameter, DTensor)
    assert parameter.placements == (Shard(0),)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0] * math.prod(parameter.shape[1:])


def _as_gradient_of(parameter: nn.Parameter, flat: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        flat.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
