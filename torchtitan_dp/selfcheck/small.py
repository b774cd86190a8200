"""A scaled-down configuration, and the small model that takes private steps on its terms.

All settings that select code or kernels are kept: mesh, dtype, method, head shape (size, and the
number of query heads that share a key), load balancer, rotation, activation checkpointing,
compilation, kind of sum and noise. The numbers of layers and heads, the vocabulary and the lengths
of samples are cut.
"""

import copy
import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import ALIGNED_TOKENS, feed_forward_chunk, ladder, mesh_degrees
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed.attention import HEADS_APART_FROM
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models.families import ModelArgs, family_of, on_meta
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.lora import fill_adapters
from torchtitan_dp.models.loss import SampleLosses
from torchtitan_dp.models.parallelize import parallelize, takes_cudnn, trained_fsdp_modules
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.preflight.check import check_clipping
from torchtitan_dp.privacy.clipping import patterns_in_use
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.sampling import deal
from torchtitan_dp.privacy.secure_noise import add_secure_gaussian_noise_
from torchtitan_dp.selfcheck.reference import Samples
from torchtitan_dp.train_spec import build_optimizers

_VOCABULARY = 1009  # a prime, so that no mesh divides it
_TOKENS = 64  # of a sample of the small model on CPU, for each cp rank
_MOST_TOKENS = 2 * ALIGNED_TOKENS  # of a sample that attention is checked on, for each cp rank
_MOST_SAMPLES = 4  # of a microbatch


