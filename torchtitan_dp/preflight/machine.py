"""Checks of the machine before a run: kernels for its model, and enough memory on its hosts.

The memory follows from the configuration and the model alone. Counted are the large parts: the
inputs of blocks that `activation_checkpoint.offload_inputs` keeps there, and the copy of a rank's
state while a checkpoint is written beside the run (`checkpoint.async_mode`). Not counted are each
process's own (libraries, the CUDA context, communication: some GiB a rank), samples and tensors
that are read one at a time, and the state of a run that trains on CPUs.

Guarantee:
    Whether a run is refused depends on its configuration and on the memory that its machine has
    left, and is the same on all ranks. This assumes that the index of the records, some MiB, does
    not tip the balance.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees, most_tokens
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.distributed.host_memory import available_bytes, page_locked_bytes
from torchtitan_dp.distributed.windows import check_softcap
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.flavors import parameter_count, trained_count
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.process import Fault

GIB = 2**30
MOST_RANKS = 8  # of a node, where a plan does not know it


def check_attention(config: JobConfig, args: ModelArgs) -> None:
    """Refuse a ring of fp32 with grouped queries on an accelerator: no kernel of PyTorch has it.

    Flash and cuDNN take 16 bits only, and the memory-efficient kernel no grouped queries.
    """
    cp, dtype = (config.parallelism.context_parallel_degree, config.training.mixed_precision_param)
    grouped = args.n_kv_heads != args.n_heads
    if cp > 1 and dtype == "float32" and grouped and has_accelerator():
        raise ValueError(
            f"training.mixed_precision_param = '{dtype}': with context_parallel_degree = {cp} and "
            f"{args.n_heads} heads that share {args.n_kv_heads} keys no kernel for this device "
            "attends in 32 bits; set it to 'bfloat16', or parallelism.context_parallel_degree to 1"
        )
    if args.settings.get("attn_logit_softcapping"):
        for window in set(args.windows()):
            check_softcap(config.training.seq_len, window)


def check_norms(config: JobConfig, args: ModelArgs) -> None:
    """Refuse more values a rank than the 32-bit indices of PyTorch's RMSNorm on CUDA can reach:
    beyond 2^32 it would read other rows, in silence."""
    tokens = most_tokens(config)
    width = max(args.dim, args.n_heads * args.head_dim)
    if has_accelerator() and tokens * width > 2**32:
        raise ValueError(
            f"training.seq_len = {config.training.seq_len}: {tokens:,} tokens a rank of "
            f"{width:,} values exceed the 2^32 that RMSNorm on CUDA can index; raise "
            "parallelism.context_parallel_degree = "
            f"{config.parallelism.context_parallel_degree}"
        )


@dataclass(frozen=True)
class HostMemory:
    """The predicted memory of one rank on its host, in bytes."""

    blocks: int  # whose inputs are offloaded
    buffer_bytes: int  # page-locked, of one block: its input of the longest samples
    copy_bytes: int  # of the state, while it is saved beside the run

    @property
    def inputs_bytes(self) -> int:
        """The offloaded inputs of all blocks."""
        return self.blocks * self.buffer_bytes

    @property
    def rank_bytes(self) -> int:
        """All that is counted."""
        return self.inputs_bytes + self.copy_bytes


def predict_host_memory(config: JobConfig, args: ModelArgs) -> HostMemory:
    """Predict a rank's memory on its host, for a checked configuration; it needs no device."""
    training, offloads = config.training, config.activation_checkpoint.offload_inputs
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    tokens = training.seq_len // config.parallelism.context_parallel_degree
    values = _samples_at_once(config) * tokens * args.dim
    return HostMemory(
        blocks=args.n_layers if offloads else 0,
        buffer_bytes=page_locked_bytes(values * dtype.itemsize) if offloads else 0,
        copy_bytes=_copy_bytes(config, args),
    )


