"""Checks of the machine before a run: kernels for its model, and enough memory on its hosts.

The memory is that of blocks' inputs that `activation_checkpoint.offload_inputs` keeps there, and of
the copy of the state that a save beside the run makes (`checkpoint.async_mode`). Not counted are
each process's own (libraries, the CUDA context, communication: some GiB a rank), samples, and the
state of a run that trains on CPUs.

Guarantee:
    Whether a run is refused depends on its configuration and on the memory that its machine has
    left, and is the same on all ranks. This assumes that the index of the records, some MiB, does
    not tip the balance.
"""

import os
from typing import NamedTuple

import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dp.base.process import Fault
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees, most_tokens, trains_one_sample
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.distributed.host_memory import available_bytes, page_locked_bytes
from torchtitan_dp.distributed.windows import check_softcap
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import parameter_count, shape, trained_count

GIB = 2**30


def check_attention(config: JobConfig, args: ModelArgs) -> None:
    """Refuse a ring of fp32 with grouped queries on an accelerator: flash and cuDNN take 16 bits
    only, and the memory-efficient kernel no grouped queries."""
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
            f"parallelism.context_parallel_degree = {config.parallelism.context_parallel_degree}"
        )


class HostMemory(NamedTuple):
    """The memory of one rank on its host, in bytes."""

    inputs: int  # page-locked, of all blocks, where they are offloaded: of the longest samples
    copy: int  # of the state, while it is saved beside the run


def host_memory(config: JobConfig, args: ModelArgs) -> HostMemory:
    """Predict a rank's memory on its host, for a checked configuration; it needs no device."""
    training, checkpoint = config.training, config.checkpoint
    _, dp_shard, cp = mesh_degrees(config)
    size = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    inputs = copy = 0
    if config.activation_checkpoint.offload_inputs:
        at_once = 1 if trains_one_sample(config) else training.local_batch_size
        values = at_once * training.seq_len // cp * args.dim
        inputs = args.n_layers * page_locked_bytes(values * size)
    if checkpoint.enable and checkpoint.async_mode.lower() != "disabled":
        trained = trained_count(args)
        frozen = parameter_count(args) - trained  # kept in the dtype of compute
        moments = 1 if config.optimizer.name == MomentumSGD.__name__ else 2
        values = 1 + moments + config.ema.enable
        copy = (4 * values * trained + size * frozen) // (dp_shard * cp)
    return HostMemory(inputs, copy)


def refuse_lack(config: JobConfig, args: ModelArgs, ranks: int, available: int | None) -> None:
    """Refuse, by ValueError, a node that does not hold what its ranks offload; `available` are the
    bytes that they may still take together, None if that is not known."""
    if not config.activation_checkpoint.offload_inputs or available is None:
        return
    inputs, copy = host_memory(config, args)
    needed = ranks * (inputs + copy)
    if needed > available:
        saved = "checkpoint.async_mode = 'disabled', " if copy else ""
        raise ValueError(
            f"activation_checkpoint.offload_inputs = true: {ranks} ranks of a node need "
            f"{needed / GIB:,.2f} GiB of its memory (a rank {inputs / GIB:,.2f} for inputs and "
            f"{copy / GIB:,.2f} to save beside the run), of {available / GIB:,.2f} GiB; lower "
            f"training.seq_len, raise context_parallel_degree, {saved}or set it to false"
        )


def require_host_memory(config: JobConfig) -> None:
    """Refuse to train, by Fault on all ranks, where a node does not hold what its ranks offload.
    Collective under any configuration: an all-gather over the world of one line or nothing."""
    refusals, refusal = [""] * dist.get_world_size(), ""
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        refuse_lack(config, shape(config), ranks, available_bytes())
    except ValueError as error:
        refusal = str(error)
    dist.all_gather_object(refusals, refusal)
    for rank, line in enumerate(refusals):
        if line:
            raise Fault(f"{line} (found on rank {rank})")
