"""Which lengths a configuration pads samples to: `data.length_buckets`.

`data.buckets` says what that means for privacy.
"""

from torchtitan_dp.config import JobConfig

# As many graphs of one function as torch.compile makes by default before it gives up.
MOST_LENGTHS = 8


def ladder(config: JobConfig) -> tuple[int, ...]:
    """List the lengths that samples are padded to, rising; the last is `training.seq_len` = T.

    They are the powers of two times 2 x context_parallel_degree (which the ring can share out)
    below T, without those below T / 128: they would save little and cost a compilation each.
    """
    seq_len, rung = config.training.seq_len, 2 * config.parallelism.context_parallel_degree
    lengths = [seq_len]
    if config.data.length_buckets:
        powers = (rung << power for power in range((seq_len // rung).bit_length()))
        lengths = [length for length in powers if length < seq_len] + lengths
    return tuple(lengths[-MOST_LENGTHS:])
