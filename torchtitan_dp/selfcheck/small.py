"""A scaled-down configuration, and the small model that takes private steps on its terms.

All settings that select code or kernels are kept. The numbers of layers and heads, the vocabulary
and the lengths of samples are cut. The tests build their models here, too, on terms of their own.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    ALIGNED_TOKENS,
    METHODS,
    feed_forward_chunk,
    ladder,
    mesh_degrees,
)
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed.devices import has_accelerator
from torchtitan_dp.distributed.ring import HEADS_APART_FROM
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.optimizer import as_gradient_of
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models.causal_lm.settings import ModelArgs, read_args
from torchtitan_dp.models.hugging_face import flavor, on_meta, shape
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.loss import SampleLosses, shard_of
from torchtitan_dp.models.parallelize import parallelize, takes_cudnn, trained_fsdp_modules
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.privacy.sampling import deal
from torchtitan_dp.selfcheck.reference import Gradient, Reference, reference_of

_VOCABULARY = 1009  # a prime, so that no mesh divides it
_TOKENS = 64  # of a sample of the small model on CPU, for each cp rank
_MOST_TOKENS = 2 * ALIGNED_TOKENS  # of a sample that attention is checked on, for each cp rank
_MOST_SAMPLES = 4  # of a microbatch

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "microbatch": {"feed-forward in tiles": {"in_tiles": True}},
    "grad_sample": {"unsharded": {"shard_grad_samples": False}},
    "ghost": {"two passes": {"ghost_passes": "two"}},
}
"""Variants of a gradient method: its name -> the variant's -> its settings (`Terms.but`)."""

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": _VOCABULARY}
_FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "gemma2"},  # soft caps, and windows in each second layer
    {"model_type": "mistral", "sliding_window": 512},
    {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
)
"""What attends, or sums, by kernels that a Llama does not run."""


