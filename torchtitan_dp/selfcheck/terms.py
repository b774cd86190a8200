"""The terms of a check: a configuration, scaled down to a model that takes seconds.

Everything that selects code or kernels is kept: mesh, dtype, method, head shape (size, and how many
query heads share a key), load balancer, rotation, activation checkpointing, compilation, kind of
sum and noise. The numbers of layers and heads, the vocabulary and samples' lengths are cut.
"""

import copy
import dataclasses
from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.config.derived import feed_forward_chunk, ladder
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed.attention import HEADS_APART_FROM
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.models.families import ModelArgs, on_meta
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.preflight.model import check_clipping
from torchtitan_dp.privacy.clipping import patterns_in_use

_VOCABULARY = 1009  # a prime, so that no mesh divides it
_TOKENS = 64  # of a sample of the small model, for each cp rank
_MOST_TOKENS = 128  # of a sample that attention is checked on, for each cp rank
_MOST_SAMPLES = 4  # of a microbatch


@dataclass(frozen=True)
class Terms:
    """A scaled-down configuration, its small model, and the shapes to check attention with."""

    config: JobConfig
    args: ModelArgs
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of queries; of keys and values
    heads_apart: bool  # whether the run's attention is

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

    From 4 ranks on, an even number, also on a mesh of dp_shard 2 x cp.
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
                config = load_config(overrides, world_size)
                args = shape(config)
                if dtype == "bfloat16":  # as in Llama 3.2 1B
                    args = dataclasses.replace(  # type: ignore[type-var]
                        args, dim=512, n_heads=8, n_kv_heads=2, tie_embeddings=True
                    )
                found.append(_scaled(config, args))
    return found


def _scaled(config: JobConfig, args: ModelArgs) -> Terms:
    """Scale a checked configuration down."""
    cp = config.parallelism.context_parallel_degree
    rungs = tuple(length for length in ladder(config) if length <= _MOST_TOKENS * cp)
    scaled = copy.deepcopy(config)
    training = scaled.training
    training.seq_len = min(training.seq_len, _TOKENS * cp)
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
    return Terms(scaled, small, rungs or (training.seq_len,), heads, apart)


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