def refuse_lack(config: JobConfig, args: ModelArgs, ranks: int, available: int | None) -> None:
    """Refuse, by ValueError, a node that does not hold what its ranks offload.

    Args:
        ranks: the number of ranks on the node.
        available: bytes that they may still take together; None if that is not known.
    """
    if not config.activation_checkpoint.offload_inputs or available is None:
        return
    memory = predict_host_memory(config, args)
    needed = ranks * memory.rank_bytes
    if needed <= available:
        return
    parts = f"{memory.inputs_bytes / GIB:,.1f} a rank for inputs of {memory.blocks} blocks"
    remedy = "a smaller training.seq_len, a larger parallelism.context_parallel_degree, "
    if memory.copy_bytes:
        parts += f", {memory.copy_bytes / GIB:,.1f} to save beside the run"
        remedy += "checkpoint.async_mode = 'disabled', "
    raise ValueError(
        f"activation_checkpoint.offload_inputs = true: the {_ranks(ranks)} of a node need "
        f"{needed:,} bytes of its memory ({needed / GIB:,.1f} GiB: {parts}), and {available:,} "
        f"({available / GIB:,.1f} GiB) are available; take {remedy}or set it to false"
    )


def require_host_memory(config: JobConfig) -> None:
    """Refuse to train where a node does not hold what its ranks offload.

    Collective under any configuration: an all-gather over the world of one line or nothing.

    Raises:
        Fault: the same on all ranks if any of them finds too little.
    """
    refusal = None
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        refuse_lack(config, shape(config), ranks, available_bytes())
    except ValueError as error:
        refusal = str(error)
    refusals: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    for rank, line in enumerate(refusals):
        if line is not None:
            raise Fault(f"{line} (found on rank {rank})")


@dataclass(frozen=True)
class NodeMemory:
    """The predicted memory of a node's ranks together, beside what this machine has left."""

    rank: HostMemory
    world_size: int
    ranks_here: int | None  # None if the run starts elsewhere
    available: int | None  # on this machine, which need not be a node of the run

    @property
    def ranks(self) -> int:
        """The number of ranks of a node; all of the run, up to `MOST_RANKS`, if it is not known."""
        return self.ranks_here or min(self.world_size, MOST_RANKS)

    @property
    def node_bytes(self) -> int:
        """All that is counted of a node."""
        return self.ranks * self.rank.rank_bytes

    def describe(self) -> str | None:
        """Describe a rank's and a node's memory in a line, if it is much."""
        rank, parts = self.rank, []
        if rank.inputs_bytes:
            each = rank.buffer_bytes / GIB
            parts.append(f"page-locked inputs of {rank.blocks} blocks, {each:,.2f} each")
        if rank.copy_bytes >= GIB or (parts and rank.copy_bytes):
            parts.append(f"{rank.copy_bytes / GIB:,.2f} to save beside the run")
        if not parts:
            return None
        assumed = f" (assumed: all, up to {MOST_RANKS})" if self.ranks_here is None else ""
        left = self.available
        here = "" if left is None else f"; this machine has {left / GIB:,.2f} GiB left"
        return (
            f"host memory (predicted): {rank.rank_bytes / GIB:,.2f} GiB a rank "
            f"({'; '.join(parts)}), {self.node_bytes / GIB:,.2f} GiB for a node's "
            f"{_ranks(self.ranks)}{assumed}{here}; not counted: what each process takes by itself, "
            "some GiB"
        )

    def for_programs(self) -> dict[str, Any]:
        """Return the part of the plan's `--json`: nothing of this machine, the same anywhere."""
        return {
            "inputs_gib": self.rank.inputs_bytes / GIB,
            "save_gib": self.rank.copy_bytes / GIB,
            "rank_gib": self.rank.rank_bytes / GIB,
            "node_gib": self.node_bytes / GIB,
            "node_ranks": self.ranks,
            "node_ranks_assumed": self.ranks_here is None,
        }


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _samples_at_once(config: JobConfig) -> int:
    """Return how many samples one forward pass has."""
    samples = config.training.local_batch_size
    if not config.privacy.enable:
        return samples
    return samples if METHODS[config.privacy.gradient_method].per_sample_layers else 1


def _copy_bytes(config: JobConfig, args: ModelArgs) -> int:
    """Return a rank's share of the state that a save beside the run copies to the host first."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.async_mode.lower() == "disabled":
        return 0
    _, dp_shard, cp = mesh_degrees(config)
    trained = trained_count(args)
    frozen = parameter_count(args) - trained
    moments = 1 if config.optimizer.name == MomentumSGD.__name__ else 2
    copies = 1 + moments + config.ema.enable
    kept = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize if frozen else 0
    return (4 * copies * trained + kept * frozen) // (dp_shard * cp)
