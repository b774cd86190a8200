"""The exponential moving average of weights (`[ema]`), after De et al. (2022, arXiv:2204.13650).

Guarantee:
    The average is a function of the weights after each step, the run's first weights and the
    configuration, so it is post-processing: epsilon covers every step's weights, and so their
    averages. Assumes that `update` is called after the optimizer's step, when weights are
    noised.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.parameters import local_part, trainable_parameters

WEIGHTS = "weights"
"""The part of the state with one average for each trained parameter, by the parameter's name."""


class WeightAverage:
    """The average of parameters over steps; each rank has its own shards, in fp32.

    The average a follows the weights w by a = d a + (1 - d) w, with d = min(decay, (1 + t) /
    (10 + t)) at an update that t others came before: until `decay` is reached, it reaches back over
    about a tenth of the steps, and forgets where it began. No collective is needed: replicas have
    equal weights, and so equal averages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Begin with all trained parameters, fp32, by canonical name; 0 <= `decay` < 1."""
        assert all(parameter.dtype == torch.float32 for parameter in parameters.values())
        self._parameters = dict(parameters)
        self._decay = decay
        self._averages = {name: p.detach().clone() for name, p in parameters.items()}
        self._swapped = False
        self.updates = 0

    def begin(self) -> None:
        """Begin with the parameters as they are now, unless an average of steps was loaded."""
        if self.updates == 0:
            for average, weight in self._pairs():
                average.copy_(weight)

    def update(self) -> None:
        """Follow the weights after a step of the optimizer."""
        assert not self._swapped, "the model has averages, not weights"
        d = min(self._decay, (1 + self.updates) / (10 + self.updates))
        for average, weight in self._pairs():
            average.lerp_(weight, 1 - d)
        self.updates += 1

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Swap the averages into the model, and its weights back bit by bit at the end. Weights
        that FSDP2 has gathered must have been freed before, and within."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint; tensors are its own, to be read or loaded into."""
        assert not self._swapped, "the model has averages, not weights"
        return {WEIGHTS: dict(self._averages), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of `state_dict` whose tensors a checkpoint was read into."""
        assert all(state_dict[WEIGHTS][name] is own for name, own in self._averages.items())
        self.updates = state_dict["updates"]

    def _swap(self) -> None:
        self._swapped = not self._swapped  # first, so that nothing is saved of half a swap
        for average, weight in self._pairs():
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, parameter in self._parameters.items():
            yield local_part(self._averages[name]), local_part(parameter.detach())


def ema_of(config: JobConfig, model: nn.Module) -> WeightAverage | None:
    """Build the average of all trained parameters; None without `[ema]`."""
    if not config.ema.enable:
        return None
    return WeightAverage(trainable_parameters(model), config.ema.decay)
