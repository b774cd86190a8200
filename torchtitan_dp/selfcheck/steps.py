"""Whole steps against the plain loop: clipped sums, noise, updates, and a checkpoint of one."""

import dataclasses
import hashlib
import math
import shutil
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.models.parameters import canonical_name, local_part
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.secure_noise import add_secure_gaussian_noise_
from torchtitan_dp.selfcheck.reference import Gradient, relative_error, rounding
from torchtitan_dp.selfcheck.run import DEVIATIONS, Measured, Ranks, worst
from torchtitan_dp.selfcheck.small import Small, Terms, whole
from torchtitan_dp.train_spec import build_optimizers

# `clip` aims at C (1 - 1e-5), so that rounding cannot exceed C.
_SAFETY = 1e-5


def clipped_sum(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Compare the sum of clipped gradients, and their norms, with the loop's."""
    reference = terms.reference()
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    total, norms = small.clipped_sum(*reference.samples)
    off = [_norm_error(found, reference.norms[sample]) for sample, found in norms.items()]
    bound = rounding(terms.dtype)
    return (
        Measured("the sum", relative_error(total, reference.total), bound + _SAFETY),
        Measured("the norms", worst(off), bound),
    )


def _norm_error(found: float, true: float) -> float:
    """Return a norm's relative error; where the loss is NaN, 1 if the norm is finite."""
    if math.isnan(true):
        return float(math.isfinite(found))
    return abs(found - true) / true if true else found


class Trained(Small):
    """A small model that the run's optimizer updates, with noise of sigma C over `batch`."""

    def __init__(
        self, terms: Terms, device: torch.device, C: float, sigma: float, batch: float
    ) -> None:
        super().__init__(terms, device, max_grad_norm=C)
        self.sum_std, self.batch, self._handed = sigma * C, batch, Gradient()
        self.optimizers = build_optimizers([self.model], terms.config.optimizer, self.dims)
        (self._inner,) = self.optimizers
        self._inner.register_step_pre_hook(self._record)
        self._noised = self.step.optimizer(
            self.optimizers, noise_multiplier=sigma, expected_batch_size=batch
        )

    def _record(self, *_: object) -> None:
        self._handed = {name: whole(p.grad) for name, p in self.parameters.items()}

    def update(self, key: bytes) -> Gradient:
        """Take a step on the sum; return the whole gradient that the optimizer got, by name, on the
        CPU."""
        self._noised.step(self.step.clipped_sum.take(), [(key, 1.0)])
        self.step.clipped_sum.reset()
        return self._handed

    def noise(self, name: str, key: bytes) -> Tensor:
        """Draw one parameter's noise as a single rank with all of it would; to the CPU."""
        shape = self.parameters[name].shape
        noise = torch.zeros(shape.numel(), device=self.device)
        add = add_secure_gaussian_noise_ if self.step.secure_noise else add_gaussian_noise_
        add(noise, std=self.sum_std, key=key, name=name, start=0)
        return noise.div_(self.batch).view(shape).cpu()

    def weights(self) -> Gradient:
        """Copy all whole weights to the CPU. Collective: an all-gather over dp_shard x cp."""
        return {canonical_name(n): whole(p) for n, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the weights and of the optimizer's state, by name."""
        return {
            f"{name}/{key}": local_part(value.detach())
            for name, parameter in self.parameters.items()
            for key, value in {"weight": parameter, **self._inner.state[parameter]}.items()
        }


def noise(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Measure two steps of noise alone: moments, tails, repeats, and its values on other meshes."""
    trained = Trained(terms, ranks.device, C=0.5, sigma=1.5, batch=4.0)
    keys = RootKey.from_debug_seed(2).stream("noise")
    differ, values = 0, []
    for step in range(2):
        key = keys.take(step)
        for name, drawn in trained.update(key).items():
            differ += int((drawn != trained.noise(name, key)).sum())
            values.append(drawn.flatten())
    z = torch.cat(values).double() / (trained.sum_std / trained.batch)
    moments = [_off(z**k, mean, var) for k, mean, var in _MOMENTS]
    beyond = {edge: math.erfc(edge / 2**0.5) for edge in (1.0, 2.0, 3.0, 4.0)}
    tails = [_off((z.abs() > edge).double(), p, p * (1 - p)) for edge, p in beyond.items()]
    return (
        Measured("moments", worst(moments), DEVIATIONS),
        Measured("tails", worst(tails), DEVIATIONS),
        Measured("repeated stretches", _repeats(torch.cat(values)), 0),
        Measured("values that differ from another mesh", differ, 0),
    )


# Powers of N(0, 1): the exponent, the mean, and the variance that its deviation is measured in.
_MOMENTS = ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0))


def _off(values: Tensor, mean: float, variance: float) -> float:
    """Return how far the mean of independent values is from `mean`, in its standard deviations."""
    return abs(values.mean().item() - mean) / (variance / values.numel()) ** 0.5


_ODD = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, 0x165667B19E3779F9, 0x27D4EB2F165667C5)


def _repeats(values: Tensor) -> int:
    """Count the runs of 4 consecutive fp32 values that occur elsewhere too, by a 64-bit hash: two
    of a million that differ have the same with probability 3e-8."""
    runs = values.view(torch.int32).long().unfold(0, 4, 1)
    mixed = (runs * torch.tensor(_ODD)).sum(1)
    return len(mixed) - len(torch.unique(mixed))


def updates(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Compare noisy steps with the loop's: the optimizer's gradients, and the new weights.

    The noise is as large as the sum, so that a fault of either shows.
    """
    reference, batch = terms.reference(), 5  # the divisor is no number of samples here
    sigma = sum(g.numel() for g in reference.total.values()) ** -0.5
    trained = Trained(terms, ranks.device, reference.max_grad_norm, sigma, batch)
    stream = RootKey.from_debug_seed(1).stream("noise")
    keys = [stream.take(step) for step in range(3)]
    before, handed = trained.weights(), []
    for key in keys:
        trained.accumulate(*reference.samples)
        handed.append(trained.update(key))
    # Of the first step: later ones begin with other weights.
    expected = {n: g / batch + trained.noise(n, keys[0]) for n, g in reference.total.items()}
    weights, by_hand = trained.weights(), _stepped(before, handed, trained)
    moved = {name: weights[name].double() - before[name].double() for name in expected}
    should = {name: by_hand[name] - before[name].double() for name in expected}
    content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
    frozen = weights.keys() - expected.keys()
    changed = sum(not torch.equal(weights[name], before[name]) for name in frozen)
    return (
        Measured("sum + noise", relative_error(handed[0], expected), 1e-5 + _SAFETY),
        # The weights are rounded to fp32: 6e-8 of 1, over a change of 1e-2.
        Measured("updated weights", relative_error(moved, should), 1e-4),
        Measured(
            "ranks whose weights differ", ranks.differing(hashlib.sha256(content).digest()), 0
        ),
        Measured("frozen weights that changed", changed, 0),
    )


def _stepped(weights: Gradient, gradients: list[Gradient], trained: Trained) -> Gradient:
    """Take the optimizer's steps in fp64 on the CPU."""
    by_hand = {name: nn.Parameter(weights[name].double()) for name in gradients[0]}
    config = dataclasses.replace(trained.terms.config.optimizer, implementation="for-loop")
    (inner,) = build_optimizers([nn.ParameterList(by_hand.values())], config, trained.dims)
    if isinstance(inner, MomentumSGD):
        inner.noise_std = trained.sum_std / trained.batch
    for gradient in gradients:
        for name, weight in by_hand.items():
            weight.grad = gradient[name].double()
        inner.step()
    return {name: weight.detach() for name, weight in by_hand.items()}


def checkpoint(ranks: Ranks, terms: Terms, place: str) -> Sequence[Measured]:
    """Save weights and optimizer state in `place`, overwrite and load them; count what differs."""
    trained = Trained(terms, ranks.device, C=1.0, sigma=1.0, batch=1.0)
    trained.accumulate(*terms.reference().samples)
    trained.update(RootKey.from_debug_seed(3).stream("noise").take(1))
    kept = {name: tensor.clone() for name, tensor in trained.state().items()}
    states = {**trained.model.state_dict(), "optimizer": trained.optimizers}
    made = tempfile.mkdtemp(prefix="selfcheck-", dir=place) if ranks.rank == 0 else ""
    folder = ranks.gather(made)[0]
    try:
        dcp.save(states, checkpoint_id=folder)
        with torch.no_grad():
            for tensor in trained.state().values():
                tensor.fill_(-1)
        safe_load.load(states, folder)
        ranks.gather(None)  # all have read it
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    loaded = trained.state()
    lost = sum(not torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    return (Measured("tensors that changed", lost, 0),)