@dataclass(frozen=True)
class Terms:
    """A scaled-down configuration, its small model, and how to check attention."""

    config: JobConfig
    args: ModelArgs
    lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (1, 1)  # of queries; of keys and values
    heads_apart: bool = False  # whether the run's attention is
    cudnn: bool = False  # whether it may be cuDNN's

    @property
    def degrees(self) -> tuple[int, int, int]:
        return mesh_degrees(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward; sums are fp32 on all terms."""
        return TORCH_DTYPE_MAP[self.config.training.mixed_precision_param]

    @property
    def label(self) -> str:
        """Dtype and mesh, for people."""
        mesh = " x ".join(map(str, self.degrees))
        compiled = " compiled" if self.config.compile.enable else ""
        kind = self.args.settings["model_type"]
        family = "" if kind == "llama" else f"{kind}, "
        return f"{family}{self.config.training.mixed_precision_param}{compiled}, mesh {mesh}"

    def reference(self) -> Reference:
        """Return samples for these terms, and the plain loop's results on them."""
        replicate, shard, _ = self.degrees
        # An odd number, so that a microbatch is padded.
        return reference_of(self.args, 7 + replicate * shard // 2 * 2, self.config.privacy)

    def but(self, *, in_tiles: bool = False, **privacy: Any) -> "Terms":
        """Return these terms with other settings of `[privacy]`, or a feed-forward in 3 tiles."""
        config = copy.deepcopy(self.config)
        config.privacy = dataclasses.replace(config.privacy, **privacy)
        if in_tiles:
            config.training.feed_forward_chunk = _third(config)
        return dataclasses.replace(self, config=config)


def given_terms(overrides: list[str], world_size: int) -> list[Terms]:
    """Return the terms of a configuration and, if it rounds or compiles, the same in plain fp32:
    rounding to bf16 hides a fault of some thousandths. In fp32 no query heads share keys: on a ring
    CUDA has no kernel for that. Raises ValueError, one line for the user."""
    config = load_config(overrides, world_size)
    if not config.privacy.enable:
        raise ValueError("privacy.enable = false: selfcheck is of private steps; set it to true")
    terms = scaled(config, shape(config))
    if terms.dtype == torch.float32 and not config.compile.enable:
        return [terms]
    plain = copy.deepcopy(terms)
    plain.config.training.mixed_precision_param = "float32"
    plain.config.compile.enable = False
    plain.args.n_kv_heads = plain.args.n_heads
    return [terms, dataclasses.replace(plain, heads=(terms.heads[0], terms.heads[0]))]


def default_terms(world_size: int) -> list[Terms]:
    """Return terms for every gradient method, on a mesh of all ranks as cp; from 4 ranks on, an
    even number, also of dp_shard 2 x cp. Weights are tied, the loss is in chunks; per-sample layers
    have whole logits in fp32, where two layers of one weight are summed over cp at once. Other
    families than Llama take `microbatch` in fp32."""
    found = []
    meshes = (1, 2) if world_size >= 4 and world_size % 2 == 0 else (1,)
    for shards, dtype, method in itertools.product(meshes, ("float32", "bfloat16"), METHODS):
        cp = world_size // shards
        overrides = (
            "--privacy.noise_multiplier=1 --privacy.delta=1e-5 "
            f"--privacy.gradient_method={method} --training.seq_len={512 * cp} "
            "--training.global_batch_size=4 --training.local_batch_size=2 "
            f"--training.mixed_precision_param={dtype} --activation_checkpoint.mode=none "
            f"--parallelism.context_parallel_degree={cp} "
            f"--parallelism.data_parallel_shard_degree={shards}"
        )
        if dtype == "float32" and METHODS[method].per_sample_layers:
            overrides += " --training.loss_chunk_tokens=0"
        config = load_config(overrides.split(), world_size)
        # In bf16 query heads share keys.
        args = flavor("1B" if dtype == "bfloat16" else "debug")
        args.tie_embeddings = True
        found.append(scaled(config, args))
        if (dtype, method) == ("float32", "microbatch"):
            of_each = (read_args(_SIZES | one, "selfcheck", "a family") for one in _FAMILIES)
            found += [scaled(config, of_one) for of_one in of_each]
    return found


def scaled(config: JobConfig, args: ModelArgs, tokens: int = 0) -> Terms:
    """Scale a checked configuration down, to samples of so many tokens for each cp rank, by default
    enough for every kernel of attention."""
    cp, scaled = config.parallelism.context_parallel_degree, copy.deepcopy(config)
    training = scaled.training
    tokens = tokens or (_MOST_TOKENS if has_accelerator() else _TOKENS)
    training.seq_len = min(training.seq_len, tokens * cp)
    training.local_batch_size = min(training.local_batch_size, _MOST_SAMPLES)
    if training.loss_chunk_tokens:
        training.loss_chunk_tokens = _third(scaled)
    training.feed_forward_chunk = _third(scaled) if feed_forward_chunk(config) else 0
    scaled.optimizer.lr = 1e-2  # so that fp32 resolves an update
    kv_heads = args.n_kv_heads
    shared = args.n_heads // kv_heads  # the query heads that share a key
    few = 2 if shared == 1 else 1
    sizes = {"vocab_size": _VOCABULARY, "max_seq_len": training.seq_len}
    small = args.with_heads(shared * few, few, n_layers=min(args.n_layers, 2), **sizes)
    lengths = tuple(rung for rung in ladder(config) if rung <= _MOST_TOKENS * cp)
    heads = shared * min(kv_heads, 2), min(kv_heads, 2)
    apart = config.training.seq_len // cp >= HEADS_APART_FROM
    of_attention = lengths or (_MOST_TOKENS * cp,), heads, apart, takes_cudnn(config, args)
    return Terms(scaled, small, *of_attention)


def _third(config: JobConfig) -> int:
    """Return a size of three chunks of a rank's tokens, of which the last is shorter."""
    return config.training.seq_len // config.parallelism.context_parallel_degree // 3 + 1


Mesh = tuple[ParallelDims, ReductionGroups]


@functools.cache
def mesh(device_type: str, degrees: tuple[int, int, int]) -> Mesh:
    """Build a mesh once per process, as training does: groups keep threads and memory for good, and
    DTensor's caches go on using those of the first of equal meshes. Collective over the world."""
    dims = ParallelDims(*degrees, 1, 1, 1, 1, math.prod(degrees))
    dims.build_mesh()
    return dims, ReductionGroups.build(device_type, degrees)


class Small:
    """A model laid over a mesh as training does, and its private step, on this rank."""

    def __init__(
        self, terms: Terms, device: torch.device, *, max_grad_norm: float, on: Mesh | None = None
    ) -> None:
        """Build it, on a mesh of these terms. Collective over the world."""
        self.terms, self.device, config = terms, device, terms.config
        self.batch_size = config.training.local_batch_size
        self.dims, self.groups = on or mesh(device.type, terms.degrees)
        self.model = on_meta(terms.args)
        parallelize(self.model, self.dims, config)
        self.model.to_empty(device=device)
        self.model.init_weights()
        fill_adapters(self.model)
        self.parameters = trainable_parameters(self.model)
        of_model = self.model, self.parameters, trained_fsdp_modules(self.model)
        self.step = build_step(config.privacy, *of_model, self.groups, max_grad_norm=max_grad_norm)
        self.gradients = self.step.gradients
        self.losses = SampleLosses(self.model, device, shard_of(self.dims, config))

    def accumulate(
        self, *samples: Tensor, drawn: np.ndarray | None = None, key: bytes = bytes(32)
    ) -> dict[int, float]:
        """Deal out `Samples` (weights are 1 by default), or the `drawn` ones; add their clipped
        gradients to the sum; return this data-parallel rank's norms before clipping, by index."""
        (tokens_NT, labels_NT, *weights), norms = samples, dict[int, float]()
        self.gradients.start_step(key)
        drawn = np.arange(len(tokens_NT)) if drawn is None else drawn
        ranks, rank = self.dims.dp_replicate * self.dims.dp_shard, dist.get_rank() // self.dims.cp
        dealt = deal(drawn, ranks=ranks, rank=rank, batch_size=self.batch_size)
        at_once = self.gradients.batch_size or self.batch_size
        for slot_B in (part for slots in dealt for part in torch.from_numpy(slots).split(at_once)):
            valid_B = slot_B >= 0
            tokens_BT = tokens_NT[slot_B].masked_fill(~valid_B[:, None], 0)
            labels_BT = labels_NT[slot_B].masked_fill(~valid_B[:, None], IGNORE_INDEX)
            loss_B = self.losses(tokens_BT, labels_BT)
            for weight_N in weights:
                loss_B = loss_B * weight_N[slot_B].where(valid_B, 1.0).to(self.device)
            valid_B, positions = valid_B.to(self.device), slot_B.tolist()
            clip = self.gradients.accumulate_clipped(loss_B, valid_B, positions)
            norms.update(zip(positions, clip.norm_B.tolist(), strict=True))
        norms.pop(-1, None)
        return norms

    def total(self, taken: dict[str, Tensor] | None = None) -> Gradient:
        """Return the step's sum over all ranks, or `taken`, made of it, whole on the CPU; begin the
        next step. Collectives: `ClippedSum.take`'s, and an all-gather over dp_shard x cp."""
        taken = self.step.clipped_sum.take() if taken is None else taken
        found = {n: whole(as_gradient_of(self.parameters[n], flat)) for n, flat in taken.items()}
        self.step.clipped_sum.reset()
        return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory with NaN as it is allocated, on any device, so that a gradient that nobody writes
    shows. Kernels are those of PyTorch's deterministic mode."""
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not deterministic serve as well
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            settings.fill_uninitialized_memory = before[1]


def whole(tensor: Tensor) -> Tensor:
    """Copy a whole tensor to the CPU. Collective: an all-gather over dp_shard x cp."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().cpu().clone()
