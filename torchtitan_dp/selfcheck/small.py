"""A small model, built as training builds it on the run's mesh, that takes private steps."""

import copy
import functools
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from torchtitan_dp import momentum
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models.families import family_of
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.loss import SampleLosses
from torchtitan_dp.models.parallelize import parallelize, trained_fsdp_modules
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.privacy.sampling import deal
from torchtitan_dp.selfcheck.reference import Samples
from torchtitan_dp.selfcheck.terms import Terms


@functools.cache
def mesh(device_type: str, degrees: tuple[int, int, int]) -> tuple[ParallelDims, ReductionGroups]:
    """Build a mesh once per process, as training does: groups keep threads and memory for good.

    Collective over the world.
    """
    dims = ParallelDims(*degrees, 1, 1, 1, 1, math.prod(degrees))
    dims.build_mesh()
    return dims, ReductionGroups.build(device_type, degrees)


class Small:
    """A model and its private step on made-up samples, with the optimizer's gradients."""

    def __init__(self, terms: Terms, device: torch.device, *, max_grad_norm: float) -> None:
        """
        Args:
            max_grad_norm: C.

        Collective over the world.
        """
        config, family = terms.config, family_of(terms.args)
        self.terms, self.device = terms, device
        self.dims, self.groups = mesh(device.type, terms.degrees)
        with torch.device("meta"):
            self.model = family.model(copy.deepcopy(terms.args))
        parallelize(self.model, self.dims, config)
        self.model.to_empty(device=device)
        self.model.init_weights()
        fill_adapters(self.model)
        self.parameters = trainable_parameters(self.model)
        self.step = build_step(
            config.privacy,
            self.model,
            self.parameters,
            trained_fsdp_modules(self.model),
            self.groups,
            max_grad_norm=max_grad_norm,
        )
        self.losses = SampleLosses(
            self.model,
            device,
            self.dims.get_optional_mesh("cp"),
            config.parallelism.context_parallel_load_balancer,
        )
        self.optimizers = momentum.build([self.model], config.optimizer, self.dims)
        self._handed: dict[str, torch.Tensor] = {}
        for inner in self.optimizers.optimizers:
            inner.register_step_pre_hook(self._record)

    def accumulate(self, samples: Samples) -> dict[int, float]:
        """Deal the samples out and add their clipped gradients to the sum.

        Returns:
            This data-parallel rank's samples -> their gradients' norms before clipping.

        Collectives: those of the gradient method.
        """
        gradients, batch_size = self.step.gradients, self.terms.config.training.local_batch_size
        replicate, shard, cp = self.terms.degrees
        ranks, rank = replicate * shard, dist.get_rank() // cp
        drawn = np.arange(len(samples.tokens_NT))
        dealt = deal(drawn, ranks=ranks, rank=rank, batch_size=batch_size)
        norms: dict[int, float] = {}
        gradients.start_step(bytes(32))  # a public key
        for slots in dealt:
            for slot_B in torch.from_numpy(slots).split(gradients.batch_size or batch_size):
                tokens_BT, labels_BT, weight_B = samples.take(slot_B)
                loss_B = self.losses(tokens_BT, labels_BT) * weight_B.to(self.device)
                valid_B, positions = (slot_B >= 0).to(self.device), slot_B.tolist()
                clip = gradients.accumulate_clipped(loss_B, valid_B, positions)
                norms.update(zip(slot_B.tolist(), clip.norm_B.tolist(), strict=True))
        norms.pop(-1, None)
        return norms

    def update(self, *, sigma: float, batch: float, key: bytes) -> dict[str, torch.Tensor]:
        """Add noise to the sum, divide, step the optimizer, and start the next sum.

        Args:
            sigma: the noise multiplier; 0 adds nothing.
            batch: the divisor.
            key: of the noise; public.

        Returns:
            The whole gradient that the optimizer got, by name, on the CPU.

        Collectives: those of `ClippedSum.take`, and an all-gather over dp_shard x cp.
        """
        optimizer = self.step.optimizer(
            self.optimizers, noise_multiplier=sigma, expected_batch_size=batch
        )
        momentum.set_noise_std(
            self.optimizers,
            noise_multiplier=sigma or 1.0,
            max_grad_norm=self.step.max_grad_norm,
            expected_batch_size=batch,
        )
        optimizer.step(self.step.clipped_sum.take(), [(key, 1.0)])
        self.step.clipped_sum.reset()
        handed, self._handed = self._handed, {}
        return handed

    def weights(self) -> dict[str, torch.Tensor]:
        """Copy whole weights to the CPU. Collective: an all-gather over dp_shard x cp."""
        return {name: _whole(parameter) for name, parameter in self.parameters.items()}

    def frozen(self) -> dict[str, torch.Tensor]:
        """Copy this rank's shards of the weights that are not trained, by name."""
        weights = {n: p.detach() for n, p in self.model.named_parameters() if not p.requires_grad}
        return {n: w.to_local().clone() for n, w in weights.items() if isinstance(w, DTensor)}

    def noise(self, name: str, *, sigma: float, batch: float, key: bytes) -> torch.Tensor:
        """Draw one parameter's noise as a single rank with all of it would; to the CPU."""
        shape, summation = self.parameters[name].shape, self.step.summation
        zeros = torch.zeros(shape.numel(), dtype=summation.dtype, device=self.device)
        std = sigma * self.step.max_grad_norm
        noise = summation.add_noise_(zeros, std=std, keys=[(key, 1.0)], name=name, start=0)
        return noise.div_(batch).view(shape).cpu()

    def _record(self, *_: object) -> None:
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            self._handed[name] = _whole(parameter.grad)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().cpu().clone()
