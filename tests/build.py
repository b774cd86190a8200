"""Small Llamas laid over a mesh as training does, and selfcheck's one-process loop for them.

Import it in worker processes only (it builds process groups), except for `reference_*`.
"""

import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import torch
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.gradients.clipped_sum import GradientMethod
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.step import PrivateStep, build_step
from torchtitan_dp.models.families import ModelArgs, family_of
from torchtitan_dp.models.llama3.model import LlamaArgs
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.loss import SampleLosses
from torchtitan_dp.models.parallelize import parallelize, trained_fsdp_modules
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.models.qwen3 import QwenArgs
from torchtitan_dp.privacy.sampling import deal
from torchtitan_dp.selfcheck import reference
from torchtitan_dp.selfcheck.reference import norm as norm
from torchtitan_dp.selfcheck.reference import reference_sum as reference_sum
from torchtitan_dp.selfcheck.reference import relative_error as relative_error

T = 32
VOCABULARY = 37  # no mesh divides it
ARGS = LlamaArgs(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=4, max_seq_len=T
)


QWEN = QwenArgs(
    dim=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=40,
    vocab_size=VOCABULARY,
    max_seq_len=T,
)


def config(*overrides: str, degrees: tuple[int, int, int] = (1, 1, 1)) -> JobConfig:
    """A checked configuration for the mesh (dp_replicate, dp_shard, cp)."""
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    mesh = [f"--parallelism.{n}_degree={d}" for n, d in zip(names, degrees, strict=True)]
    basics = [
        "--privacy.noise_multiplier=1",
        "--privacy.delta=1e-5",
        "--training.global_batch_size=4",
        "--training.mixed_precision_param=float32",
        f"--training.seq_len={T}",
        "--activation_checkpoint.mode=none",
    ]
    return load_config([*basics, *mesh, *overrides], int(np.prod(degrees)))


@dataclasses.dataclass
class Built:
    """A parallelized model and what accumulates its clipped gradients, on this rank."""

    model: Any
    step: PrivateStep
    gradients: GradientMethod
    losses: SampleLosses
    dims: ParallelDims
    groups: ReductionGroups
    parameters: dict[str, nn.Parameter]
    batch_size: int

    def clipped_sum(
        self,
        tokens_NT: torch.Tensor,
        labels_NT: torch.Tensor,
        draw: np.ndarray | None = None,
        key: bytes = bytes(32),
    ) -> tuple[dict[str, torch.Tensor], list[float]]:
        """The step's sum over all ranks as whole tensors by name, and this rank's norms."""
        norms = self.accumulate(tokens_NT, labels_NT, draw, key)
        total = self.gradients.clipped_sum.take()
        whole = {name: self.whole(name, flat) for name, flat in total.items()}
        self.gradients.clipped_sum.reset()
        return whole, norms

    def accumulate(
        self,
        tokens_NT: torch.Tensor,
        labels_NT: torch.Tensor,
        draw: np.ndarray | None = None,
        key: bytes = bytes(32),
    ) -> list[float]:
        """Deal the samples out over the data-parallel ranks and accumulate this rank's.

        Args:
            draw: those that are drawn; all, if None.
            key: of the step's projections.
        """
        norms = []
        self.gradients.start_step(key)
        at_once = self.gradients.batch_size or self.batch_size
        slots = torch.tensor(self.slots(np.arange(len(tokens_NT)) if draw is None else draw))
        for slot_B in slots.split(at_once) if len(slots) else ():
            loss_B = self.losses(*take(tokens_NT, labels_NT, slot_B))
            clip = self.gradients.accumulate_clipped(loss_B, slot_B >= 0, slot_B.tolist())
            norms.extend(clip.norm_B.tolist())
        return norms

    def slots(self, draw: np.ndarray) -> list[int]:
        """The samples that this rank's data-parallel rank is dealt, in order; -1 is padding."""
        ranks = self.dims.dp_replicate * self.dims.dp_shard
        rank = torch.distributed.get_rank() // self.dims.cp
        dealt = deal(draw, ranks=ranks, rank=rank, batch_size=self.batch_size)
        return [slot for slots in dealt for slot in slots.tolist()]

    def whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Gather a flat local shard."""
        from torchtitan_dp.optimizer import _as_gradient_of

        return _as_gradient_of(self.parameters[name], flat.clone()).full_tensor()


def take(
    tokens_NT: torch.Tensor, labels_NT: torch.Tensor, slot_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a batch; slot -1 is padding."""
    padding_B1 = (slot_B < 0)[:, None]
    tokens_BT = tokens_NT[slot_B].masked_fill(padding_B1, 0)
    return tokens_BT, labels_NT[slot_B].masked_fill(padding_B1, -100)


