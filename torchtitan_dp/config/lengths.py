"""Which lengths a configuration pads samples to: `data.length_buckets`.

`data.batching` says what that means for privacy.
"""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.distributed.cpu import has_accelerator

# As many graphs of one function as torch.compile makes by default before it gives up.
MOST_LENGTHS = 8

# Of each of a rank's two parts of a sample, on an accelerator: what kernels load at once. cuDNN
# refuses a single key, and the memory-efficient kernels pad to as many rows.
ALIGNED_TOKENS = 32


def ladder(config: JobConfig) -> tuple[int, ...]:
    """List the lengths that samples are padded to, rising; the last is `training.seq_len` = T.

    They are the powers of two times 2 x context_parallel_degree (which the ring can share out)
    below T, without those below T / 128: they would save little and cost a compilation each.
    On an accelerator, a ring has none below 64 x context_parallel_degree: `ALIGNED_TOKENS`.
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
