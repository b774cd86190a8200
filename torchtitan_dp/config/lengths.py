"""The lengths that samples are padded to (`data.length_buckets`; privacy: `data.batching`)."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.distributed.cpu import has_accelerator

# torch.compile's default limit on graphs of one function.
MOST_LENGTHS = 8

# The least length of each of a rank's two parts of a sample on an accelerator: cuDNN refuses a
# single key, and memory-efficient kernels pad to this many rows.
ALIGNED_TOKENS = 32


def ladder(config: JobConfig) -> tuple[int, ...]:
    """List the lengths that samples are padded to, rising; the last is `training.seq_len` = T.

    Powers of two times 2 x context_parallel_degree (a ring needs multiples of that) between T / 128
    and T; shorter ones would save little and cost a compilation each. On an accelerator a ring
    has none below 64 x context_parallel_degree (`ALIGNED_TOKENS`).
    """
    seq_len, cp = config.training.seq_len, config.parallelism.context_parallel_degree
    rung, shortest = 2 * cp, 2 * cp
    if cp > 1 and has_accelerator():
        shortest = 2 * cp * ALIGNED_TOKENS
    lengths = [seq_len]
    if config.data.length_buckets:
        powers = (rung << power for power in range((seq_len // rung).bit_length()))
        lengths = [length for length in powers if shortest <= length < seq_len] + lengths
    return tuple(lengths[-MOST_LENGTHS:])