@functools.cache
def _mesh(degrees: tuple[int, int, int]) -> tuple[ParallelDims, ReductionGroups]:
    """Once a process, as in training: gloo's groups keep threads that poll until the end, and
    DTensor's caches go on using the groups of the first of several equal meshes."""
    replicate, shard, cp = degrees
    dims = ParallelDims(replicate, shard, cp, 1, 1, 1, 1, replicate * shard * cp)
    dims.build_mesh()
    return dims, ReductionGroups.build("cpu", degrees)


def build(
    degrees: tuple[int, int, int] = (1, 1, 1),
    *overrides: str,
    args: ModelArgs = ARGS,
    frozen: str | None = None,
    max_grad_norm: float = 1.0,
    edit: Any = None,
    adapter_std: float = 0.5,
) -> Built:
    """What `DPTrainer` builds, for a small model.

    Args:
        frozen: parameters whose name contains this are not trained.
        edit: called with the model after its weights are set.
        adapter_std: of each adapter's B.
    """
    job_config = config(*overrides, degrees=degrees)
    dims, groups = _mesh(degrees)
    with torch.device("meta"):
        model = family_of(args).model(copy.deepcopy(args))
    for name, parameter in model.named_parameters():
        if frozen is not None and frozen in name:
            parameter.requires_grad_(False)
    parallelize(model, dims, job_config)
    model.to_empty(device="cpu")
    model.init_weights()
    fill_adapters(model, std=adapter_std)
    if edit is not None:
        with torch.no_grad():
            edit(model)
    parameters = trainable_parameters(model)
    step = build_step(
        job_config.privacy,
        model,
        parameters,
        trained_fsdp_modules(model),
        groups,
        max_grad_norm=max_grad_norm,
    )
    losses = SampleLosses(
        model,
        torch.device("cpu"),
        dims.get_optional_mesh("cp"),
        job_config.parallelism.context_parallel_load_balancer,
    )
    batch_size = job_config.training.local_batch_size
    return Built(model, step, step.gradients, losses, dims, groups, parameters, batch_size)


def data(
    samples: int = 3, seed: int = 0, args: ModelArgs = ARGS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of different lengths, one of which ends in its first quarter.

    Args:
        args: of the model that they are for, of whose length the longest is.
    """
    generator, T = torch.Generator().manual_seed(seed), args.max_seq_len
    tokens_NT, labels_NT = (
        torch.randint(0, args.vocab_size, (samples, T), generator=generator) for _ in range(2)
    )
    for row in range(samples):
        labels_NT[row, (T // 5, T, T - 3, T // 2)[row % 4] :] = -100
    return tokens_NT, labels_NT


def reference_model(args: ModelArgs = ARGS, adapter_std: float = 0.5) -> Any:
    """The same weights in one process, without any parallelism."""
    return reference.reference_model(args, adapter_std)


def reference_gradients(
    model: nn.Module, tokens_NT: torch.Tensor, labels_NT: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Each sample's whole gradient, by name, of selfcheck's one-process loop."""
    return list(reference.reference_gradients(model, tokens_NT, labels_NT))