@dataclass(frozen=True)
class Terms:
    """A scaled-down configuration, its small model, and the shapes to check attention with."""

    config: JobConfig
    args: ModelArgs
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of queries; of keys and values
    heads_apart: bool  # whether the run's attention is
    cudnn: bool  # whether it may be cuDNN's

    @property
    def degrees(self) -> tuple[int, int, int]:
        return mesh_degrees(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward; sums are fp32 or wider on all terms."""
        return TORCH_DTYPE_MAP[self.config.training.mixed_precision_param]

    @property
    def place(self) -> str:
        """Dtype and mesh, for people."""
        mesh = " x ".join(map(str, self.degrees))
        compiled = " compiled" if self.config.compile.enable else ""
        return f"{self.config.training.mixed_precision_param}{compiled}, mesh {mesh}"

    @property
    def in_tiles(self) -> bool:
        """Whether the run's feed-forward is in tiles."""
        return feed_forward_chunk(self.config) > 0

    def with_tiles(self) -> "Terms":
        """Return the same terms with a feed-forward in three tiles."""
        config = copy.deepcopy(self.config)
        config.training.feed_forward_chunk = _third(config)
        return dataclasses.replace(self, config=config)

    def but(self, **privacy: object) -> "Terms":
        """Return the same terms with other settings of `[privacy]`."""
        config = copy.deepcopy(self.config)
        config.privacy = dataclasses.replace(config.privacy, **privacy)  # type: ignore[arg-type]
        return dataclasses.replace(self, config=config)


def given_terms(overrides: list[str], world_size: int) -> list[Terms]:
    """Return the terms of a configuration and, if it rounds or compiles, the same in plain fp32.

    Rounding to bf16 hides a fault of some thousandths. In fp32 query heads share no keys: CUDA has
    no such kernel on a ring.

    Raises:
        ValueError: one line for the user.
    """
    config = load_config(overrides, world_size)
    if not config.privacy.enable:
        raise ValueError("privacy.enable = false: selfcheck is of private steps; set it to true")
    args = shape(config)
    check_clipping(config, args)
    terms = _scaled(config, args)
    if terms.dtype == torch.float32 and not config.compile.enable:
        return [terms]
    plain = copy.deepcopy(terms.config)
    plain.training.mixed_precision_param = "float32"
    plain.compile.enable = False
    args = dataclasses.replace(terms.args, n_kv_heads=terms.args.n_heads)  # type: ignore[type-var]
    heads = terms.heads[0], terms.heads[0]
    return [terms, dataclasses.replace(terms, config=plain, args=args, heads=heads)]


def default_terms(world_size: int) -> list[Terms]:
    """Return terms for every gradient method, on a mesh of all ranks as cp.

    From 4 ranks on, an even number, also on a mesh of dp_shard 2 x cp. Weights are tied in bf16,
    with the loss in chunks, and in fp32 with whole logits, where two layers of one weight are
    summed over cp at once.
    """
    found = []
    for shards in (1, 2) if world_size >= 4 and world_size % 2 == 0 else (1,):
        cp = world_size // shards
        for dtype in ("float32", "bfloat16"):
            for method in METHODS:
                overrides = (
                    "--privacy.noise_multiplier=1 --privacy.delta=1e-5 "
                    f"--privacy.gradient_method={method} --training.seq_len={512 * cp} "
                    "--training.global_batch_size=4 --training.local_batch_size=2 "
                    f"--training.mixed_precision_param={dtype} --activation_checkpoint.mode=none "
                    f"--parallelism.context_parallel_degree={cp} "
                    f"--parallelism.data_parallel_shard_degree={shards}"
                ).split()
                if dtype == "float32":
                    overrides.append("--training.loss_chunk_tokens=0")
                config = load_config(overrides, world_size)
                args = shape(config)
                args = dataclasses.replace(args, tie_embeddings=True)  # type: ignore[type-var]
                if dtype == "bfloat16":  # as in Llama 3.2 1B
                    args = dataclasses.replace(  # type: ignore[type-var]
                        args, dim=512, n_heads=8, n_kv_heads=2
                    )
                found.append(_scaled(config, args))
    return found


def _scaled(config: JobConfig, args: ModelArgs) -> Terms:
    """Scale a checked configuration down."""
    cp = config.parallelism.context_parallel_degree
    rungs = tuple(length for length in ladder(config) if length <= _MOST_TOKENS * cp)
    scaled = copy.deepcopy(config)
    training = scaled.training
    tokens = _MOST_TOKENS if has_accelerator() else _TOKENS  # enough for every kernel of attention
    training.seq_len = min(training.seq_len, tokens * cp)
    training.local_batch_size = min(training.local_batch_size, _MOST_SAMPLES)
    if training.loss_chunk_tokens:
        training.loss_chunk_tokens = _third(scaled)
    training.feed_forward_chunk = _third(scaled) if feed_forward_chunk(config) else 0
    scaled.optimizer.lr = 1e-2  # so that fp32 resolves an update
    small, kv_heads = _small(args, training.seq_len), min(args.n_kv_heads or args.n_heads, 2)
    if groups := config.privacy.clipping_groups:
        names = trainable_parameters(on_meta(small))
        scaled.privacy.clipping_groups = patterns_in_use(names, groups)
    heads = _shared(args) * kv_heads, kv_heads
    apart = config.training.seq_len // cp >= HEADS_APART_FROM
    lengths = rungs or (_MOST_TOKENS * cp,)
    return Terms(scaled, small, lengths, heads, apart, takes_cudnn(config, args))


def _third(config: JobConfig) -> int:
    """Return a size of three chunks of a rank's tokens, of which the last is shorter."""
    return config.training.seq_len // config.parallelism.context_parallel_degree // 3 + 1


def _shared(args: ModelArgs) -> int:
    """Count the query heads that share a key."""
    return args.n_heads // (args.n_kv_heads or args.n_heads)


def _small(args: ModelArgs, seq_len: int) -> ModelArgs:
    """Return arguments of few layers and heads, each head as in `args`."""
    shared = _shared(args)
    kv_heads = 2 if shared == 1 else 1
    small: ModelArgs = args.with_heads(
        shared * kv_heads,
        kv_heads,
        n_layers=min(args.n_layers, 2),
        vocab_size=_VOCABULARY,
        max_seq_len=seq_len,
    )
    return small


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
        self.optimizers = build_optimizers([self.model], config.optimizer, self.dims)
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
        shape, std = self.parameters[name].shape, sigma * self.step.max_grad_norm
        noise = torch.zeros(shape.numel(), device=self.device)
        add = add_secure_gaussian_noise_ if self.step.secure_noise else add_gaussian_noise_
        add(noise, std=std, key=key, name=name, start=0)
        return noise.div_(batch).view(shape).cpu()

    def _record(self, *_: object) -> None:
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            self._handed[name] = _whole(parameter.grad)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().cpu().clone()
